"""The least time that a step can take on one device, in closed form, to hold what is measured against. Free of torch.

The device does one thing after the other, so the parts add up: products at the speed of a large one that was measured,
attention at a share of it, and all else at the measured speed of a copy, as if the compiler had fused whatever can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.run.schema import Recipe

ATTENTION = {"cuda": 0.65, "cpu": 0.5}
"""Share of a large product's speed at which attention runs forward and backward: an assumption, about what
FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) reaches on an H100; on a CPU a guess."""


@dataclass(frozen=True)
class Rates:
    """What a device was measured to do.

    Attributes:
        products: FLOP/s of a large product in the type to compute in.
        small: FLOP/s of a large product in eight bits; where it has none, `products`.
        copy: bytes/s of a copy, read and written ones together.
        attention: FLOP/s.
    """

    products: float
    small: float
    copy: float
    attention: float


@dataclass(frozen=True)
class Limit:
    """The least seconds of a step, by what they are spent on, and the tokens of the step."""

    parts: Mapping[str, float]
    tokens: int

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """The most that there can be."""
        return self.tokens / self.seconds

    def describe(self) -> str:
        """The parts as shares of the step."""
        return ", ".join(f"{name} {part / self.seconds:.1%}" for name, part in self.parts.items() if part)


def rates(ceilings: Mapping[str, float], recipe: Recipe, device: str) -> Rates:
    """The speeds that hold for `recipe`, from what `titan.bench` measured."""
    products = ceilings[f"matmul_{recipe.precision.compute}_tflops"] * 1e12
    small = ceilings.get("matmul_float8_tflops", 0) * 1e12 or products
    return Rates(products, small, ceilings["copy_gb_per_second"] * 1e9, ATTENTION[device] * products)


def limit(recipe: Recipe, microbatches: int, at: Rates) -> Limit:
    """The least time of a step of `recipe`, which has one device.

    The same work as the step's, and no more: of attention what is not causally masked; what the memory axis computes
    again; a pass over memory for each tensor that an operation, fused with its neighbours, has to read or write.
    """
    tokens = recipe.training.global_batch
    products, small = _products(recipe)
    return Limit(
        {
            "products": tokens * products / at.products,
            "products in eight bits": tokens * small / at.small,
            "attention": tokens * _attention(recipe) / at.attention,
            "casts": _casts(recipe, microbatches) / at.copy,
            "norms, rotation, gates, sums": tokens * _elementwise(recipe) / at.copy,
            "loss": tokens * 3 * recipe.precision.bytes * recipe.model.vocab / at.copy,
            "clipping and optimizer": _update(recipe) / at.copy,
        },
        tokens,
    )


def _again(recipe: Recipe) -> float:
    """The share of the blocks' forward pass that is computed again; what is selected or left to a compiler as none."""
    memory, layers = recipe.memory, recipe.model.layers
    return {"full": 1.0, "every_n": layers // memory.every / layers}.get(memory.checkpointing, 0.0)


def _products(recipe: Recipe) -> tuple[float, float]:
    """FLOPs a token of products with weights, forward and backward: in the type to compute in, and in eight bits."""
    products, taken = recipe.model.products(), set(recipe.precision.choose(recipe.model.products()).taken)
    totals = [0.0, 0.0]
    for name, product in products.items():
        again = 0.0 if name == "head" else 2 * _again(recipe)
        totals[name in taken] += (6 + again) * product.inputs * product.outputs
    return totals[0], totals[1]


def _attention(recipe: Recipe) -> float:
    """FLOPs a token of causal attention: two products forward, five backward (arXiv:2307.08691, section 3.1)."""
    model = recipe.model
    product = model.heads * model.head_size * recipe.training.seq_len  # 2 FLOPs each, for half of the pairs
    return model.layers * (7 + 2 * _again(recipe)) * product


def _casts(recipe: Recipe, microbatches: int) -> float:
    """Bytes a step: weights to the type to compute in and their gradients back; inputs of products to eight bits.

    A weight is cast in each micro-batch, and again where its block is computed again; so its gradient, which is added
    up where there are several. Of a product in eight bits the input and the output's gradient are cast twice, as they
    are and transposed, and so is the weight.
    """
    model, kinds = recipe.model, recipe.precision
    whole, block = model.matmul_parameters(), model.layers * model.block_matmul_parameters()
    each = 0.0
    if kinds.bytes != kinds.weight_bytes:
        each += (kinds.bytes + kinds.weight_bytes) * (2 * whole + _again(recipe) * block)
    small = [p for name, p in model.products().items() if name in kinds.choose(model.products()).taken]
    each += sum(2 * (kinds.bytes + 1) * p.inputs * p.outputs for p in small)
    summed = 3 * kinds.weight_bytes * (microbatches - 1) * model.parameters()
    activations = sum(2 * (kinds.bytes + 1) * (p.inputs + p.outputs) for p in small)
    return microbatches * each + summed + recipe.training.global_batch * activations


def _elementwise(recipe: Recipe) -> float:
    """Bytes a token of what is no product, forward and backward.

    Forward, in numbers of a block: two norms read one and write one of the width, two sums read two and write one,
    rotation reads and writes queries and keys, the gate reads two and writes one of the feed-forward width. Backward a
    norm reads two and writes one, a sum adds two gradients, the gate reads three and writes two.
    """
    model, number = recipe.model, recipe.precision.bytes
    turned = 2 * model.head_size * (model.heads + model.kv_heads)
    forward = 10 * model.dim + turned + 3 * model.ffn
    backward = 12 * model.dim + turned + 5 * model.ffn
    ends = 5 * model.dim + 2 * model.dim * (recipe.precision.weight_bytes / number + 1)  # last norm, embedding
    return number * (model.layers * ((1 + _again(recipe)) * forward + backward) + ends)


def _update(recipe: Recipe) -> float:
    """Bytes a step: the norm reads gradients, clipping scales them, the optimizer reads all and writes all but them."""
    kinds, blocks = recipe.precision, recipe.model.layers * recipe.model.block_matmul_parameters()
    state = recipe.optimizer.state_bytes(blocks, recipe.model.parameters() - blocks, kinds.weight_bytes)
    clipping = 3 * kinds.weight_bytes if recipe.training.clip_norm is not None else kinds.weight_bytes
    return float(recipe.model.parameters() * (clipping + 3 * kinds.weight_bytes) + 2 * state)
