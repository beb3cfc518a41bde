"""Measure what experts cost: `python -m titan.bench --suite experts`.

A grouped matmul against a loop over the experts, in turn in this process; and whole steps, of which two sets of ranks
take turns (`titan.bench.features`): with expert parallelism against without, and with experts against the dense model
that computes each token with as many parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from titan.bench import features
from titan.bench.features import Overhead
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
class Product:
    """Rows, sorted by expert, times the weights [outputs, inputs] of so many experts."""

    rows: int
    experts: int
    inputs: int
    outputs: int

    @property
    def title(self) -> str:
        """Return what is compared, and the weights."""
        return f"grouped / loop, {self.experts} x [{self.inputs}, {self.outputs}]"


PRODUCTS = (Product(4096, 8, 256, 320), Product(4096, 128, 256, 64), Product(4096, 16, 2048, 768))
"""Of qwen3_moe_debug; of many small experts; of qwen3_30b_a3b on each of 8 ranks that share its experts."""


def steps_of() -> dict[str, Sides]:
    """Return settings of the runs whose steps are compared by title: those of the divisor, and of the dividend."""
    found: dict[str, Sides] = {"step, experts / dense": (DENSE, MOE)}
    for ranks, degree in DEGREES:
        sharded = (*MOE, "parallelism=fsdp", f"cluster.devices={ranks}")
        found[f"step, {ranks} ranks, expert {degree} / 1"] = (sharded, (*sharded, f"parallelism.expert={degree}"))
    return found


def suite(text: str, base: Sequence[str], rounds: int, steps: int) -> Iterator[Overhead]:
    """Yield the ratio of each case whose title contains a text.

    Args:
        text: part of titles; empty: all.
        base: overrides of the runs.
        rounds: turns of each side.
        steps: steps of a turn, and repetitions of a matmul.
    """
    device = compose_run(base).machine.device
    for product in PRODUCTS:
        if text in product.title:
            yield measure(product, device, rounds, steps)
    for title, sides in steps_of().items():
        if text in title:
            runs = [compose_run([*base, *features.OFF, *side]) for side in sides]
            yield features.measure(title, runs, rounds, steps)


def measure(product: Product, device: str, rounds: int, repeats: int) -> Overhead:
    """Return the time of a grouped matmul in bfloat16, forward and backward, relative to that of the loop."""
    import torch

    from titan.bench.bare_loop import seconds
    from titan.model import grouped

    tensors = _tensors(product, device)
    sides = (
        partial(_both_ways, grouped.multiply_in_loop, grouped.compute_weight_grad_in_loop, *tensors, repeats=repeats),
        partial(
            _both_ways, grouped.multiply_with_kernel, grouped.compute_weight_grad_with_kernel, *tensors, repeats=repeats
        ),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first warms up
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(seconds(sides[side], torch.device(device)))
    first, second = times[0][1:], times[1][1:]
    ratios = tuple(b / a for a, b in zip(first, second, strict=True))
    return Overhead(product.title, statistics.median(first) / repeats, ratios)


def _tensors(product: Product, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, weights, gradients of the results, and the ends of the rows of each expert, which differ."""
    import torch

    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(product.experts, (product.rows,), generator=generator)
    ends = torch.bincount(chosen, minlength=product.experts).cumsum(0).to(torch.int32)
    shapes = (
        (product.rows, product.inputs),
        (product.experts, product.outputs, product.inputs),
        (product.rows, product.outputs),
    )
    x, weight, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    return x, weight, grad, ends.to(device)


def _both_ways(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    ends: Tensor,
    repeats: int,
) -> None:
    """Compute the results and both gradients."""
    for _ in range(repeats):
        multiply(x, weight, ends)
        multiply(grad, weight.mT, ends)
        weight_grad(x, grad, ends)
