"""What a reader has to know beside the answers: notes on a variant and on the whole comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from titan.console.numbers import format_plural
from titan.report import early_losses, statistics
from titan.report.align import find_common_measure
from titan.report.collect import CollectedRuns
from titan.report.estimate import Member, average_by_seed, classify_unfinished, format_speed_settings
from titan.report.findings import FailedRun, RunResult, Spike
from titan.report.rank import VariantCandidate, find_fitting, has_settings
from titan.run import identity
from titan.sweep.ledger import SweepSpec

NAMED_RUNS, NAMED_VARIANTS = 6, 4
"""Runs and variants that a note names."""


def list_variant_notes(candidate: VariantCandidate, baseline_candidate: VariantCandidate) -> tuple[str, ...]:
    """Return the notes on a variant."""
    members, baseline = candidate.members, baseline_candidate.members
    notes = [candidate.tuning.note] if candidate.tuning.note else []
    notes += [*_note_unfinished(members), *_note_outcomes(members)]
    if counts := _describe_missing(candidate.group.missing):
        notes.append(f"{counts}: not counted as outcomes of the recipe")
    if members[0].raw.earlier_planned_steps:
        steps = ", then ".join(f"{number:,}" for number in members[0].raw.earlier_planned_steps)
        notes.append(
            f"continued: its schedule had {steps} steps before, so it counts as a variant with other hyperparameters"
        )
    if any(len({format_speed_settings(d) for d in m.raw.documents}) > 1 for m in members):
        notes.append(
            "its layout, micro-batches, memory or compile settings changed between attempts: its speed is that of the "
            "last attempt's settings"
        )
    if shared := [m.run.label for m in members if m.run.shared]:
        notes.append(
            f"{len(shared)} of {len(members)} runs ran on one machine at the same time as another run: their times, "
            "speeds and device-hours are unreliable"
        )
    if members is not baseline:
        notes += [*_note_hardware_and_code(members, baseline), *_note_text_amounts(members, baseline)]
    return tuple(notes)


def _note_outcomes(members: Sequence[Member]) -> list[str]:
    """Return notes on divergence, outliers, spikes and steps that were not finite."""
    runs = [m.run for m in members]
    return [*_note_diverged(runs), *_note_outliers(runs), *_note_spikes(runs), *_note_nonfinite(members)]


def _describe_missing(trials: Sequence[FailedRun]) -> str:
    """Return how many trials have no metrics, and why; empty where there are none."""
    kinds = Counter("stopped" if t.state == "stopped" else classify_unfinished(t.state) for t in trials)
    by_kind = {
        "failed": "failed without metrics",
        "stopped": "stopped without metrics",
        "waiting": "have no metrics yet",
    }
    return ", ".join(f"{kinds[kind]} of its trials {words}" for kind, words in by_kind.items() if kinds[kind])


def _note_diverged(runs: Sequence[RunResult]) -> list[str]:
    diverged = [run for run in runs if run.diverged]
    examples = ", ".join(f"seed {run.seed} at step {run.step:,}" for run in diverged[:NAMED_RUNS])
    remainder = f" and {len(diverged) - NAMED_RUNS} more" if len(diverged) > NAMED_RUNS else ""
    share = f"{len(diverged)} of {format_plural(len(runs), 'run')}"
    note = f"{share} diverged ({examples}{remainder}): the mean loss does not include them"
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
        f"loss spikes in {len(spiked)} of {format_plural(len(runs), 'run')}: {count} in all, the highest by {rise:.2f} "
        f"nats to {top.loss:.2f} at step {top.step:,} of seed {run.seed}{_format_rows(top)}"
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


def _note_unfinished(members: Sequence[Member]) -> list[str]:
    """Return a note on runs that are unfinished for another reason than divergence."""
    unfinished = [m.run for m in members if not m.run.decayed and not m.run.diverged]
    if not unfinished:
        return []
    failed_count = sum(run.state == "failed" for run in unfinished)
    failed = f" ({failed_count} failed)" if failed_count else ""
    rest = "; the final results are those of the other runs" if len(unfinished) < len(members) else ""
    return [
        f"{len(unfinished)} of {len(members)} runs not finished{failed}: their learning rate schedule is incomplete, "
        f"so they are not ranked{rest}"
    ]


def _note_text_amounts(members: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """Return a note on validation sets of different amounts of text, where bits per byte are compared."""
    variant_bytes, baseline_bytes = (_compute_bytes_per_token(side[0]) for side in (members, baseline))
    measure = find_common_measure(members[0].raw, baseline[0].raw)
    if (
        variant_bytes is None
        or baseline_bytes is None
        or measure != "bits per byte"
        or abs(variant_bytes / baseline_bytes - 1) < 0.02
    ):
        return []
    return [
        f"its validation set has {variant_bytes / baseline_bytes:.2f} times the baseline's text, so bits per byte are "
        "measured on different amounts of text"
    ]


def _compute_bytes_per_token(member: Member) -> float | None:
    nats, bits = member.run.validation, member.run.bits
    return nats / math.log(2) / bits if nats and bits else None


def _note_hardware_and_code(members: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """Return notes on differences to the baseline other than settings."""
    notes = []
    hardware, baseline_hardware = ({m.run.hardware or "unknown" for m in side} for side in (members, baseline))
    if hardware != baseline_hardware:
        notes.append(
            f"different hardware: {', '.join(sorted(hardware))}; the baseline: {', '.join(sorted(baseline_hardware))}"
        )
    codes = [_collect_code_ids(side) for side in (members, baseline)]
    if codes[0] != codes[1]:
        notes.append(f"different code: {', '.join(sorted(codes[0]))}; the baseline: {', '.join(sorted(codes[1]))}")
    return notes


def _collect_code_ids(members: Sequence[Member]) -> set[str]:
    return {str(document["ids"]["code"]) for m in members for document in m.raw.documents}


def list_comparison_notes(
    candidates: Sequence[VariantCandidate],
    collected: CollectedRuns,
    spec: SweepSpec,
    margin: float,
    named_baseline: str | None,
    margin_typed: bool,
) -> tuple[str, ...]:
    """Return the notes on the whole comparison.

    Args:
        candidates: the variants, the baseline first.
        spec: the question, baseline, margin and target in effect.
        margin: in nats.
    """
    groups, all_members = [v.group for v in candidates], [m for v in candidates for m in v.members]
    notes = [
        *collected.corruption,
        *(f"{raw.directory.name}: {corruption}" for raw in collected.runs for corruption in raw.corruption),
    ]
    if len(codes := _collect_code_ids(all_members)) > 1:
        used = [d.get(identity.OWN_CODE) or {} for m in all_members for d in m.raw.documents]
        digests = {name: {own.get(name) for own in used} for name in sorted({name for own in used for name in own})}
        changed = ", ".join(name for name, found in digests.items() if len(found - {None}) > 1)
        of_some = ", ".join(name for name, found in digests.items() if None in found)
        what = f" (files of your {changed} differ)" * bool(changed) + f" (not all use your {of_some})" * bool(of_some)
        notes.append(
            f"the runs use {len(codes)} different versions of code or libraries{what}: {', '.join(sorted(codes))}"
        )
    if len(hardware := {m.run.hardware for m in all_members}) > 1:
        notes.append(f"different hardware: {', '.join(sorted(hardware))}; speeds and device-hours depend on it")
    if len(collected.sweeps) > 1 and not margin_typed:
        notes.append("several sweeps are given: their questions, margins and targets are ignored")
    if not collected.sweeps and not margin_typed:
        notes.append("no equivalence margin was fixed in advance: the default of 0.02 nats is used")
    notes += _note_baseline_choice(candidates, named_baseline, spec) if candidates else []
    emulated = [m for m in all_members if _is_emulated(m)]
    notes += [
        "some variants emulate 8-bit matmuls: their speed does not predict that of hardware with 8-bit matmuls"
    ] * bool(emulated)
    notes += early_losses.note_early_losses(candidates)
    return (*notes, *(_note_seeds_needed(candidates, margin) if groups else []))


def _note_baseline_choice(
    candidates: Sequence[VariantCandidate], named_baseline: str | None, spec: SweepSpec
) -> list[str]:
    """Return notes on how the baseline was chosen, where that is not obvious."""
    baseline, groups = candidates[0], [v.group for v in candidates]
    notes = []
    wanted_settings = {} if named_baseline is not None else spec.baseline
    if wanted_settings and not has_settings(baseline.group, wanted_settings):
        settings = " ".join(f"{name}={value}" for name, value in wanted_settings.items())
        notes.append(
            f"the sweep's baseline ({settings}) has no metrics: {baseline.group.label} is the baseline instead"
        )
    fitting = [groups[i] for i in find_fitting(groups, wanted_settings)]
    if len({group.other_settings for group in fitting}) > 1 or (len(fitting) > 1 and baseline.tuning.rate_count < 2):
        notes.append(
            f"the sweep's baseline matches {len(fitting)} variants: the first one found, {baseline.group.label}, is "
            "used"
        )
    if baseline.tuning.is_best and baseline.tuning.rate_count > 1:
        notes.append(
            f"the baseline is {baseline.group.label}: the best of its {baseline.tuning.rate_count} learning rates"
        )
    return notes


def _is_emulated(member: Member) -> bool:
    """Return whether a run emulated 8-bit matmuls."""
    precision = member.raw.config.get("precision") or {}
    return bool(precision.get("emulate")) and precision.get("matmuls", "compute") != "compute"


def _note_seeds_needed(candidates: Sequence[VariantCandidate], margin: float) -> list[str]:
    """Return a note on the seeds that show a difference of one margin: by pairs of seeds, else by the baseline's."""
    baseline = average_by_seed(candidates[0].members, lambda m: m.run.validation)
    notes = []
    for candidate in candidates[1:]:
        losses = average_by_seed(candidate.members, lambda m: m.run.validation)
        differences = [losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())]
        if len(differences) >= 2 and (estimate := statistics.estimate_mean_difference(differences)).spread:
            count = statistics.compute_seeds_needed(margin, estimate.spread)
            notes.append(f"{candidate.group.label} {_format_pairs(count, len(differences))}")
    if notes:
        further = f", and {len(notes) - NAMED_VARIANTS} further variants" if len(notes) > NAMED_VARIANTS else ""
        return [
            f"to show a difference of {margin:.3g} nats from the baseline, by the spread of pairs of seeds: "
            f"{', '.join(notes[:NAMED_VARIANTS])}{further}"
        ]
    return _note_unpaired_seeds(list(baseline.values()), margin)


def _format_pairs(count: int | None, seen: int) -> str:
    if count is None:
        return f"needs more than {statistics.MOST:,} seeds"
    return "has enough seeds" if count <= seen else f"needs {format_plural(count - seen, 'more seed')}"


def _note_unpaired_seeds(losses: Sequence[float], margin: float) -> list[str]:
    """Return a note on the seeds of each variant, by the spread of the baseline's."""
    if len(losses) < 2 or not (spread := statistics.estimate_mean_difference(losses).spread):
        return []
    count = statistics.compute_seeds_needed(margin, math.sqrt(2) * spread)
    number = f"more than {statistics.MOST:,}" if count is None else f"{count:,}"
    return [
        f"the baseline's final validation loss has a standard deviation of {spread:.4f} nats over {len(losses)} seeds: "
        f"to show a difference of {margin:.3g} takes {number} seeds per variant, fewer where the losses of paired "
        "seeds are correlated"
    ]
