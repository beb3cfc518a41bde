"""`compare`: from the directories of runs to a verdict on each variant, in stages.

Each stage is a module of the same name, but for the tests, of which there are two:

1. collect: find the runs and read their files.
2. align: group the runs into variants, whose runs differ in seed and repeat only.
3. estimate: results of each run, then means, speeds and outcomes over the seeds of a variant.
4. rank: the best of several learning rates stands for its recipe, and one variant is the baseline.
5. test each variant against the baseline: equivalence where both have the same hyperparameters, else superiority.
6. rank: order the variants by their results.
7. render: table, sentences, page, CSV and JSON, in `titan.report.render`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.report import align, equivalence, estimate, notes, rank, superiority
from titan.report.collect import CollectedRuns, collect_runs
from titan.report.findings import Comparison, FailedRun, Learning, Quality, Variant
from titan.report.rank import VariantCandidate
from titan.sweep.ledger import SweepSpec

FAILED_STATES = ("failed", "stopped")


@dataclass(frozen=True)
class Options:
    """What the user asks of a comparison.

    Attributes:
        baseline: the variant that the others are compared with: its settings, as in "parallelism=single,lr=0.001",
            or a run's directory; None: that of the sweep, else the first one found.
        margin: equivalence margin, in nats of validation loss; None: that of the sweep, else 0.02.
        target: the validation loss to reach; None: that of the sweep.
    """

    baseline: str | None = None
    margin: float | None = None
    target: float | None = None


def compare(directories: Sequence[str | os.PathLike[str]], options: Options | None = None) -> Comparison:
    """Compare all runs in directories and their subdirectories.

    Args:
        directories: of runs and sweeps, or folders that hold some.
        options: what the user asks.

    Raises:
        ConfigError: for a directory without runs, or a baseline that matches no variant.
    """
    options = options or Options()
    collected = collect_runs([Path(directory) for directory in directories])
    spec = _resolve_spec(collected, options)
    candidates = _list_candidates(collected, options, spec)
    groups = [candidate.group for candidate in candidates]
    return Comparison(
        title=_build_title(collected, directories),
        question=spec.question,
        common=align.find_common_settings(groups),
        differs=align.collect_differing_settings(groups),
        variants=rank.order_variants(_build_variants(candidates, spec)),
        failed=_list_failed_runs(collected, candidates),
        target=spec.target,
        margin=spec.margin,
        notes=notes.list_comparison_notes(candidates, collected, spec, options.baseline, options.margin),
    )


def _resolve_spec(collected: CollectedRuns, options: Options) -> SweepSpec:
    """Return the sweep's question, margin and target, if there is one sweep, overridden by the user's."""
    spec = collected.sweeps[0][1] if len(collected.sweeps) == 1 else SweepSpec()
    if options.margin is not None:
        spec = replace(spec, margin=options.margin)
    return replace(spec, target=options.target) if options.target is not None else spec


def _build_title(collected: CollectedRuns, directories: Sequence[str | os.PathLike[str]]) -> str:
    if len(collected.sweeps) == 1 and len(directories) == 1:
        return collected.sweeps[0][0].name
    return ", ".join(os.fspath(directory).rstrip("/") for directory in directories)


def _list_candidates(collected: CollectedRuns, options: Options, spec: SweepSpec) -> list[VariantCandidate]:
    """Return all variants with the results of their runs, the baseline first."""
    groups = align.group_runs(collected.list_started_runs(), collected.failed)
    members = estimate.build_members(groups, align.find_shared_runs(collected.runs), spec.margin)
    return rank.list_candidates(groups, members, options.baseline, spec.baseline)


def _build_variants(candidates: Sequence[VariantCandidate], spec: SweepSpec) -> list[Variant]:
    """Return all variants with their estimates and tests, the baseline first."""
    estimates = [
        estimate.estimate_variant(v.members, v.group.missing, candidates[0].members, spec.target) for v in candidates
    ]
    learnings = [_test_equivalence(v, candidates, spec.margin) for v in candidates]
    qualities = _test_superiority(candidates, spec)
    return [
        Variant(
            label=v.group.label,
            settings=v.group.settings,
            baseline=v is candidates[0],
            same_science=v.group.group_id == candidates[0].group.group_id,
            runs=tuple(m.run for m in v.members),
            learning=learning,
            quality=qualities.get(index, ()),
            notes=notes.list_variant_notes(v, candidates[0]),
            tried=v.tuning.rate_count,
            untuned=not v.tuning.is_best,
            against_best=v.tuning.against_best,
            **vars(variant_estimates),
        )
        for index, (v, variant_estimates, learning) in enumerate(zip(candidates, estimates, learnings, strict=True))
    ]


def _test_equivalence(
    candidate: VariantCandidate, candidates: Sequence[VariantCandidate], margin: float
) -> Learning | None:
    """Return whether a variant learns the same as the one of its recipe: the baseline or a learning rate of it."""
    reference = next((v for v in candidates if _must_learn_the_same(candidate, v, candidates[0])), None)
    if reference is None or candidate is candidates[0]:
        return None
    learning = equivalence.judge_equivalence(candidate.members, reference.members, margin)
    if reference is candidates[0]:
        return learning
    word, _, text = learning.text.partition(": ")
    return replace(learning, text=f"{word}: compared with {reference.group.label}: {text}")


def _must_learn_the_same(candidate: VariantCandidate, reference: VariantCandidate, baseline: VariantCandidate) -> bool:
    """Return whether a variant must learn the same as `reference`: the baseline, or another learning rate of it."""
    same_group = candidate.group.group_id == reference.group.group_id
    return same_group and candidate is not reference and reference.group.other_settings == baseline.group.other_settings


def _test_superiority(candidates: Sequence[VariantCandidate], spec: SweepSpec) -> Mapping[int, tuple[Quality, ...]]:
    """Return the tests of the variants with other hyperparameters than the baseline, by their index."""
    rivals = [
        i for i, v in enumerate(candidates) if v.group.group_id != candidates[0].group.group_id and v.tuning.is_best
    ]
    uncorrected = [
        superiority.compare_variant(candidates[i].members, candidates[0].members, spec.target) for i in rivals
    ]
    return dict(zip(rivals, superiority.correct_comparisons(uncorrected, spec.margin), strict=True))


def _list_failed_runs(collected: CollectedRuns, candidates: Sequence[VariantCandidate]) -> tuple[FailedRun, ...]:
    """Return trials without metrics, and runs that failed or stopped."""
    failed_runs = list(collected.failed)
    members_by_directory = {m.raw.directory: m for candidate in candidates for m in candidate.members}
    for raw in collected.runs:
        if raw.state not in FAILED_STATES and raw.directory in members_by_directory:
            continue
        label = (
            members_by_directory[raw.directory].run.label
            if raw.directory in members_by_directory
            else " ".join(raw.overrides)
        )
        reason = raw.reason or "its first step is not finished"
        failed_runs.append(FailedRun(label or raw.directory.name, str(raw.directory), raw.state, reason, raw.overrides))
    return tuple(failed_runs)
