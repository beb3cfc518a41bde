"""Which rank computes wrongly, from several computations of the same micro-batches. Free of collectives.

Kernels are deterministic if most ranks compute their own micro-batch twice with the same bits. Then two computations
are equal if their bits are. Else they are equal if the root mean squares of all results differ by no more than
`SPREAD_FACTOR` times the largest difference between the repetitions of any one rank: the spread, measured at once.

Of pairs that differ, only those count whose first differing module comes first in the model: what is behind it, and
what other ranks made of it, is a consequence. Two computations that agree outvote a third one. Where only two ranks
have computed the same, that one is wrong which does not repeat its own result, but the other's; else both are named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from titan.parallelism.replicas import RankName, ReplicaDifference

SPREAD_FACTOR = 4.0
"""How many times the spread of repetitions two ranks may differ, where kernels are not deterministic."""


@dataclass(frozen=True)
class Computation:
    """What the modules returned for a micro-batch: names in the order of the model, fingerprints, root mean squares."""

    names: tuple[str, ...]
    prints: tuple[int, ...]
    sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What was computed of one rank's micro-batch.

    Attributes:
        name: the rank's.
        trained: by it, in the step.
        repeats: by it, afterwards.
        auditor: the rank that computed it a second time.
        second: by the auditor.
        again: by the auditor, once more.
        third_rank: the rank that computed it a third time; None without one.
        third: by that rank.
    """

    name: RankName
    trained: Computation
    repeats: tuple[Computation, ...]
    auditor: int
    second: Computation
    again: Computation
    third_rank: int | None = None
    third: Computation | None = None


@dataclass(frozen=True)
class Judgement:
    """What the witnesses say.

    Attributes:
        difference: who is wrong, and the first module; None where all is within the spread.
        spread: of repetitions, relative; None where kernels are deterministic.
        decided: whether it is known which of the ranks is wrong.
    """

    difference: ReplicaDifference | None
    spread: float | None = None
    decided: bool = True

    def describe(self) -> str:
        """Return who is wrong, in one sentence without a full stop."""
        if self.difference is None:
            return self.describe_spread()
        if not self.decided:
            return self.difference.describe()
        return f"{self.difference.describe()}, for the same tokens and weights"

    def describe_spread(self) -> str:
        """Return how far repetitions differ, in one sentence without a full stop."""
        return f"kernels are not deterministic: audits compare within the spread of repetitions, {self.spread:.1e}"


def judge(witnesses: Sequence[Witness]) -> Judgement:
    """Return which ranks are wrong.

    Args:
        witnesses: of all ranks, by rank.
    """
    spread = None if _is_deterministic(witnesses) else _measure_spread(witnesses)
    first = {w.name.rank: _find_first(w.trained, w.second, spread) for w in witnesses}
    found = [index for index in first.values() if index is not None]
    if not found:
        return Judgement(None, spread)
    origin = min(found)
    concerned = [w for w in witnesses if first[w.name.rank] == origin]
    accused = {rank for w in concerned for rank in _accuse(w, spread)}
    involved = {rank for w in concerned for rank in (w.name.rank, w.auditor)}
    decided = involved != accused
    names = {w.name.rank: w.name for w in witnesses}
    odd = tuple(names[rank] for rank in sorted(accused))
    others = tuple(names[rank] for rank in sorted(involved - accused))
    return Judgement(
        ReplicaDifference(f"the result of {witnesses[0].trained.names[origin]}", 1, odd, others), spread, decided
    )


def _is_deterministic(witnesses: Sequence[Witness]) -> bool:
    """Return whether most ranks repeat their results bit by bit; one that does not is wrong."""
    repeated = sum(w.repeats[0].prints == w.repeats[1].prints for w in witnesses)
    return 2 * repeated >= len(witnesses)


def _measure_spread(witnesses: Sequence[Witness]) -> float:
    """Return the largest relative difference of a module's root mean square between repetitions of the median rank.

    The largest of all ranks would let one that computes wrongly now and then widen its bound; of two it still does.
    """
    return statistics.median_high(
        max(_compare_sizes(x, y) for a, b in combinations(w.repeats, 2) for x, y in zip(a.sizes, b.sizes, strict=True))
        for w in witnesses
    )


def _compare_sizes(x: float, y: float) -> float:
    """Return the relative difference of two numbers; infinite where one of them is not finite and the other is."""
    if x == y or (x != x and y != y):
        return 0.0
    difference = abs(x - y) / max(abs(x), abs(y))
    return difference if difference == difference else float("inf")


def _find_first(a: Computation, b: Computation, spread: float | None) -> int | None:
    """Return the index of the first module in which two computations differ; None if in none."""
    differs: Callable[[int], bool] = (
        (lambda i: a.prints[i] != b.prints[i])
        if spread is None
        else (lambda i: _compare_sizes(a.sizes[i], b.sizes[i]) > SPREAD_FACTOR * spread)
    )
    return next((index for index in range(len(a.names)) if differs(index)), None)


def _accuse(w: Witness, spread: float | None) -> set[int]:
    """Return which of the ranks are wrong that computed a micro-batch with different results."""

    def agree(a: Computation, b: Computation) -> bool:
        return _find_first(a, b, spread) is None

    own, auditor = w.name.rank, w.auditor
    if w.third is not None and agree(w.third, w.trained):
        return {auditor}
    if w.third is not None and agree(w.third, w.second):
        return {own}
    if w.third is None and agree(w.repeats[0], w.second):
        return {own}
    if w.third is None and agree(w.again, w.trained):
        return {auditor}
    return {own, auditor}
