"""Early losses and the ends of variants: how well they rank alike on these runs, and what stopping early would save.

A variant whose learning rate falls later loses most of its loss later, so early losses mislead where variants differ in
anything that changes the shape of the curve: schedule, learning rate, batch, length, optimizer, model. There stopping
is not offered before the learning rate has decayed. Another mixture of data or another seed leaves the shape as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.report.align import collect_differing_settings, find_common_measure
from titan.report.estimate import Member
from titan.report.findings import RunResult
from titan.report.rank import VariantCandidate
from titan.scaling.ranks import correlate_ranks

SHARE = 0.4
"""Share of the steps after which losses count as early: fixed, so that it is not chosen by the ends."""
EARLIEST = 0.3
"""Share of the steps before which a validation does not stand for that point."""
WINDOW = 0.05
"""Share of the steps over which training losses are averaged before it."""
LEAST_VARIANTS = 8
"""Finished variants without which nothing is said."""
SHAPELESS = (
    "dataset", "data", "parallelism", "memory", "compile", "layout", "devices", "hardware", "cluster", "checkpoint",
    "metrics", "debug", "profile",
)  # fmt: skip
"""Axes and facts that leave the shape of the curve as it is."""
LOWEST = 0.8
"""Rank correlation below which stopping is not offered."""


@dataclass(frozen=True)
class EarlyRanking:
    """How early losses rank variants.

    Attributes:
        variants: how many there are.
        correlation: of the ranks of early losses and ends (Spearman).
        saved: share of all steps that stopping the worst half early saves.
        keeps_best: whether the variant with the best end is in the better half early.
    """

    variants: int
    correlation: float
    saved: float
    keeps_best: bool


def rank_early_losses(early: Sequence[float], ends: Sequence[float], share: float = SHARE) -> EarlyRanking:
    """Return how the early losses of variants rank their ends.

    Args:
        early: loss of each variant after `share` of its steps.
        ends: final loss of each, in the same order.
        share: of the steps.
    """
    count = len(early)
    stopped = np.argsort(early, kind="stable")[count - count // 2 :]
    correlation = float(np.nan_to_num(correlate_ranks(early, ends)))  # equal losses rank nothing
    return EarlyRanking(count, correlation, (1 - share) * len(stopped) / count, int(np.argmin(ends)) not in stopped)


def note_early_losses(candidates: Sequence[VariantCandidate]) -> list[str]:
    """Return a sentence on the early losses of a comparison's finished variants; none where they are too few."""
    finished = [[m for m in candidate.members if _has_ended(m.run)] for candidate in candidates]
    measured = _measure_variants([members for members in finished if members])
    if len(measured) < LEAST_VARIANTS:
        return []
    early, ends = (list(side) for side in zip(*measured, strict=True))
    differs = collect_differing_settings([candidate.group for candidate in candidates])
    return [_describe(rank_early_losses(early, ends), list_shape_settings(differs))]


def list_shape_settings(differs: Mapping[str, object]) -> list[str]:
    """Return those of the settings in which variants differ that change the shape of the curve."""
    return [name for name in differs if name.partition(".")[0] not in SHAPELESS]


def _describe(ranking: EarlyRanking, shapes: Sequence[str]) -> str:
    found = (
        f"early losses at {SHARE:.0%} of the steps rank the {ranking.variants} variants as the ends do: "
        f"{ranking.correlation:.2f} (rank correlation)"
    ).replace("%", " %")
    if shapes:
        return (
            f"{found}; the variants differ in {', '.join(shapes[:4])}, which changes the shape of the curve, so "
            "stopping before the learning rate has decayed is not offered"
        )
    if ranking.correlation < LOWEST or not ranking.keeps_best:
        lost = "" if ranking.keeps_best else ", and the best is in the worse half there"
        return f"{found}{lost}: stopping early is not offered"
    return (
        f"{found}; stopping the worst half there would have saved {100 * ranking.saved:.0f} % and kept the best, on "
        "these runs"
    )


def _has_ended(run: RunResult) -> bool:
    return run.state == "finished" and run.decayed and run.validation is not None and bool(np.isfinite(run.validation))


def _measure_variants(variants: Sequence[Sequence[Member]]) -> list[tuple[float, float]]:
    """Return the mean early loss and end of each variant whose runs have both; none where no measure compares all."""
    measures = {find_common_measure(members[0].raw, variants[0][0].raw) for members in variants}
    if not measures or None in measures:
        return []
    by_bytes = "bits per byte" in measures
    pairs = [[_measure_run(m.run, by_bytes) for m in members] for members in variants]
    means = [[float(np.mean(side)) for side in zip(*runs, strict=True)] for runs in pairs]
    return [(early, end) for early, end in means if np.isfinite(early) and np.isfinite(end)]


def _measure_run(run: RunResult, by_bytes: bool) -> tuple[float, float]:
    """Return a run's early loss and its end, NaN where it has none.

    The early loss is the last validation before `SHARE` of the steps, or else the mean training loss there; this one
    only where all validate on the same set, so that they learn from the same data.
    """
    curves, limit, end = run.curves, SHARE * run.steps, run.bits if by_bytes else run.validation
    near = (curves.validation_steps <= limit) & (curves.validation_steps >= EARLIEST * run.steps)
    validated = (curves.bits_per_byte if by_bytes else curves.validation)[near]
    window = (curves.steps <= limit) & (curves.steps > limit - max(1.0, WINDOW * run.steps))
    trained = curves.losses[window & (not by_bytes)]
    early = validated[-1] if len(validated) else trained.mean() if len(trained) else np.nan
    return float(early), np.nan if end is None else float(end)
