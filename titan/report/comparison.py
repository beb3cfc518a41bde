"""`compare`: from the directories of runs to a verdict on each variant, in stages.

Each stage is a module of the same name, but for the tests, of which there are two:

1. collect: find the runs and read their files.
2. align: group the runs into variants, whose runs differ in seed and repeat only.
3. estimate: results of each run, then means, speeds and outcomes over the seeds of a variant; without the figures of
   files and tasks that `notes` finds to be of different content.
4. rank: the best of several learning rates stands for its recipe, and one variant is the baseline.
5. test each variant against the baseline: equivalence where both have the same hyperparameters, else superiority.
6. effort: what share of the baseline's compute each variant needs for its loss.
7. rank: order the variants by their results.
8. render: table, sentences, page, CSV and JSON, in `titan.report.render`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan.console.text import sanitize_nested
from titan.report import align, effort, equivalence, estimate, notes, rank, superiority
from titan.report.collect import CollectedRuns, collect_runs
from titan.report.effort import ShorterRun
from titan.report.findings import Comparison, FailedRun, Variant
from titan.report.rank import VariantCandidate
from titan.run.directory import describe_hook_end
from titan.sweep.labels import count_distinguishing_digits, format_label
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import DEFAULT_MARGIN, parse_margin

FAILED_STATES = ("failed", "stopped")


def compare(
    directories: Sequence[str | os.PathLike[str]],
    *,
    baseline: str | None = None,
    margin: float | str | None = None,
    target: float | None = None,
) -> Comparison:
    """Compare all runs in directories and their subdirectories; for the others see `titan.report.schema.Settings`.

    Raises:
        ConfigError: for a directory without runs, or a baseline that matches no variant.
    """
    collected = collect_runs([Path(directory) for directory in directories])
    typed: dict[str, Any] = {"margin": margin, "target": target}
    spec = replace(collected.sweep, **{name: value for name, value in typed.items() if value is not None})
    groups = align.group_runs(collected.list_started_runs(), collected.failed)
    asked = parse_margin(spec.margin, "margin")
    members = estimate.build_members(groups, align.find_shared_runs(collected.runs), asked.nats or DEFAULT_MARGIN)
    members, figure_notes = notes.drop_incomparable(members)
    candidates = rank.list_candidates(groups, members, baseline, spec.baseline)
    short = effort.find_shorter_run(candidates)
    nats, share, margin_notes = effort.resolve_margin(asked, candidates, short)
    title = ", ".join(os.fspath(directory).rstrip("/") for directory in directories)
    if len(collected.sweeps) == len(directories) == 1:
        title = next(iter(collected.sweeps)).name
    comparison_notes = notes.list_comparison_notes(candidates, collected, spec, nats, baseline, margin is not None)
    groups = [candidate.group for candidate in candidates]
    variants = _build_variants(candidates, spec, nats, short)
    comparison = Comparison(
        title=title,
        question=spec.question,
        common=align.find_common_settings(groups),
        differs=align.collect_differing_settings(groups),
        variants=(*variants[:1], *(variants[i] for i in rank.rank_variants(variants) if i)),
        failed=_list_failed_runs(collected, candidates),
        target=spec.target,
        margin=nats,
        margin_share=share,
        budget=spec.budget,
        notes=(*margin_notes, *figure_notes, *comparison_notes),
    )
    sanitized: Comparison = sanitize_nested(comparison)  # its texts are of runs' files, whoever wrote these
    return sanitized


def _build_variants(
    candidates: Sequence[VariantCandidate], spec: SweepSpec, margin: float, short: ShorterRun | None
) -> list[Variant]:
    """Return all variants with their estimates and tests, the baseline first."""
    learnings = equivalence.judge_candidates(candidates, margin)
    qualities = superiority.judge_candidates(candidates, spec.target, margin, spec.budget)
    variants = []
    for candidate, learning, quality in zip(candidates, learnings, qualities, strict=True):
        group, members, baseline, tuning = candidate.group, candidate.members, candidates[0], candidate.tuning
        speed, speed_ratio, few, speed_doubt = estimate.compare_speeds(members, baseline.members)
        variants.append(
            Variant(
                label=group.label,
                settings=group.settings,
                baseline=candidate is baseline,
                same_science=group.group_id == baseline.group.group_id,
                runs=tuple(m.run for m in members),
                speed=speed,
                speed_ratio=speed_ratio,
                validation=estimate.estimate_seed_mean(members, lambda m: m.run.validation),
                bits=estimate.estimate_seed_mean(members, lambda m: m.run.bits),
                learning=learning,
                quality=quality,
                reached=estimate.estimate_time_to_target(members, baseline.members, spec.target),
                notes=tuple(notes.list_variant_notes(candidate, baseline)),
                few=few,
                speed_doubt=speed_doubt,
                outcomes=estimate.count_outcomes(members, group.missing),
                tried=tuning.rate_count,
                untuned=not tuning.is_best,
                against_best=tuning.against_best,
                effort=effort.judge_candidate(candidate, baseline, short),
            )
        )
    return variants


def _list_failed_runs(collected: CollectedRuns, candidates: Sequence[VariantCandidate]) -> tuple[FailedRun, ...]:
    """Return trials without metrics, and runs that failed or stopped."""
    failed_runs = list(collected.failed)
    members_by_directory = {m.raw.directory: m for candidate in candidates for m in candidate.members}
    digits = count_distinguishing_digits([raw.overrides for raw in collected.runs])
    for raw in collected.runs:
        member = members_by_directory.get(raw.directory)
        if raw.state not in FAILED_STATES and member:
            continue
        label = member.run.label if member else format_label(raw.overrides, digits)
        reason = raw.reason or "its first step is not finished"
        is_latest = raw.result.get("attempt") == raw.last_document["attempt"]
        is_hook_end = raw.state == "stopped" and is_latest and describe_hook_end(raw.result) is not None
        name = label or raw.directory.name
        failed_runs.append(FailedRun(name, str(raw.directory), raw.state, reason, raw.overrides, is_hook_end))
    return tuple(failed_runs)
