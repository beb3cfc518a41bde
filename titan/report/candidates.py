"""Variants before they are compared: groups of runs with their learning rates, missing trials, and the baseline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.report import divergence, lr_tuning, outcomes, sharing, variants
from titan.report.collect import CollectedRuns
from titan.report.findings import FailedRun
from titan.report.lr_tuning import RateTuning
from titan.report.runs import Member, build_member
from titan.report.variants import RunGroup
from titan.sweep.ledger import SweepSpec


@dataclass(frozen=True)
class VariantCandidate:
    """A variant before it is compared.

    Attributes:
        group: its runs' files, and the settings that distinguish it.
        members: its runs.
        tuning: whether it has the best of its learning rates.
        missing: its trials without metrics.
    """

    group: RunGroup
    members: Sequence[Member]
    tuning: RateTuning
    missing: tuple[FailedRun, ...] = ()


def find_candidates(collected: CollectedRuns, spec: SweepSpec, baseline: str | None) -> list[VariantCandidate]:
    """Return all variants, the baseline first; of several learning rates of the baseline, the best one."""
    started_runs = [raw for raw in collected.runs if len(raw.metrics.steps) or divergence.gave_up(raw)]
    groups, shared_directories = variants.group_runs(started_runs), sharing.find_shared_runs(collected.runs)
    members = outcomes.mark_outliers(
        [_build_members(group, groups, shared_directories) for group in groups], spec.margin
    )
    tunings = lr_tuning.find_best_rates(groups, members)
    missing = [_find_missing_trials(group, collected.failed) for group in groups]
    candidates = [VariantCandidate(*parts) for parts in zip(groups, members, tunings, missing, strict=True)]
    if not candidates:
        return []
    possible_baselines = variants.find_baselines(groups, baseline, spec.baseline)
    baseline_index = next((i for i in possible_baselines if tunings[i].is_best), possible_baselines[0])
    return [candidates[baseline_index], *candidates[:baseline_index], *candidates[baseline_index + 1 :]]


def _find_missing_trials(group: RunGroup, failed: Sequence[FailedRun]) -> tuple[FailedRun, ...]:
    """Return the trials without metrics that differ from a variant's runs in their seed only."""
    recipes = {outcomes.select_recipe(raw.overrides) for raw in group.runs}
    return tuple(trial for trial in failed if trial.overrides and outcomes.select_recipe(trial.overrides) in recipes)


def _build_members(group: RunGroup, groups: Sequence[RunGroup], shared_directories: Collection[Path]) -> list[Member]:
    labels = variants.label_runs(group, groups)
    return [
        build_member(raw, label, raw.directory in shared_directories)
        for raw, label in zip(group.runs, labels, strict=True)
    ]
