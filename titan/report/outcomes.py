"""Outcomes of runs: divergence, which is a result of the recipe, runs missing for other reasons, and outliers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titan.console.numbers import plural
from titan.report.findings import Failed, Outcomes, RunFound, Spike, State
from titan.report.runs import Member

FAR = 10.0
"""An outlier is so many times the median absolute deviation away: 6.7 standard deviations of a normal."""
FEWEST = 3
"""Seeds of a variant from which its outliers can be found."""
NAMED = 6
"""Runs that a note names."""
SEED = re.compile(r"[+~]*training\.(seed|repeat)=.*")


def marked(groups: Sequence[Sequence[Member]], margin: float) -> list[list[Member]]:
    """Return the members of all variants, with outliers of the final loss marked.

    An outlier is further from its variant's median than the margin, and than `FAR` times the lower median of all such
    distances in all variants: three seeds alone hardly show a spread, all seeds of a sweep do.
    """
    finals = [[m.run.validation for m in members if m.run.validation is not None] for members in groups]
    middles = [float(np.median(values)) if len(values) >= FEWEST else None for values in finals]
    away = [d for values, c in zip(finals, middles, strict=True) if c is not None for d in _distances(values, c)]
    limit = max(margin, FAR * float(np.quantile(away, 0.5, method="lower"))) if away else np.inf
    return [[_marked(m, middle, limit) for m in members] for members, middle in zip(groups, middles, strict=True)]


def _distances(values: Sequence[float], middle: float) -> list[float]:
    """Return the distances; of an odd number of values without the median's own, which is always 0."""
    return sorted(abs(value - middle) for value in values)[len(values) % 2 :]


def _marked(member: Member, middle: float | None, limit: float) -> Member:
    value = member.run.validation
    if value is None or middle is None or abs(value - middle) <= limit:
        return member
    return replace(member, run=replace(member.run, outlier=True))


def of_variant(members: Sequence[Member], missing: Iterable[Failed] = ()) -> Outcomes:
    """Return the number of seeds with each outcome.

    Args:
        members: the variant's runs.
        missing: its trials without metrics.
    """
    seeds: dict[Any, list[str]] = {}
    for m in members:
        seeds.setdefault(m.raw.seed, []).append(_outcome(m.run))
    for index, trial in enumerate(missing):
        seeds[_seed(trial.overrides, f"missing {index}")] = [_without(trial.state)]
    found = [next(kind for kind in KINDS if kind in kinds) for kinds in seeds.values()]
    return Outcomes(**{kind: found.count(kind) for kind in KINDS})


KINDS = ("diverged", "ended", "failed", "waiting")
"""Of several repeats of a seed, the first of these outcomes counts."""


def _outcome(run: RunFound) -> str:
    if run.diverged:
        return "diverged"
    return "ended" if run.state == "finished" else _without(run.state)


def _without(state: State) -> str:
    return "failed" if state in ("failed", "stopped") else "waiting"


def _seed(overrides: Sequence[str], otherwise: str) -> Any:
    seeds = [o.partition("=")[2] for o in overrides if o.lstrip("+~").startswith("training.seed=")]
    return int(seeds[-1]) if seeds and seeds[-1].isdecimal() else otherwise


def recipe(overrides: Sequence[str]) -> frozenset[str]:
    """Return the overrides of a trial that all seeds of its variant share."""
    return frozenset(override for override in overrides if not SEED.fullmatch(override))


def notes(members: Sequence[Member]) -> list[str]:
    """Return notes on divergence, outliers, spikes and steps that were not finite."""
    runs = [m.run for m in members]
    return [*_of_diverged(runs), *_of_outliers(runs), *_of_spikes(runs), *_odd(members)]


def missing(trials: Sequence[Failed]) -> str:
    """Return how many trials have no metrics, and why; empty where there are none."""
    kinds = Counter(_without(trial.state) for trial in trials)
    by_kind = {"failed": "failed without metrics", "waiting": "have no metrics yet"}
    return ", ".join(f"{kinds[kind]} of its trials {words}" for kind, words in by_kind.items() if kinds[kind])


def _of_diverged(runs: Sequence[RunFound]) -> list[str]:
    lost = [run for run in runs if run.diverged]
    where = ", ".join(f"seed {run.seed} at step {run.step:,}" for run in lost[:NAMED])
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    what = f"{len(lost)} of {len(runs)} runs diverged ({where}{more}): the mean loss does not include them"
    return [what] if lost else []


def _of_outliers(runs: Sequence[RunFound]) -> list[str]:
    known = [run.validation for run in runs if run.validation is not None]
    far = [f"seed {run.seed} with {run.validation:.4f}" for run in runs if run.outlier]
    return [f"outlier: {', '.join(far)}; the median of its {len(known)} runs is {np.median(known):.4f}"] if far else []


def _of_spikes(runs: Sequence[RunFound]) -> list[str]:
    spiked = [run for run in runs if run.spikes]
    if not spiked:
        return []
    count = sum(len(run.spikes) for run in spiked)
    rise, run, top = max(((s.loss - s.usual, r, s) for r in spiked for s in r.spikes), key=lambda each: each[0])
    return [
        f"loss spikes in {len(spiked)} of {len(runs)} runs: {count} in all, the highest by {rise:.2f} nats to "
        f"{top.loss:.2f} at step {top.step:,} of seed {run.seed}{_rows(top)}"
    ]


def _rows(spike: Spike) -> str:
    return "" if spike.rows is None else f" (rows {spike.rows[0]} to {spike.rows[1]})"


def _odd(members: Sequence[Member]) -> list[str]:
    """Return a note on steps that were not finite."""
    counts = [int(m.history.steps.odd().sum()) for m in members]
    if not any(counts):
        return []
    of, steps = f"{sum(map(bool, counts))} of {len(members)} runs", plural(sum(counts), "step")
    return [f"loss or gradient norm not finite in {of}: {steps}, which did not update the weights"]
