"""Variants before they are compared: groups of runs with their learning rates, missing trials, and the baseline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.report import divergence, lr_tuning, outcomes, sharing, variants
from titan.report.collect import Collected
from titan.report.findings import Failed
from titan.report.lr_tuning import Tuned
from titan.report.runs import Member, member
from titan.report.variants import Group
from titan.sweep.ledger import SweepSpec


@dataclass(frozen=True)
class Candidate:
    """A variant before it is compared.

    Attributes:
        group: its runs' files, and the settings that distinguish it.
        members: its runs.
        tuned: whether it has the best of its learning rates.
        missing: its trials without metrics.
    """

    group: Group
    members: Sequence[Member]
    tuned: Tuned
    missing: tuple[Failed, ...] = ()


def find_candidates(found: Collected, asked: SweepSpec, baseline: str | None) -> list[Candidate]:
    """Return all variants, the baseline first; of several learning rates of the baseline, the best one."""
    begun = [raw for raw in found.runs if len(raw.metrics.steps) or divergence.gave_up(raw)]
    groups, alongside = variants.grouped(begun), sharing.shared(found.runs)
    members = outcomes.marked([_members(group, groups, alongside) for group in groups], asked.margin)
    tuned = lr_tuning.tuned(groups, members)
    missing = [_missing(group, found.failed) for group in groups]
    made = [Candidate(*each) for each in zip(groups, members, tuned, missing, strict=True)]
    if not made:
        return []
    possible = variants.baselines(groups, baseline, asked.baseline)
    first = next((i for i in possible if tuned[i].chosen), possible[0])
    return [made[first], *made[:first], *made[first + 1 :]]


def _missing(group: Group, failed: Sequence[Failed]) -> tuple[Failed, ...]:
    """Return the trials without metrics that differ from a variant's runs in their seed only."""
    recipes = {outcomes.recipe(raw.overrides) for raw in group.runs}
    return tuple(trial for trial in failed if trial.overrides and outcomes.recipe(trial.overrides) in recipes)


def _members(group: Group, groups: Sequence[Group], alongside: Collection[Path]) -> list[Member]:
    labels = variants.labels(group, groups)
    return [member(raw, label, raw.directory in alongside) for raw, label in zip(group.runs, labels, strict=True)]
