"""The precision axis: the compute type, the matmuls in 8 bits, and the type of stored weights.

One mechanism serves every layout. Weights, gradients and optimizer state are fp32 (or bf16, by choice). A weight is
cast to the type of the activations where it is used, and its gradient is cast back before it is accumulated over
micro-batches or ranks; `accumulate=bf16` keeps what FSDP accumulates whole over micro-batches in bf16. The embedding is
looked up in the weight's type and then cast, so its output sets the activations' type. FSDP all-gathers in the compute
type the weights used only in it: a cast commutes with a gather, so the values are those of one device. Norms, rotary
embedding and loss compute in fp32 internally.

In addition, linear layers and experts may compute in 8 bits, see `titan.precision.low_precision`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.config.settings import setting
from titan.config.text_kinds import Label

if TYPE_CHECKING:
    import torch


CAPABILITY = {"float8": 8.9, "float8_rowwise": 8.9, "float8_rowwise_hp": 8.9, "mxfp8": 10.0}
"""The lowest CUDA compute capability with kernels for each format."""
QUANT_BLOCK = {"float8": 16, "float8_rowwise": 16, "float8_rowwise_hp": 16, "mxfp8": 32}
"""The number of which a matmul's sizes must be multiples in each 8-bit format: required by the kernels
(`torch._scaled_mm`), or the elements per scale (OCP Microscaling Formats, version 1.0)."""
HARDWARE = {
    8.9: "an Ada, Hopper or newer GPU, such as H100 (compute capability 8.9 or higher)",
    10.0: "a Blackwell GPU, such as B200 (compute capability 10.0 or higher)",
}


class Selection(NamedTuple):
    """The matmuls that are in 8 bits (`quantized`), and the reason for each of the others (`exclusions`)."""

    quantized: tuple[str, ...]
    exclusions: Mapping[str, str]

    def describe_exclusions(self) -> str:
        """Return the others with their reasons in one phrase; those of many blocks once."""
        counts = Counter((name.split(".", 2)[-1], reason) for name, reason in self.exclusions.items())
        return ", ".join(
            f"{count} x {name} ({reason})" if count > 1 else f"{name} ({reason})"
            for (name, reason), count in counts.items()
        )


class WeightSharding(NamedTuple):
    """How weights are sharded.

    Attributes:
        tensor: the tensor-parallel degree.
        sharded: ranks over which FSDP shards each tensor-parallel part.
        resharded: whether gathered weights are resharded to fewer ranks, which torch supports for plain weights only.
    """

    tensor: int = 1
    sharded: int = 1
    resharded: bool = False


@dataclass(frozen=True)
class Precision:
    """The types of computation and of stored weights."""

    compute: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type of matmuls and activations; auto: bf16 on devices with fast bf16, else fp32"
    )
    weights: Literal["fp32", "bf16"] = setting("fp32", "type of weights and their gradients")
    accumulate: Literal["fp32", "bf16"] = setting(
        "fp32",
        "type of gradients that FSDP accumulates whole over micro-batches (parallelism.accumulate); bf16: half the "
        "memory, each addition is rounded; sums over ranks stay fp32",
    )
    matmuls: Literal["compute", "float8", "float8_rowwise", "float8_rowwise_hp", "mxfp8"] = setting(
        "compute",
        "type of the matmuls of linear layers and experts; compute: as precision.compute; float8: per-tensor scaling; "
        "float8_rowwise: per-row scaling; float8_rowwise_hp: the same, with weight gradients in precision.compute; "
        "mxfp8: one scale per 32 elements",
    )
    skip: tuple[Label, ...] = setting(
        ("head",),
        "patterns of the linear layers and experts that stay in precision.compute, such as head, *.wk or layers.0.*",
    )
    min_size: int = setting(
        0,
        "linear layers and experts with fewer inputs or outputs on a rank stay in precision.compute",
        at_least=0,
    )
    float8_gather: bool = setting(
        True,
        "with matmuls=float8: FSDP all-gathers weights in float8 where possible, else in precision.compute",
        science=False,
    )
    emulate: bool = setting(
        False, "emulate 8-bit matmuls on hardware without them: slow, but the same rounding", science=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of matmuls and activations."""
        return _get_dtype(self.compute)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The torch type of weights and their gradients."""
        return _get_dtype(self.weights)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The torch type of gradients that are accumulated whole."""
        return _get_dtype(self.accumulate)

    @property
    def rowwise(self) -> bool:
        """Whether 8-bit matmuls have a scale for each row."""
        return self.matmuls.startswith("float8_rowwise")

    @property
    def weight_grads_in_8_bits(self) -> bool:
        """Whether the matmuls of weight gradients are in 8 bits too."""
        return self.eight_bit and self.matmuls != "float8_rowwise_hp"

    def drop_unused_settings(self) -> Precision:
        """Return the same without 8-bit settings if they have no effect, so that they do not change ids."""
        return self if self.eight_bit else Precision(self.compute, self.weights, self.accumulate)

    def describe(self) -> str:
        """Return one phrase for the console."""
        words = [self.compute] + ["bf16 weights"] * (self.weights == "bf16")
        words += ["gradients accumulated in bf16"] * (self.accumulate == "bf16")
        words += [f"{self.matmuls} matmuls{', emulated' * self.emulate}"] * self.eight_bit
        return ", ".join(words)

    @property
    def bytes(self) -> int:
        """Bytes per activation element."""
        return 2 if self.compute == "bf16" else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of a weight and of its gradient."""
        return 2 if self.weights == "bf16" else 4

    @property
    def accumulate_bytes(self) -> int:
        """Bytes per element of a gradient that FSDP accumulates whole."""
        return 2 if self.accumulate == "bf16" else 4

    @property
    def eight_bit(self) -> bool:
        """Whether linear layers compute in 8 bits."""
        return self.matmuls != "compute"

    def select_layers(self, layers: Mapping[str, Any], tensor: int = 1) -> Selection:
        """Return which matmuls are in 8 bits.

        Args:
            layers: a model's linear layers and experts (`titan.model.counts.Matmul`), by the name of their module.
            tensor: the tensor-parallel degree.
        """
        if not self.eight_bit:
            return Selection((), {})
        reasons = {name: self._find_exclusion(name, layer.split(tensor)) for name, layer in layers.items()}
        exclusions = {name: reason for name, reason in reasons.items() if reason}
        return Selection(tuple(name for name in layers if name not in exclusions), exclusions)

    def select_gathered(self, layers: Mapping[str, Any], sharding: WeightSharding) -> tuple[str, ...]:
        """Return the linear layers whose weights FSDP all-gathers in float8 instead of the compute type.

        Those with per-tensor float8 scaling whose weights shard evenly, except the head, which is gathered alone or is
        tied to the embedding.
        """
        if self.matmuls != "float8" or not self.float8_gather or sharding.sharded == 1 or sharding.resharded:
            return ()
        quantized = (name for name in self.select_layers(layers, sharding.tensor).quantized if name != "head")
        return tuple(name for name in quantized if layers[name].split(sharding.tensor).outputs % sharding.sharded == 0)

    def count_used_bytes(self, layers: Mapping[str, Any], sharding: WeightSharding) -> int:
        """Return the bytes of a tensor rank's weights as used, beside the stored ones: as FSDP gathers them, or casts.

        With per-tensor float8 scaling a weight that is not gathered is quantized in the matmul, and no cast is saved.
        """
        float8_bytes: dict[str, int] = {}
        if self.matmuls == "float8" and sharding.sharded == 1:
            float8_bytes = dict.fromkeys(self.select_layers(layers, sharding.tensor).quantized, 0)
        elif self.matmuls == "float8":
            float8_bytes = dict.fromkeys(self.select_gathered(layers, sharding), 1)
        cast = self.bytes if sharding.sharded > 1 or self.bytes < self.weight_bytes else 0
        sizes = {name: layer.split(sharding.tensor).size for name, layer in layers.items()}
        return sum(float8_bytes.get(name, cast) * size for name, size in sizes.items())

    def _find_exclusion(self, name: str, layer: Any) -> str | None:
        """Return why a linear layer stays in the compute type; None if it does not."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return "precision.skip"
        sizes, multiple = (layer.inputs, layer.outputs), QUANT_BLOCK[self.matmuls]
        if min(sizes) < self.min_size:
            return f"{min(sizes)} is below precision.min_size"
        odd = [size for size in sizes if size % multiple]
        return f"{odd[0]} is not a multiple of {multiple}" if odd else None


def _get_dtype(word: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if word == "bf16" else torch.float32
