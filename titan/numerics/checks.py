"""Whether two trainings of the same three steps agree: tensor by tensor, with the bound of each check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan.numerics.differences import FP32_BOUND, compare_figures

Tensors = Mapping[str, Tensor]
Recorded = Mapping[str, Tensors]
"""Tensors by name: those of "state N" before the update of step N, of "gradients N", and of "end"."""
UPDATED = 1e-3
"""Largest difference of three updates in fp32, as a share of their norm. An adaptive optimizer divides by the
gradient's size, so that rounding of a small element, 1e-7 of the largest, is as large as any other in its update."""
PRECISION_RATIO = 2.0
"""How many times one device's rounding error a layout's may be, in lower precision."""
OTHER_EXPERTS = 0.1
"""Share of tokens for which a layout's router may choose other experts than one device's, in lower precision."""
PRECISION_FLOOR = 1e-3
"""Rounding error that counts as none, as a share of a gradient's norm."""


@dataclass(frozen=True)
class Check:
    """The result of one check: the largest difference, 0 where it is bitwise, and the largest that passes.

    `where` is the tensor with the largest difference, or the step; `count` is how many values or tensors were compared.
    """

    name: str
    worst: float
    bound: float
    where: str = ""
    count: int = 0

    @property
    def may_be_tie(self) -> bool:
        """Whether another choice of experts explains a failure: it moves values, but no bits that must be the same."""
        return self.bound > 0

    @property
    def passed(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.worst <= self.bound


def merge_ranks(ranks: Sequence[Recorded], field: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of all ranks by name, and the names of those of which two ranks have different copies."""
    merged: dict[str, Tensor] = {}
    different = []
    for rank, recorded in enumerate(ranks):
        for name, tensor in recorded[field].items():
            if not are_same(merged.setdefault(name, tensor), tensor):
                different.append(f"{name} on rank {rank}")
    return merged, different


def are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def check_replicas(name: str, ranks: Sequence[Recorded], field: str) -> Check:
    """Return whether ranks that hold the same tensor hold the same bits."""
    merged, different = merge_ranks(ranks, field)
    return Check(name, float(len(different)), 0.0, different[0] if different else "", len(merged))


def check_same(name: str, a: Tensors, b: Tensors) -> Check:
    """Return whether two states have the same tensors and bits."""
    names = sorted(a.keys() | b.keys())
    different = [n for n in names if n not in a or n not in b or not are_same(a[n], b[n])]
    return Check(name, float(len(different)), 0.0, different[0] if different else "", len(names))


def check_largest(name: str, a: Tensors, b: Tensors, bound: float = FP32_BOUND) -> Check:
    """Return the largest of max|a - b| / max|b|; infinite for a tensor that only one side has."""
    return _find_worst(name, bound, a, b, lambda n: _divide((a[n] - b[n]).abs().max(), b[n].abs().max()))


def check_updates(name: str, a: Tensors, b: Tensors, start: Tensors, bound: float = UPDATED) -> Check:
    """Return the largest of |a - b| / |b - start|, by the Euclidean norm: differences as a share of the updates."""
    return _find_worst(name, bound, a, b, lambda n: _divide((a[n] - b[n]).norm(), (b[n] - start[n]).norm()))


def check_rounding(name: str, a: Tensors, b: Tensors, exact: Tensors) -> Check:
    """Return the largest ratio of a layout's rounding error to one device's, both against fp32 on one device."""

    def compute_ratio(n: str) -> float:
        layout, one = (float((side[n].double() - exact[n].double()).norm()) for side in (a, b))
        least = max(one, PRECISION_FLOOR * float(exact[n].double().norm()))
        return layout / least if least else 0.0 if layout == 0 else math.inf

    return _find_worst(name, PRECISION_RATIO, a, b, compute_ratio)


def check_choices(name: str, counts: Tensors) -> Check:
    """Return the largest share, over routers, of given experts that one device would not have chosen.

    Args:
        counts: of each router, as of `RouteWatch.choices`.
    """
    shares = {router: float(other) / float(pinned) for router, (pinned, other) in counts.items()}
    worst = max(shares, key=lambda router: shares[router])
    return Check(name, shares[worst], OTHER_EXPERTS, worst, int(sum(pinned for pinned, _ in counts.values())))


def check_lines(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], key: str, bound: float) -> Check:
    """Return the largest relative difference of a metric over the steps; of texts, how many steps differ."""
    if len(a) != len(b):
        return Check(key, math.inf, bound, f"{len(a)} instead of {len(b)} steps")
    differences = {
        line["step"]: _compare_values(line.get(key), other.get(key)) for line, other in zip(a, b, strict=True)
    }
    step = max(differences, key=lambda s: differences[s])
    return Check(key, differences[step], bound, f"step {step}" if differences[step] else "", len(differences))


def _compare_values(a: Any, b: Any) -> float:
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(b):
        return compare_figures(a, b)
    return 0.0 if a == b else math.inf


def _find_worst(name: str, bound: float, a: Tensors, b: Tensors, measure: Any) -> Check:
    if not a and not b:
        return Check(name, math.inf, bound, "there is nothing to compare")
    missing = sorted(a.keys() ^ b.keys())
    if missing:
        side = "the layout" if missing[0] in b else "one device"
        return Check(name, math.inf, bound, f"{missing[0]}, which {side} has not", len(a.keys() | b.keys()))
    values = {n: measure(n) for n in b}
    worst = max(values, key=lambda n: math.inf if math.isnan(values[n]) else values[n])
    return Check(name, values[worst], bound, worst, len(values))


def _divide(difference: Tensor, size: Tensor) -> float:
    """Return the share; 0 of nothing where nothing differs."""
    return 0.0 if float(difference) == 0 else float(difference / size) if float(size) else math.inf
