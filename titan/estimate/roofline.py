"""The roofline of a training step on one device: the least time for its FLOPs and memory traffic. Free of torch.

Operations run one after the other, so their times add up: matmuls at the measured speed of a large matmul, attention at
a fraction of it, and everything else at the measured bandwidth of a copy, as if the compiler fused all it can (the
roofline model: Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

ATTENTION = {"cuda": 0.65, "cpu": 0.5}
"""Speed of attention, forward and backward, as a fraction of a large matmul's: an assumption, about what
FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) reaches on an H100; on a CPU a guess."""
SORTING_BYTES = 48.0
"""Bytes that a router moves for each score, in float32 and int64: an assumption."""


@dataclass(frozen=True)
class DeviceRates:
    """Measured speeds of a device: FLOP/s of a large matmul in the compute type and in 8 bits, where the device has
    these, bytes/s of a copy, read plus written, and FLOP/s of attention."""

    matmul: float
    matmul_8bit: float
    copy: float
    attention: float


@dataclass(frozen=True)
class Roofline:
    """The least seconds of a step by kind of operation, and the tokens of the step."""

    parts: Mapping[str, float]
    tokens: int

    @property
    def seconds(self) -> float:
        """The least seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """The highest possible throughput."""
        return self.tokens / self.seconds

    def describe(self) -> str:
        """Return the kinds of operations with their fractions of the step."""
        return ", ".join(f"{name} {part / self.seconds:.1%}" for name, part in self.parts.items() if part)


def select_rates(ceilings: Mapping[str, float], recipe: Recipe, device: str) -> DeviceRates:
    """Return the speeds that apply to `recipe`, from the ceilings that `titan.bench` measured."""
    matmul = ceilings[f"matmul_{recipe.precision.compute}_tflops"] * 1e12
    matmul_8bit = ceilings.get("matmul_float8_tflops", 0) * 1e12 or matmul
    return DeviceRates(matmul, matmul_8bit, ceilings["copy_gb_per_second"] * 1e9, ATTENTION[device] * matmul)


def compute_roofline(recipe: Recipe, microbatches: int, rates: DeviceRates) -> Roofline:
    """Return the roofline of one step of `recipe` on one device.

    It counts the work of the step and no more: attention without the causally masked half, the recomputation that the
    memory axis asks for, and one pass over memory for each tensor that an operation, fused with its neighbours, reads
    or writes.
    """
    tokens = recipe.training.rows * recipe.model.count_row_tokens(recipe.training.seq_len)
    matmul, matmul_8bit = _count_matmul_flops(recipe)
    heads = recipe.model.head_matmuls().values()
    head_outputs = sum(head.outputs * head.compute_token_share(1) for head in heads)
    return Roofline(
        {
            "matmuls": tokens * matmul / rates.matmul,
            "8-bit matmuls": tokens * matmul_8bit / rates.matmul_8bit,
            "attention": tokens * _count_attention_flops(recipe) / rates.attention,
            "casts": _count_cast_bytes(recipe, microbatches) / rates.copy,
            "elementwise": tokens * _sum_elementwise_bytes(recipe) / rates.copy,
            "loss": tokens * 3 * recipe.precision.bytes * head_outputs / rates.copy,
            "clipping and optimizer": count_update_bytes(recipe) / rates.copy,
        },
        tokens,
    )


def _compute_recomputed_share(recipe: Recipe) -> float:
    """Return the fraction of the blocks' forward that is recomputed; 0 for selective checkpointing and budgets."""
    memory, layers = recipe.memory, recipe.model.layers
    return {"full": 1.0, "every_n": layers // memory.every / layers}.get(memory.checkpointing, 0.0)


def _count_matmul_flops(recipe: Recipe) -> tuple[float, float]:
    """Return FLOPs per token of the linear layers, forward and backward: in the compute type, and in 8 bits."""
    matmuls, heads = recipe.model.linear_layers(), recipe.model.head_matmuls()
    quantized = set(recipe.precision.select_layers(matmuls).quantized)
    totals = [0.0, 0.0]
    for name, matmul in matmuls.items():
        recomputed_flops = 0.0 if name in heads else 2 * _compute_recomputed_share(recipe)
        size = matmul.inputs * matmul.outputs * matmul.compute_token_share(1)
        totals[name in quantized] += (6 + recomputed_flops) * size
    totals[0] += (6 + 2 * _compute_recomputed_share(recipe)) * _count_routed_parameters(recipe.model)
    return totals[0], totals[1]


def _count_routed_parameters(model: Decoder) -> float:
    """Return the parameters of routers, and of experts those that compute a token."""
    linear = model.sum_over_blocks(lambda layer: sum(m.inputs * m.outputs for m in model.block_matmuls(layer).values()))
    idle = model.sum_over_blocks(model.expert_parameters) - model.sum_over_blocks(model.active_expert_parameters)
    return model.sum_over_blocks(model.block_matmul_parameters) - linear - idle


def _count_attention_flops(recipe: Recipe) -> float:
    """Return FLOPs per token of attention: 2 matmuls forward, 5 backward (arXiv:2307.08691, section 3.1)."""
    seq_len = recipe.model.count_row_tokens(recipe.training.seq_len)
    square = recipe.model.sum_over_blocks(
        lambda layer: recipe.model.attention_flops(seq_len, layer)
    )  # 6 matmuls of all pairs
    pairs = 12 if recipe.model.is_causal else 6
    return (7 + 2 * _compute_recomputed_share(recipe)) * square / pairs


def _count_cast_bytes(recipe: Recipe, microbatches: int) -> float:
    """Return bytes per step of casts: weights to the compute type, their gradients back, operands of 8-bit matmuls.

    A weight is cast in each micro-batch, and again where its block is recomputed; so is its gradient, which is
    accumulated over micro-batches. The input, the output gradient and the weight of an 8-bit matmul are each quantized
    twice, as they are and transposed.
    """
    model, precision = recipe.model, recipe.precision
    matmul_elements, blocks = model.matmul_parameters(), model.sum_over_blocks(model.block_matmul_parameters)
    microbatch_bytes = 0.0
    if precision.bytes != precision.weight_bytes:
        microbatch_bytes += (precision.bytes + precision.weight_bytes) * (
            2 * matmul_elements + _compute_recomputed_share(recipe) * blocks
        )
    layers = model.linear_layers()
    quantized = [layers[name] for name in precision.select_layers(layers).quantized]
    microbatch_bytes += sum(2 * (precision.bytes + 1) * p.inputs * p.outputs for p in quantized)
    accumulated = 3 * precision.weight_bytes * (microbatches - 1) * model.parameters()
    activations = sum(2 * (precision.bytes + 1) * (p.inputs + p.outputs) for p in quantized)
    return microbatches * microbatch_bytes + accumulated + recipe.training.global_batch * activations


def _sum_elementwise_bytes(recipe: Recipe) -> float:
    """Return bytes per token of norms, RoPE, SwiGLU's gate and residual additions, forward and backward."""
    model, element = recipe.model, recipe.precision.bytes
    forward, backward = (
        model.sum_over_blocks(partial(count_elementwise_bytes, model, element, part))
        + model.sum_over_blocks(partial(count_routing_bytes, model, element, part))
        for part in ("forward", "backward")
    )
    ends = 5 * model.dim + 2 * model.dim * (recipe.precision.weight_bytes / element + 1)  # last norm, embedding
    return (1 + _compute_recomputed_share(recipe)) * forward + backward + element * ends


def count_elementwise_bytes(
    model: Decoder, element: int, part: str, layer: int = 0, tensor: int = 1, sequence: int = 1
) -> float:
    """Return bytes per token of norms, RoPE, activations and residual additions of a block.

    Args:
        element: bytes of an activation element.
        tensor: ranks that heads and the feed-forward width are split over.
        sequence: ranks that the residual stream is split over.
    """
    stream, split = model.elementwise_elements(part, layer)
    return element * (stream / sequence + split / tensor)


def count_routing_bytes(
    model: Decoder, element: int, part: str, layer: int = 0, expert: int = 1, rows_only: bool = False
) -> float:
    """Return bytes per token of a router, of sorting tokens by expert and back, and of the experts' gates.

    Forward, in elements for each of a token's experts: rows are copied, the gate reads 2F and writes F, and the sum
    reads D; backward: rows are copied, the gradients of two matmuls are added, and then those of a token, and the gate
    reads 3F and writes 2F. Rows that ranks exchange are copied twice more in each pass. The router's scores are read
    and written three times in float32, and sorted.

    Args:
        expert: ranks that share the experts.
        rows_only: whether to count only the rows that experts get and return, which no part's graph has.
    """
    matmuls = model.expert_matmuls(layer)
    if not matmuls:
        return 0.0
    expert_size = sum(matmul.inputs * matmul.outputs for matmul in matmuls.values())
    active_experts = model.active_expert_parameters(layer) / expert_size
    row_bytes = active_experts * element * ((3 if part == "forward" else 6) + 4 * (expert > 1)) * model.dim
    if rows_only:
        return row_bytes
    width = next(matmul.outputs for name, matmul in matmuls.items() if name.endswith(".w1"))
    gate_bytes = active_experts * element * (3 if part == "forward" else 5) * width
    return row_bytes + gate_bytes + SORTING_BYTES * model.expert_parameters(layer) / expert_size


def count_update_bytes(recipe: Recipe) -> float:
    """Return bytes per step of gradient norm, clipping and the update, which reads all and writes all but gradients."""
    weight_bytes = recipe.precision.weight_bytes
    blocks = int(recipe.model.sum_over_blocks(recipe.model.block_matmul_parameters))
    state = recipe.optimizer.state_bytes(blocks, recipe.model.parameters() - blocks, weight_bytes)
    clipping = 3 * weight_bytes if recipe.training.clip_norm is not None else weight_bytes
    return float(recipe.model.parameters() * (clipping + 3 * weight_bytes) + 2 * state)
