"""`compare`: collect runs, group them into variants, and compare each variant with the baseline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.console.numbers import format_count, format_tokens
from titan.report import (
    equivalence,
    measure,
    notes,
    outcomes,
    ranking,
    seeds,
    speed,
    statistics,
    superiority,
    variants,
    verdicts,
)
from titan.report.candidates import VariantCandidate, find_candidates
from titan.report.collect import CollectedRuns, collect_runs
from titan.report.findings import Comparison, FailedRun, Learning, Quality, TimeToTarget, Variant
from titan.report.runs import Member
from titan.report.superiority import build_hour_axis
from titan.report.variants import RunGroup
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
    candidates = find_candidates(collected, spec, options.baseline)
    groups, members = [v.group for v in candidates], [v.members for v in candidates]
    return Comparison(
        title=_build_title(collected, directories),
        question=spec.question,
        common=_find_common_settings(groups),
        differs=variants.collect_differing_settings(groups),
        variants=_order_variants(_build_variants(candidates, spec)),
        failed=_list_failed_runs(collected, members),
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


def _build_variants(candidates: Sequence[VariantCandidate], spec: SweepSpec) -> list[Variant]:
    """Return all variants, the baseline first."""
    if not candidates:
        return []
    baseline = candidates[0]
    rivals = [v for v in candidates[1:] if v.group.group_id != baseline.group.group_id and v.tuning.is_best]
    uncorrected = [superiority.compare_variant(v.members, baseline.members, spec.target) for v in rivals]
    qualities = dict(zip(map(id, rivals), verdicts.correct_comparisons(uncorrected, spec.margin), strict=True))
    return [_build_variant(v, candidates, qualities.get(id(v), ()), spec) for v in candidates]


def _order_variants(unordered: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the baseline first, then the others by their result."""
    return (*unordered[:1], *(unordered[i] for i in ranking.rank_variants(unordered) if i))


def _build_variant(
    candidate: VariantCandidate, candidates: Sequence[VariantCandidate], qualities: tuple[Quality, ...], spec: SweepSpec
) -> Variant:
    group, members, baseline = candidate.group, candidate.members, candidates[0].members
    is_baseline = candidate is candidates[0]
    rates, baseline_rates = (speed.collect_rates([m.raw for m in side]) for side in (members, baseline))
    too_few_runs = not is_baseline and speed.has_few_runs(rates, baseline_rates)
    doubt = "" if is_baseline else _explain_doubt(members, baseline, too_few_runs)
    return Variant(
        label=group.label,
        settings=group.settings,
        baseline=is_baseline,
        same_science=group.group_id == candidates[0].group.group_id,
        runs=tuple(m.run for m in members),
        speed=speed.estimate_speed(rates),
        speed_ratio=None
        if is_baseline
        else speed.drop_doubted_interval(speed.estimate_ratio(rates, baseline_rates), doubt),
        validation=statistics.estimate_mean_interval(
            list(seeds.average_by_seed(members, lambda m: m.run.validation).values())
        ),
        bits=statistics.estimate_mean_interval(list(seeds.average_by_seed(members, lambda m: m.run.bits).values())),
        few=too_few_runs,
        speed_doubt=doubt if rates and baseline_rates else "",
        learning=_judge_learning(candidate, candidates, spec.margin),
        quality=qualities,
        reached=_measure_time_to_target(members, spec.target) if _is_in_nats(members, baseline) else None,
        notes=notes.list_variant_notes(candidate, candidates[0]),
        outcomes=outcomes.count_outcomes(members, candidate.missing),
        tried=candidate.tuning.rate_count,
        untuned=not candidate.tuning.is_best,
        against_best=candidate.tuning.against_best,
    )


def _explain_doubt(members: Sequence[Member], baseline: Sequence[Member], too_few_runs: bool) -> str:
    """Return why speed is not ranked; empty where it is."""
    if any(m.run.shared for m in (*members, *baseline)):
        return "trials ran on one machine at the same time"
    return f"fewer than {speed.LEAST_RUNS} runs of a variant" if too_few_runs else ""


def _judge_learning(
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


def _is_in_nats(members: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Return whether losses per token are comparable with the baseline's."""
    shared_measure = measure.choose_measure(members[0], baseline[0])
    return shared_measure is not None and shared_measure.name == "validation loss"


def _measure_time_to_target(members: Sequence[Member], target: float | None) -> TimeToTarget | None:
    """Return when the runs reached the target; others are censored, and failed ones never reach it."""
    validated = [m for m in members if len(m.run.curves.validation)]
    if target is None or not validated:
        return None
    times: list[tuple[float, float, bool]] = []
    for m in validated:
        curves, hours = m.run.curves, build_hour_axis(m)
        tokens = superiority.find_crossing(curves.validation_tokens, curves.validation, target)
        if tokens is not None:
            times.append((tokens, superiority.find_crossing(hours, curves.validation, target) or 0.0, True))
        elif m.run.state == "failed" or m.run.diverged:  # leaving it out would bias the median
            times.append((math.inf, math.inf, False))
        else:
            times.append((float(curves.validation_tokens[-1]), float(hours[-1]), False))
    tokens_spent, hours_spent, reached = (list(column) for column in zip(*times, strict=True))
    return TimeToTarget(
        runs=len(times),
        reached=sum(reached),
        median_tokens=statistics.estimate_median_time(tokens_spent, reached),
        median_device_hours=statistics.estimate_median_time(hours_spent, reached),
        at_first=sum(bool(m.run.curves.validation[0] <= target) for m in validated),
    )


def _find_common_settings(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the main settings that all variants share."""
    main_settings = [_collect_main_settings(group) for group in groups]
    return {
        key: value
        for key, value in (main_settings[0] if main_settings else {}).items()
        if all(t.get(key) == value for t in main_settings)
    }


def _collect_main_settings(group: RunGroup) -> dict[str, str]:
    raw, choices = group.runs[0], group.facts.choices
    training, hardware = raw.config["training"], raw.hardware
    main_settings = {
        axis: choices[axis] for axis in ("model", "dataset", "optimizer", "parallelism", "memory") if axis in choices
    }
    if size := _count_parameters(group):
        main_settings["model"] = f"{main_settings.get('model', '?')}, {format_count(size)} parameters"
    batch = "" if training.get("grow") else f" of {format_tokens(training['global_batch'])} tokens"
    return main_settings | {
        "precision": str(raw.config.get("precision", {}).get("compute", "?")),
        "training": f"{training['steps']:,} steps{batch}, rows of {training['seq_len']:,}",
        "optimizer.lr": f"{raw.config['optimizer'].get('lr', 0):g}",
        "devices": f"{raw.devices} x {hardware}" if hardware else str(raw.devices),
    }


def _count_parameters(group: RunGroup) -> int | None:
    """Return the model's parameter count; None where its class can't be loaded."""
    model = speed.build_model(group.runs[0])
    return model.parameters() if model else None


def _list_failed_runs(collected: CollectedRuns, members: Sequence[Sequence[Member]]) -> tuple[FailedRun, ...]:
    """Return trials without metrics, and runs that failed or stopped."""
    failed_runs = list(collected.failed)
    members_by_directory = {m.raw.directory: m for variant_members in members for m in variant_members}
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
