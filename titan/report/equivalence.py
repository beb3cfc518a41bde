"""Whether a variant with the baseline's hyperparameters learns the same as the baseline: yes, no or undecided.

Layouts differ in the order of sums only. Over the first steps, where rounding has not grown yet, losses and gradient
norms must agree within strict bounds. Later, rounding grows as in any chaotic system, so only the final loss is
compared, for equivalence within a margin that was fixed in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.console.numbers import bounds, plural, signed
from titan.report import statistics
from titan.report.columns import Steps
from titan.report.findings import Answer, Interval, Learning, Needed, Numbers
from titan.report.runs import Member
from titan.report.statistics import ALPHA, EQUIVALENT, LEVEL, Difference

WORDS: dict[Answer, str] = {"yes": "same", "no": "not the same", "undecided": "inconclusive"}
"""The answers for people."""
FIRST = 5
"""Steps that must agree within the bounds."""
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 5e-2)}
"""Largest relative gaps of loss and gradient norm over the first steps, by the dtype of matmuls.

Measured with the debug model over five layouts on CPUs, with a warm-up of two steps: fp32 2e-7 and 7e-6, bf16 3e-5 and
1e-2. A wrong gradient shows as 1e-1 and more. From the eighth step on norms in bf16 differ by up to a factor of two.
"""
TINY = 1e-12


@dataclass(frozen=True)
class Parity:
    """Step-by-step agreement of two runs of one seed.

    Attributes:
        common: steps that are in both with a batch hash.
        unequal: of these, how many had another batch; first_unequal: the first such step.
        loss_gap, norm_gap: the largest over the first steps, relative; None where these are not in both.
        identical: whether all losses and the final validation are bitwise equal.
    """

    common: int
    unequal: int
    first_unequal: int | None
    loss_gap: float | None
    norm_gap: float | None
    identical: bool


def compared(variant: Sequence[Member], baseline: Sequence[Member], margin: float) -> Learning:
    """Return the answer with its reason.

    Args:
        variant: runs that should learn the same as the baseline.
        baseline: runs of the baseline.
        margin: equivalence margin of the final loss, in nats.
    """
    pairs = paired(variant, baseline)
    if not pairs:
        text = "inconclusive: the variant and the baseline have no seed in common"
        return Learning("undecided", text, None, None, None, None, margin, 0, None)
    parities = [parity(*pair) for pair in pairs]
    ends = [pair for pair in pairs if _end(pair) is not None]
    found = statistics.paired([_end(pair) or 0.0 for pair in distinct(ends)]) if ends else None
    answer, text, needed = _answer(pairs, parities, ends, found, margin, _repeated(baseline))
    compared = [p for p in parities if p.common]
    return Learning(
        answer=answer,
        text=f"{WORDS[answer]}: {text}",
        batches_equal=not any(p.unequal for p in compared) if compared else None,
        first_loss_gap=_largest([p.loss_gap for p in parities]),
        first_norm_gap=_largest([p.norm_gap for p in parities]),
        difference=found.interval(EQUIVALENT) if found else None,
        margin=margin,
        pairs=found.count if found else 0,
        needed=needed.count if needed else None,
        needed_range=needed,
    )


def paired(variant: Sequence[Member], baseline: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Return pairs of runs of equal seed and repeat; each run is in one pair, runs without a step are in none.

    Where a seed was run several times, those that came furthest are paired first.
    """
    others: dict[tuple[int, int], list[Member]] = {}
    for m in _furthest_first(baseline):
        if m.run.step:
            others.setdefault((m.raw.seed, m.raw.repeat), []).append(m)
    keys = [((m.raw.seed, m.raw.repeat), m) for m in _furthest_first(variant) if m.run.step]
    return [(m, others[key].pop(0)) for key, m in keys if others.get(key)]


def _furthest_first(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda m: (m.run.state != "finished", -m.run.step))


def distinct(pairs: Sequence[tuple[Member, Member]]) -> list[tuple[Member, Member]]:
    """Return the pairs without those of one seed with bitwise equal losses: a repeat of the same run counts once."""
    found = {(a.raw.seed, *_losses(a), *_losses(b)): (a, b) for a, b in reversed(pairs)}
    return list(reversed(found.values()))


def _losses(member: Member) -> tuple[float | None, float | None]:
    return member.run.loss, member.run.validation


def parity(a: Member, b: Member) -> Parity:
    """Compare two runs step by step."""
    one, two = _common(a.history.steps, b.history.steps)
    hashed = (one.hash != 0) & (two.hash != 0)
    unequal = np.flatnonzero(hashed & (one.hash != two.hash))
    same_start = len(one) and one.step[0] == a.history.steps.step[0] == b.history.steps.step[0]
    first = slice(0, FIRST if same_start else 0)
    return Parity(
        common=int(hashed.sum()),
        unequal=len(unequal),
        first_unequal=int(one.step[unequal[0]]) if len(unequal) else None,
        loss_gap=gap(one.loss[first], two.loss[first]),
        norm_gap=gap(one.norm[first], two.norm[first]),
        identical=_identical(a, b),
    )


def _common(a: Steps, b: Steps) -> tuple[Steps, Steps]:
    _, one, two = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    return a.at(one), b.at(two)


def gap(a: Numbers, b: Numbers) -> float | None:
    """Return the largest relative difference, infinite where only one side is finite; None without values."""
    if not len(a):
        return None
    odd: NDArray[np.bool_] = np.isfinite(a) != np.isfinite(b)
    if odd.any():
        return math.inf
    both = np.isfinite(a)
    return float(np.max(np.abs(a - b)[both] / np.maximum(np.abs(b[both]), TINY), initial=0.0))


def _identical(a: Member, b: Member) -> bool:
    same = np.array_equal(a.history.steps.step, b.history.steps.step)
    same = same and np.array_equal(a.history.steps.loss, b.history.steps.loss, equal_nan=True)
    return same and (a.run.validation == b.run.validation or not _one_set((a, b)))


def _answer(
    pairs: Sequence[tuple[Member, Member]],
    parities: Sequence[Parity],
    ends: Sequence[tuple[Member, Member]],
    found: Difference | None,
    margin: float,
    noise: Spread | None,
) -> tuple[Answer, str, Needed | None]:
    if odd := [p for p in parities if p.unequal]:
        first = min(p.first_unequal or 0 for p in odd)
        return "no", f"its batches differ ({_share(odd)} steps, the first is step {first})", None
    if wrong := _beyond(pairs, parities):
        return "no", wrong, None
    if all(p.identical for p in parities) and len(ends) == len(pairs):
        return "yes", f"all losses are bitwise equal, in {plural(len(pairs), 'pair')}", None
    if lost := _diverged(pairs):
        return "undecided", lost, None
    if found is None:
        begun = "batches and first steps agree" if any(p.loss_gap is not None for p in parities) else "nothing differs"
        return "undecided", f"{begun} so far, but no pair of runs has finished{_odd(pairs)}", None
    once = " (repeats with bitwise equal losses count once)" if len(ends) > found.count else ""
    return _of_ends(found, margin, noise, _measure(ends) + once)


def _diverged(pairs: Sequence[tuple[Member, Member]]) -> str | None:
    """Return the text about pairs of which one run diverged and the other did not; None without such pairs."""
    ways = [(a.run.diverged, b.run.diverged) for a, b in pairs]
    own, other = ways.count((True, False)), ways.count((False, True))
    if not own and not other:
        return None
    return f"of {plural(len(pairs), 'pair')}, {own} diverged in this variant only and {other} in the baseline only"


def _odd(pairs: Sequence[tuple[Member, Member]]) -> str:
    """Return what pairs lack that finished without two final losses; empty where none finished."""
    done = any(a.run.state == b.run.state == "finished" for a, b in pairs)
    return " with a final loss on both sides (one is missing or not finite)" if done else ""


def _share(parities: Sequence[Parity]) -> str:
    return f"{sum(p.unequal for p in parities):,} of {sum(p.common for p in parities):,}"


def _beyond(pairs: Sequence[tuple[Member, Member]], parities: Sequence[Parity]) -> str | None:
    """Return the text about first steps beyond the bounds; None where all agree."""
    for (member, _), found in zip(pairs, parities, strict=True):
        kind = str(member.raw.config.get("precision", {}).get("compute", "fp32"))
        bounds = BOUNDS.get(kind, BOUNDS["bf16"])
        for what, value, bound in zip(("loss", "gradient norm"), (found.loss_gap, found.norm_gap), bounds, strict=True):
            if value is not None and value > bound:
                differs = f"over the first {FIRST} steps its {what} differs by {value:.1e} (relative)"
                return f"{differs}; the bound for {kind} is {bound:.0e}"
    return None


def _of_ends(found: Difference, margin: float, noise: Spread | None, what: str) -> tuple[Answer, str, Needed | None]:
    """Return the answer by the final losses."""
    phrase = f"final {what} differs by {signed(found.estimate)} nats"
    if found.count < 2:
        return "undecided", *_of_one(phrase, margin, noise)
    within = found.interval(EQUIVALENT)
    phrase += f" {bounds(within.low, within.high, signed)} (90% interval)"
    phrase += f" over {plural(found.count, 'pair')}, margin {margin:g}"
    p = found.p_equivalent(margin)
    if p is not None and p < ALPHA:
        return "yes", phrase, None
    if _outside(found.interval(LEVEL), margin):
        return "no", phrase, None
    if abs(found.estimate) >= margin:
        return "undecided", f"{phrase}; more pairs are unlikely to show equivalence", None
    needed = statistics.with_range(
        lambda s: statistics.pairs_to_equal(margin, s, found.estimate), found.spread, found.freedom, found.count
    )
    return "undecided", f"{phrase}; {statistics.about(needed, 'pairs')} would decide", needed


def _of_one(phrase: str, margin: float, noise: Spread | None) -> tuple[str, Needed]:
    """Return the text for a single pair, and the pairs needed by the spread of the baseline's repeats."""
    phrase += " in the only pair; at least 2 pairs are needed"
    if noise is None:
        return phrase, Needed(2, 2, None, 1)
    needed = statistics.with_range(
        lambda s: statistics.pairs_to_equal(margin, s * math.sqrt(2)), noise.deviation, noise.freedom, noise.count
    )
    return f"{phrase}, {statistics.about(needed, 'pairs')} by the spread of the baseline's repeats", needed


def _outside(interval: Interval, margin: float) -> bool:
    if interval.low is None or interval.high is None:
        return False
    return interval.low > margin or interval.high < -margin


def _end(pair: tuple[Member, Member]) -> float | None:
    """Return variant minus baseline in final validation loss, else in training loss; None unless both finished."""
    a, b = pair[0].run, pair[1].run
    if a.state != "finished" or b.state != "finished":
        return None
    if (a.validation is not None or b.validation is not None) and _one_set(pair):
        return None if a.validation is None or b.validation is None else a.validation - b.validation
    return None if a.loss is None or b.loss is None else a.loss - b.loss


def _one_set(pair: tuple[Member, Member]) -> bool:
    """Return whether both validate on the same rows, which the science_id does not cover."""
    counts = [m.raw.config.get("evaluation", {}).get("tokens") for m in pair]
    return bool(counts[0] == counts[1])


def _measure(ends: Sequence[tuple[Member, Member]]) -> str:
    validated = [_one_set(pair) and all(m.run.validation is not None for m in pair) for pair in ends]
    return "validation loss" if all(validated) else "training loss"


@dataclass(frozen=True)
class Spread:
    """A standard deviation, its degrees of freedom, and of how many values it is."""

    deviation: float
    freedom: int
    count: int


def _repeated(members: Sequence[Member]) -> Spread | None:
    """The spread of the final validation loss over repeats of one seed; None where there are none, or none differ."""
    by_seed: dict[int, list[float]] = {}
    for m in members:
        if m.run.validation is not None:
            by_seed.setdefault(m.raw.seed, []).append(m.run.validation)
    several = [values for values in by_seed.values() if len(values) > 1]
    squares = sum(float(np.var(values)) * len(values) for values in several)
    freedom = sum(len(values) - 1 for values in several)
    return Spread(math.sqrt(squares / freedom), freedom, sum(map(len, several))) if squares else None


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
