"""Outcomes of runs: divergence, which is a result of the recipe, runs missing for other reasons, and outliers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titan.console.numbers import format_plural
from titan.report.findings import FailedRun, Outcomes, RunResult, Spike, State
from titan.report.runs import Member

OUTLIER_DEVIATIONS = 10.0
"""An outlier is so many times the median absolute deviation away: 6.7 standard deviations of a normal."""
FEWEST = 3
"""Seeds of a variant from which its outliers can be found."""
NAMED = 6
"""Runs that a note names."""
SEED = re.compile(r"[+~]*training\.(seed|repeat)=.*")


def mark_outliers(groups: Sequence[Sequence[Member]], margin: float) -> list[list[Member]]:
    """Return the members of all variants, with outliers of the final loss marked.

    An outlier is further from its variant's median than the margin, and than `OUTLIER_DEVIATIONS` times the lower
    median of all such
    distances in all variants: three seeds alone hardly show a spread, all seeds of a sweep do.
    """
    finals = [[m.run.validation for m in members if m.run.validation is not None] for members in groups]
    medians = [float(np.median(values)) if len(values) >= FEWEST else None for values in finals]
    distances = [
        d for values, c in zip(finals, medians, strict=True) if c is not None for d in _compute_distances(values, c)
    ]
    limit = (
        max(margin, OUTLIER_DEVIATIONS * float(np.quantile(distances, 0.5, method="lower"))) if distances else np.inf
    )
    return [[_mark_outlier(m, median, limit) for m in members] for members, median in zip(groups, medians, strict=True)]


def _compute_distances(values: Sequence[float], median: float) -> list[float]:
    """Return the distances; of an odd number of values without the median's own, which is always 0."""
    return sorted(abs(value - median) for value in values)[len(values) % 2 :]


def _mark_outlier(member: Member, median: float | None, limit: float) -> Member:
    value = member.run.validation
    if value is None or median is None or abs(value - median) <= limit:
        return member
    return replace(member, run=replace(member.run, outlier=True))


def count_outcomes(members: Sequence[Member], missing: Iterable[FailedRun] = ()) -> Outcomes:
    """Return the number of seeds with each outcome.

    Args:
        members: the variant's runs.
        missing: its trials without metrics.
    """
    seeds: dict[Any, list[str]] = {}
    for m in members:
        seeds.setdefault(m.raw.seed, []).append(_classify_run(m.run))
    for index, trial in enumerate(missing):
        seeds[_parse_seed(trial.overrides, f"missing {index}")] = [_classify_unfinished(trial.state)]
    seed_outcomes = [next(kind for kind in KINDS if kind in kinds) for kinds in seeds.values()]
    return Outcomes(**{kind: seed_outcomes.count(kind) for kind in KINDS})


KINDS = ("diverged", "ended", "failed", "waiting")
"""Of several repeats of a seed, the first of these outcomes counts."""


def _classify_run(run: RunResult) -> str:
    if run.diverged:
        return "diverged"
    return "ended" if run.state == "finished" else _classify_unfinished(run.state)


def _classify_unfinished(state: State) -> str:
    return "failed" if state in ("failed", "stopped") else "waiting"


def _parse_seed(overrides: Sequence[str], default: str) -> Any:
    seeds = [o.partition("=")[2] for o in overrides if o.lstrip("+~").startswith("training.seed=")]
    return int(seeds[-1]) if seeds and seeds[-1].isdecimal() else default


def select_recipe(overrides: Sequence[str]) -> frozenset[str]:
    """Return the overrides of a trial that all seeds of its variant share."""
    return frozenset(override for override in overrides if not SEED.fullmatch(override))


def list_notes(members: Sequence[Member]) -> list[str]:
    """Return notes on divergence, outliers, spikes and steps that were not finite."""
    runs = [m.run for m in members]
    return [*_note_diverged(runs), *_note_outliers(runs), *_note_spikes(runs), *_note_nonfinite(members)]


def describe_missing(trials: Sequence[FailedRun]) -> str:
    """Return how many trials have no metrics, and why; empty where there are none."""
    kinds = Counter(_classify_unfinished(trial.state) for trial in trials)
    by_kind = {"failed": "failed without metrics", "waiting": "have no metrics yet"}
    return ", ".join(f"{kinds[kind]} of its trials {words}" for kind, words in by_kind.items() if kinds[kind])


def _note_diverged(runs: Sequence[RunResult]) -> list[str]:
    diverged = [run for run in runs if run.diverged]
    examples = ", ".join(f"seed {run.seed} at step {run.step:,}" for run in diverged[:NAMED])
    remainder = f" and {len(diverged) - NAMED} more" if len(diverged) > NAMED else ""
    note = f"{len(diverged)} of {len(runs)} runs diverged ({examples}{remainder}): the mean loss does not include them"
    return [note] if diverged else []


def _note_outliers(runs: Sequence[RunResult]) -> list[str]:
    losses = [run.validation for run in runs if run.validation is not None]
    outliers = [f"seed {run.seed} with {run.validation:.4f}" for run in runs if run.outlier]
    return (
        [f"outlier: {', '.join(outliers)}; the median of its {len(losses)} runs is {np.median(losses):.4f}"]
        if outliers
        else []
    )


def _note_spikes(runs: Sequence[RunResult]) -> list[str]:
    spiked = [run for run in runs if run.spikes]
    if not spiked:
        return []
    count = sum(len(run.spikes) for run in spiked)
    rise, run, top = max(((s.loss - s.usual, r, s) for r in spiked for s in r.spikes), key=lambda entry: entry[0])
    return [
        f"loss spikes in {len(spiked)} of {len(runs)} runs: {count} in all, the highest by {rise:.2f} nats to "
        f"{top.loss:.2f} at step {top.step:,} of seed {run.seed}{_format_rows(top)}"
    ]


def _format_rows(spike: Spike) -> str:
    return "" if spike.rows is None else f" (rows {spike.rows[0]} to {spike.rows[1]})"


def _note_nonfinite(members: Sequence[Member]) -> list[str]:
    """Return a note on steps that were not finite."""
    counts = [int(m.history.steps.is_nonfinite().sum()) for m in members]
    if not any(counts):
        return []
    runs_text, steps_text = f"{sum(map(bool, counts))} of {len(members)} runs", format_plural(sum(counts), "step")
    return [f"loss or gradient norm not finite in {runs_text}: {steps_text}, which did not update the weights"]
