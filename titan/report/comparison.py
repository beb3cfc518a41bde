"""`compare`: from the directories of runs to a verdict on each variant, in stages.

Each stage is a module of the same name, but for the tests, of which there are two:

1. collect: find the runs and read their files.
2. align: group the runs into variants, whose runs differ in seed and repeat only.
3. estimate: results of each run, then means, speeds and outcomes over the seeds of a variant; without the figures of
   files and tasks that `figures` finds to be of different content.
4. rank: the best of several learning rates stands for its recipe, and one variant is the baseline.
5. test each variant against the baseline: equivalence where both have the same hyperparameters, else superiority.
6. effort: what share of the baseline's compute each variant needs for its loss.
7. rank: order the variants by their results.
8. render: table, sentences, page, CSV and JSON, in `titan.report.render`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.console.text import sanitize_nested
from titan.report import align, effort, equivalence, estimate, figures, notes, rank, superiority
from titan.report.collect import CollectedRuns, RawRun, collect_runs
from titan.report.effort import ShorterRun
from titan.report.estimate import VariantEstimates
from titan.report.findings import Comparison, Effort, FailedRun, Learning, Quality, Variant
from titan.report.rank import VariantCandidate
from titan.run.directory import describe_hook_end
from titan.sweep.labels import count_distinguishing_digits, format_label
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import DEFAULT_MARGIN, parse_margin

FAILED_STATES = ("failed", "stopped")


@dataclass(frozen=True)
class Options:
    """What the user asks of a comparison.

    Attributes:
        baseline: the variant that the others are compared with: its settings, as in "parallelism=single,lr=0.001",
            or a run's directory; None: that of the sweep, else the first one found.
        margin: equivalence margin, in nats of validation loss, or a share of the baseline's compute such as "2%"; None:
            that of the sweep, else 0.02.
        target: the validation loss to reach; None: that of the sweep.
    """

    baseline: str | None = None
    margin: float | str | None = None
    target: float | None = None


def compare(directories: Sequence[str | os.PathLike[str]], options: Options | None = None) -> Comparison:
    """Compare all runs in directories and their subdirectories.

    Raises:
        ConfigError: for a directory without runs, or a baseline that matches no variant.
    """
    options = options or Options()
    collected = collect_runs([Path(directory) for directory in directories])
    spec = _resolve_spec(collected, options)
    groups = align.group_runs(collected.list_started_runs(), collected.failed)
    margin = parse_margin(spec.margin, "margin")
    members = estimate.build_members(groups, align.find_shared_runs(collected.runs), margin.nats or DEFAULT_MARGIN)
    members, figure_notes = figures.drop_incomparable(members)
    candidates = rank.list_candidates(groups, members, options.baseline, spec.baseline)
    short = effort.find_shorter_run(candidates)
    resolved = effort.resolve_margin(margin, candidates, short)
    variants = _build_variants(candidates, spec, resolved.nats, short)
    groups = [candidate.group for candidate in candidates]
    comparison = Comparison(
        title=_build_title(collected, directories),
        question=spec.question,
        common=align.find_common_settings(groups),
        differs=align.collect_differing_settings(groups),
        variants=rank.order_variants(variants),
        failed=_list_failed_runs(collected, candidates),
        target=spec.target,
        margin=resolved.nats,
        margin_share=resolved.share,
        budget=spec.budget,
        notes=(
            *resolved.notes,
            *figure_notes,
            *notes.list_comparison_notes(
                candidates, collected, spec, resolved.nats, options.baseline, options.margin is not None
            ),
        ),
    )
    sanitized: Comparison = sanitize_nested(comparison)  # its texts are of runs' files, whoever wrote these
    return sanitized


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


def _build_variants(
    candidates: Sequence[VariantCandidate], spec: SweepSpec, margin: float, short: ShorterRun | None
) -> list[Variant]:
    """Return all variants with their estimates and tests, the baseline first."""
    estimates = [
        estimate.estimate_variant(v.members, v.group.missing, candidates[0].members, spec.target) for v in candidates
    ]
    learnings = equivalence.judge_candidates(candidates, margin)
    qualities = superiority.judge_candidates(candidates, spec.target, margin, spec.budget)
    efforts = effort.judge_candidates(candidates, short)
    parts = zip(candidates, estimates, learnings, qualities, efforts, strict=True)
    return [_build_variant(part[0], candidates[0], *part[1:]) for part in parts]


def _build_variant(
    candidate: VariantCandidate,
    baseline: VariantCandidate,
    estimates: VariantEstimates,
    learning: Learning | None,
    qualities: tuple[Quality, ...],
    variant_effort: Effort | None,
) -> Variant:
    return Variant(
        label=candidate.group.label,
        settings=candidate.group.settings,
        baseline=candidate is baseline,
        same_science=candidate.group.group_id == baseline.group.group_id,
        runs=tuple(m.run for m in candidate.members),
        learning=learning,
        quality=qualities,
        notes=notes.list_variant_notes(candidate, baseline),
        tried=candidate.tuning.rate_count,
        untuned=not candidate.tuning.is_best,
        against_best=candidate.tuning.against_best,
        effort=variant_effort,
        **vars(estimates),
    )


def _list_failed_runs(collected: CollectedRuns, candidates: Sequence[VariantCandidate]) -> tuple[FailedRun, ...]:
    """Return trials without metrics, and runs that failed or stopped."""
    failed_runs = list(collected.failed)
    members_by_directory = {m.raw.directory: m for candidate in candidates for m in candidate.members}
    digits = count_distinguishing_digits([raw.overrides for raw in collected.runs])
    for raw in collected.runs:
        if raw.state not in FAILED_STATES and raw.directory in members_by_directory:
            continue
        label = (
            members_by_directory[raw.directory].run.label
            if raw.directory in members_by_directory
            else format_label(raw.overrides, digits)
        )
        reason = raw.reason or "its first step is not finished"
        name, is_hook_end = label or raw.directory.name, _is_ended_by_hook(raw)
        failed_runs.append(FailedRun(name, str(raw.directory), raw.state, reason, raw.overrides, is_hook_end))
    return tuple(failed_runs)


def _is_ended_by_hook(raw: RawRun) -> bool:
    """Return whether a hook ended the last attempt of a run."""
    is_latest = raw.result.get("attempt") == raw.last_document["attempt"]
    return raw.state == "stopped" and is_latest and describe_hook_end(raw.result) is not None
