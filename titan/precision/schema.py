"""The precision axis: in which type to compute, which products in eight bits, and in which type weights are kept.

One mechanism serves every layout. Weights, gradients and optimizer state are fp32 (or bf16, by choice); a weight is
cast to the type of the activations where it is used, and its gradient returns to its own type before it is summed over
micro-batches or ranks. The embedding is looked up in the weight's type and then cast, so the activations' type is
decided in one place. FSDP gathers in the compute type what is used in it only: a cast commutes with a gather, so the
numbers stay those of one device. Norms, rotary embedding and loss compute in fp32 inside.

On top of that products may be computed in eight bits, see `titan.precision.low_precision`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple

from titan.config.settings import setting

if TYPE_CHECKING:
    import torch

    from titan.model.schema import Product

QUANT_BLOCK = {"float8": 16, "float8_rowwise": 16, "float8_rowwise_hp": 16, "mxfp8": 32}
"""For each way to compute a product in eight bits, of what its sizes must be multiples: what the kernels take
(`torch._scaled_mm`), or the numbers that share a scale (OCP Microscaling Formats, version 1.0)."""
CAPABILITY = {"float8": 8.9, "float8_rowwise": 8.9, "float8_rowwise_hp": 8.9, "mxfp8": 10.0}
"""CUDA's compute capability that has kernels for it."""
HARDWARE = {
    8.9: "an Ada, Hopper or newer GPU, such as H100 (compute capability 8.9 or higher)",
    10.0: "a Blackwell GPU, such as B200 (compute capability 10.0 or higher)",
}


class Selection(NamedTuple):
    """Which products are computed in eight bits, and of the others why not."""

    taken: tuple[str, ...]
    left: Mapping[str, str]

    def left_alone(self) -> str:
        """The others in a few words; those of many blocks once."""
        found = Counter((name.split(".", 2)[-1], why) for name, why in self.left.items())
        return ", ".join(
            f"{count} x {name} ({why})" if count > 1 else f"{name} ({why})" for (name, why), count in found.items()
        )


class WeightSharding(NamedTuple):
    """How weights are cut.

    Attributes:
        tensor: ranks that share each product.
        sharded: ranks over which FSDP cuts what each of these has.
        again: whether gathered weights are cut again among fewer ranks, which torch does for plain weights only.
    """

    tensor: int = 1
    sharded: int = 1
    again: bool = False


@dataclass(frozen=True)
class Precision:
    """In which type to compute."""

    compute: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type of products and activations; auto: bf16 where the device is fast at it, else fp32"
    )
    weights: Literal["fp32", "bf16"] = setting("fp32", "type of weights and their gradients")
    products: Literal["compute", "float8", "float8_rowwise", "float8_rowwise_hp", "mxfp8"] = setting(
        "compute",
        "type of the products with weights: as `compute`; float8: a scale a tensor; float8_rowwise: a scale a row; "
        "float8_rowwise_hp: the same, and gradients of weights in `compute`; mxfp8: a scale for each 32 numbers",
    )
    skip: tuple[str, ...] = setting(
        ("head",), "patterns of the products that stay in `compute`, such as head, *.wk or layers.0.*"
    )
    smallest: int = setting(0, "products with fewer inputs or outputs on a rank stay in `compute`", at_least=0)
    float8_gather: bool = setting(
        True, "products=float8: FSDP gathers weights in float8, not in `compute`, where it can", science=False
    )
    emulate: bool = setting(
        False, "compute eight-bit products as if the hardware had them: slow, but the same rounding", science=False
    )

    @property
    def bytes(self) -> int:
        """Bytes of an activation."""
        return 2 if self.compute == "bf16" else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return 2 if self.weights == "bf16" else 4

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of products and activations."""
        import torch

        return torch.bfloat16 if self.compute == "bf16" else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """The torch type of weights and their gradients."""
        import torch

        return torch.bfloat16 if self.weights == "bf16" else torch.float32

    @property
    def small(self) -> bool:
        """Whether any product is computed in eight bits."""
        return self.products != "compute"

    def plain(self) -> Precision:
        """The same without settings for eight bits where there are none, so that they tell no runs apart."""
        return self if self.small else Precision(self.compute, self.weights)

    def describe(self) -> str:
        """One phrase for people."""
        words = [self.compute] + ["weights too"] * (self.weights == "bf16")
        words += [f"products in {self.products}{', emulated' * self.emulate}"] * self.small
        return ", ".join(words)

    def choose(self, products: Mapping[str, Product], tensor: int = 1) -> Selection:
        """Which products are computed in eight bits.

        Args:
            products: a model's, by the name of their module.
            tensor: ranks that share each product.
        """
        if not self.small:
            return Selection((), {})
        reasons = {name: self._why_not(name, product.part(tensor)) for name, product in products.items()}
        left = {name: why for name, why in reasons.items() if why}
        return Selection(tuple(name for name in products if name not in left), left)

    def gathered(self, products: Mapping[str, Product], cut: WeightSharding) -> tuple[str, ...]:
        """The products whose weights FSDP gathers in float8, not in `compute`.

        Those in float8 with one scale, whose weights the ranks share evenly; but not the head, which is gathered alone,
        or is tied to the embedding.
        """
        if self.products != "float8" or not self.float8_gather or cut.sharded == 1 or cut.again:
            return ()
        taken = (name for name in self.choose(products, cut.tensor).taken if name != "head")
        return tuple(name for name in taken if products[name].part(cut.tensor).outputs % cut.sharded == 0)

    def used_bytes(self, products: Mapping[str, Product], cut: WeightSharding) -> int:
        """Bytes of all products' weights while they are used, beside those kept: as FSDP gathers them, or as cast.

        In float8 with one scale a weight that is not gathered is rounded where it is multiplied, and nothing is kept.
        """
        gathered, taken = set(self.gathered(products, cut)), set(self.choose(products, cut.tensor).taken)
        cast = self.bytes if cut.sharded > 1 or self.bytes < self.weight_bytes else 0
        at_once = taken if self.products == "float8" and cut.sharded == 1 else set()
        each = {name: 1 if name in gathered else 0 if name in at_once else cast for name in products}
        return sum(each[name] * product.inputs * product.outputs for name, product in products.items())

    def _why_not(self, name: str, product: Product) -> str | None:
        """Why a product stays in `compute`; None where it does not."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return "precision.skip"
        sizes, multiple = (product.inputs, product.outputs), QUANT_BLOCK[self.products]
        if min(sizes) < self.smallest:
            return f"{min(sizes)} is below precision.smallest"
        odd = [size for size in sizes if size % multiple]
        return f"{odd[0]} is no multiple of {multiple}" if odd else None
