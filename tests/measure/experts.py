"""Measure what experts cost: `python -m tests.measure suite=experts`.

The memory traffic of a layer against its matmuls, counted (`tests.measure.expert_traffic`); a grouped matmul against a
loop over the experts, in turn in this process; and whole steps, of which two sets of ranks take turns
(`tests.measure.features`): with expert parallelism against without, and with experts against the dense model that
computes each token with as many parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.measure import expert_traffic, features
from tests.measure.common import time_in_turn
from tests.measure.features import Overhead
from titan.run.compose import compose_run

if TYPE_CHECKING:
    from torch import Tensor

MOE = ("model=qwen3_moe_debug",)
DENSE = ("model=qwen3_debug", "model.layers=4", "model.head_dim=64", "model.ffn=640", "model.tied=false")
"""The model without experts that computes each token with as many parameters as `MOE`, but for its routers."""
Sides = tuple[tuple[str, ...], tuple[str, ...]]
"""Overrides of two runs."""
DEGREES = ((2, 2), (4, 2), (4, 4))
"""Ranks, and how many of them share the experts."""
HEADER = f"{'ratio of times':<36} {'ms':>8} {'ratio':>7} (quartiles)"


@dataclass(frozen=True)
class GroupedMatmul:
    """Rows, sorted by expert, times the weights [outputs, inputs] of so many experts."""

    rows: int
    experts: int
    inputs: int
    outputs: int

    @property
    def title(self) -> str:
        """Return what is compared, and the weights."""
        return f"grouped / loop, {self.experts} x [{self.inputs}, {self.outputs}]"


MATMULS = (GroupedMatmul(4096, 8, 256, 320), GroupedMatmul(4096, 128, 256, 64), GroupedMatmul(4096, 16, 2048, 768))
"""Of qwen3_moe_debug; of many small experts; of qwen3_30b_a3b on each of 8 ranks that share its experts."""


def list_step_pairs() -> dict[str, Sides]:
    """Return settings of the runs whose steps are compared by title: those of the divisor, and of the dividend."""
    pairs: dict[str, Sides] = {"step, experts / dense": (DENSE, MOE)}
    for ranks, degree in DEGREES:
        sharded = (*MOE, "parallelism=fsdp", f"cluster.devices={ranks}")
        pairs[f"step, {ranks} ranks, expert {degree} / 1"] = (sharded, (*sharded, f"parallelism.expert={degree}"))
    return pairs


def suite(text: str, base: Sequence[str], rounds: int, steps: int) -> Iterator[Overhead]:
    """Yield the ratio of each case whose title contains a text.

    Args:
        text: part of titles; empty: all.
        base: overrides of the runs.
        rounds: turns of each side.
        steps: steps of a turn, and repetitions of a matmul.
    """
    yield from expert_traffic.compare_traffic(text)
    device = compose_run(base).machine.device
    for matmul in MATMULS:
        if text in matmul.title:
            yield measure_matmul(matmul, device, rounds, steps)
    for title, sides in list_step_pairs().items():
        if text in title:
            runs = [compose_run([*base, *features.OFF, *side]) for side in sides]
            yield features.measure_overhead(title, runs, rounds, steps)


def measure_matmul(matmul: GroupedMatmul, device: str, rounds: int, repeats: int) -> Overhead:
    """Return the time of a grouped matmul in bfloat16, forward and backward, relative to that of the loop."""
    import torch

    from titan.model import expert_ops

    tensors = _make_tensors(matmul, device)
    functions = {
        "loop": (expert_ops.multiply_in_loop, expert_ops.compute_weight_grad_in_loop),
        "kernel": (expert_ops.multiply_with_kernel, expert_ops.compute_weight_grad_with_kernel),
    }
    sides = {name: partial(_run_both_passes, *pair, *tensors, repeats=repeats) for name, pair in functions.items()}
    times = time_in_turn(sides, rounds + 1, torch.device(device))  # the first round warms up
    first, second = times["loop"][1:], times["kernel"][1:]
    ratios = tuple(b / a for a, b in zip(first, second, strict=True))
    return Overhead(matmul.title, statistics.median(first) / repeats, ratios)


def _make_tensors(matmul: GroupedMatmul, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, weights, gradients of the results, and the ends of the rows of each expert, which differ."""
    import torch

    generator = torch.Generator().manual_seed(0)
    expert_ids = torch.randint(matmul.experts, (matmul.rows,), generator=generator)
    offsets = torch.bincount(expert_ids, minlength=matmul.experts).cumsum(0).to(torch.int32)
    shapes = (
        (matmul.rows, matmul.inputs),
        (matmul.experts, matmul.outputs, matmul.inputs),
        (matmul.rows, matmul.outputs),
    )
    x, weight, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    return x, weight, grad, offsets.to(device)


def _run_both_passes(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    offsets: Tensor,
    repeats: int,
) -> None:
    """Compute the results and both gradients."""
    for _ in range(repeats):
        multiply(x, weight, offsets)
        multiply(grad, weight.mT, offsets)
        weight_grad(x, grad, offsets)
