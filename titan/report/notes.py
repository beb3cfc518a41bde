"""What a reader has to know beside the answers: notes on a variant and on the whole comparison.

Among them: which figures of files and tasks are not compared, as their content differs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from titan.console.numbers import format_plural
from titan.report import statistics
from titan.report.align import find_common_measure
from titan.report.collect import CollectedRuns
from titan.report.estimate import Member, average_by_seed, classify_unfinished, format_speed_settings
from titan.report.rank import VariantCandidate, find_fitting, has_settings
from titan.run import evaluated, identity
from titan.sweep.ledger import SweepSpec

NAMED_RUNS, NAMED_VARIANTS = 6, 4
"""Runs and variants that a note names."""
INCOMPARABLE_RUNS = 4
"""Runs that a note on figures names."""


def list_variant_notes(candidate: VariantCandidate, baseline_candidate: VariantCandidate) -> Iterator[str]:
    """Yield the notes on a variant."""
    members, baseline = candidate.members, baseline_candidate.members
    if candidate.tuning.note:
        yield candidate.tuning.note
    yield from _note_unfinished(members)
    yield from _note_outcomes(members)
    missing = Counter(
        "stopped" if t.state == "stopped" else classify_unfinished(t.state) for t in candidate.group.missing
    )
    if counts := [f"{missing[kind]} of its trials {words}" for kind, words in WITHOUT_METRICS.items() if missing[kind]]:
        yield f"{', '.join(counts)}: not counted as outcomes of the recipe"
    if members[0].raw.earlier_planned_steps:
        steps = ", then ".join(f"{number:,}" for number in members[0].raw.earlier_planned_steps)
        yield f"continued: its schedule had {steps} steps before, so it counts as a variant with other hyperparameters"
    if any(len({format_speed_settings(d) for d in m.raw.documents}) > 1 for m in members):
        yield (
            "its layout, micro-batches, memory or compile settings changed between attempts: its speed is that of the "
            "last attempt's settings"
        )
    if shared := sum(m.run.shared for m in members):
        yield (
            f"{shared} of {len(members)} runs ran on one machine at the same time as another run: their times, "
            "speeds and device-hours are unreliable"
        )
    if members is not baseline:
        yield from _note_hardware_and_code(members, baseline)
        yield from _note_text_amounts(members, baseline)


WITHOUT_METRICS = {
    "failed": "failed without metrics",
    "stopped": "stopped without metrics",
    "waiting": "have no metrics yet",
}


def _note_outcomes(members: Sequence[Member]) -> Iterator[str]:
    """Yield notes on divergence, outliers, spikes and steps that were not finite."""
    runs = [m.run for m in members]
    if diverged := [run for run in runs if run.diverged]:
        examples = ", ".join(f"seed {run.seed} at step {run.step:,}" for run in diverged[:NAMED_RUNS])
        remainder = f" and {len(diverged) - NAMED_RUNS} more" if len(diverged) > NAMED_RUNS else ""
        share = f"{len(diverged)} of {format_plural(len(runs), 'run')}"
        yield f"{share} diverged ({examples}{remainder}): the mean loss does not include them"
    if outliers := [f"seed {run.seed} with {run.validation:.4f}" for run in runs if run.outlier]:
        losses = [run.validation for run in runs if run.validation is not None]
        yield f"outlier: {', '.join(outliers)}; the median of its {len(losses)} runs is {np.median(losses):.4f}"
    if spikes := [(spike, run) for run in runs for spike in run.spikes]:
        top, run = max(spikes, key=lambda entry: entry[0].loss - entry[0].usual)
        rows = "" if top.rows is None else f" (rows {top.rows[0]} to {top.rows[1]})"
        yield (
            f"loss spikes in {sum(bool(run.spikes) for run in runs)} of {format_plural(len(runs), 'run')}: "
            f"{len(spikes)} in all, the highest by {top.loss - top.usual:.2f} nats to {top.loss:.2f} at step "
            f"{top.step:,} of seed {run.seed}{rows}"
        )
    counts = [int(m.history.steps.is_nonfinite().sum()) for m in members]
    if any(counts):
        where = f"{sum(map(bool, counts))} of {len(members)} runs: {format_plural(sum(counts), 'step')}"
        yield f"loss or gradient norm not finite in {where}, which did not update the weights"


def _note_unfinished(members: Sequence[Member]) -> Iterator[str]:
    """Yield a note on runs that are unfinished for another reason than divergence."""
    if unfinished := [m.run for m in members if not m.run.decayed and not m.run.diverged]:
        failed_count = sum(run.state == "failed" for run in unfinished)
        failed = f" ({failed_count} failed)" if failed_count else ""
        rest = "; the final results are those of the other runs" if len(unfinished) < len(members) else ""
        yield (
            f"{len(unfinished)} of {len(members)} runs not finished{failed}: their learning rate schedule is "
            f"incomplete, so they are not ranked{rest}"
        )


def _note_text_amounts(members: Sequence[Member], baseline: Sequence[Member]) -> Iterator[str]:
    """Yield a note on validation sets of different amounts of text, where bits per byte are compared."""
    sides = [(side[0].run.validation, side[0].run.bits) for side in (members, baseline)]
    amounts = [nats / math.log(2) / bits for nats, bits in sides if nats and bits]  # bytes per token
    measure = find_common_measure(members[0].raw, baseline[0].raw)
    if len(amounts) == 2 and measure == "bits per byte" and abs(amounts[0] / amounts[1] - 1) >= 0.02:
        yield (
            f"its validation set has {amounts[0] / amounts[1]:.2f} times the baseline's text, so bits per byte are "
            "measured on different amounts of text"
        )


def _note_hardware_and_code(members: Sequence[Member], baseline: Sequence[Member]) -> Iterator[str]:
    """Yield notes on differences to the baseline other than settings."""
    hardware = [{m.run.hardware or "unknown" for m in side} for side in (members, baseline)]
    codes = [_collect_code_ids(side) for side in (members, baseline)]
    for name, (own, other) in {"hardware": hardware, "code": codes}.items():
        if own != other:
            yield f"different {name}: {', '.join(sorted(own))}; the baseline: {', '.join(sorted(other))}"


def _collect_code_ids(members: Sequence[Member]) -> set[str]:
    return {str(document["ids"]["code"]) for m in members for document in m.raw.documents}


def list_comparison_notes(
    candidates: Sequence[VariantCandidate],
    collected: CollectedRuns,
    spec: SweepSpec,
    margin: float,
    named_baseline: str | None,
    margin_typed: bool,
) -> Iterator[str]:
    """Yield the notes on the whole comparison.

    Args:
        candidates: the variants, the baseline first.
        spec: the question, baseline, margin and target in effect.
        margin: in nats.
    """
    all_members = [m for v in candidates for m in v.members]
    yield from collected.corruption
    yield from (f"{raw.directory.name}: {corruption}" for raw in collected.runs for corruption in raw.corruption)
    if len(codes := _collect_code_ids(all_members)) > 1:
        used = [d.get(identity.OWN_CODE) or {} for m in all_members for d in m.raw.documents]
        digests = {name: {own.get(name) for own in used} for name in sorted({name for own in used for name in own})}
        changed = ", ".join(name for name, found in digests.items() if len(found - {None}) > 1)
        of_some = ", ".join(name for name, found in digests.items() if None in found)
        what = f" (files of your {changed} differ)" * bool(changed) + f" (not all use your {of_some})" * bool(of_some)
        yield f"the runs use {len(codes)} different versions of code or libraries{what}: {', '.join(sorted(codes))}"
    if len(hardware := {m.run.hardware for m in all_members}) > 1:
        yield f"different hardware: {', '.join(sorted(hardware))}; speeds and device-hours depend on it"
    if len(collected.sweeps) > 1 and not margin_typed:
        yield "several sweeps are given: their questions, margins and targets are ignored"
    if not collected.sweeps and not margin_typed:
        yield "no equivalence margin was fixed in advance: the default of 0.02 nats is used"
    if candidates:
        yield from _note_baseline_choice(candidates, named_baseline, spec)
    precisions = [m.raw.config.get("precision") or {} for m in all_members]
    if any(p.get("emulate") and p.get("matmuls", "compute") != "compute" for p in precisions):
        yield "some variants emulate 8-bit matmuls: their speed does not predict that of hardware with 8-bit matmuls"
    if candidates:
        yield from _note_seeds_needed(candidates, margin)


def _note_baseline_choice(
    candidates: Sequence[VariantCandidate], named_baseline: str | None, spec: SweepSpec
) -> Iterator[str]:
    """Yield notes on how the baseline was chosen, where that is not obvious."""
    baseline, groups = candidates[0], [v.group for v in candidates]
    wanted_settings = {} if named_baseline is not None else spec.baseline
    if wanted_settings and not has_settings(baseline.group, wanted_settings):
        settings = " ".join(f"{name}={value}" for name, value in wanted_settings.items())
        yield f"the sweep's baseline ({settings}) has no metrics: {baseline.group.label} is the baseline instead"
    fitting = [groups[i] for i in find_fitting(groups, wanted_settings)]
    if len({group.other_settings for group in fitting}) > 1 or (len(fitting) > 1 and baseline.tuning.rate_count < 2):
        yield (
            f"the sweep's baseline matches {len(fitting)} variants: the first one found, {baseline.group.label}, is "
            "used"
        )
    if baseline.tuning.is_best and baseline.tuning.rate_count > 1:
        yield f"the baseline is {baseline.group.label}: the best of its {baseline.tuning.rate_count} learning rates"


def _note_seeds_needed(candidates: Sequence[VariantCandidate], margin: float) -> Iterator[str]:
    """Yield a note on the seeds that show a difference of one margin: by pairs of seeds, else by the baseline's."""
    baseline = average_by_seed(candidates[0].members, lambda m: m.run.validation)
    notes = []
    for candidate in candidates[1:]:
        losses = average_by_seed(candidate.members, lambda m: m.run.validation)
        differences = [losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())]
        if len(differences) >= 2 and (spread := statistics.estimate_mean_difference(differences).spread):
            count = statistics.compute_seeds_needed(margin, spread)
            words = f"needs more than {statistics.MOST:,} seeds"
            if count is not None:
                more = f"needs {format_plural(count - len(differences), 'more seed')}"
                words = "has enough seeds" if count <= len(differences) else more
            notes.append(f"{candidate.group.label} {words}")
    values = list(baseline.values())  # unpaired, of the baseline alone
    if notes:
        further = f", and {len(notes) - NAMED_VARIANTS} further variants" if len(notes) > NAMED_VARIANTS else ""
        yield (
            f"to show a difference of {margin:.3g} nats from the baseline, by the spread of pairs of seeds: "
            f"{', '.join(notes[:NAMED_VARIANTS])}{further}"
        )
    elif len(values) > 1 and (spread := statistics.estimate_mean_difference(values).spread):
        count = statistics.compute_seeds_needed(margin, math.sqrt(2) * spread)
        number = f"more than {statistics.MOST:,}" if count is None else f"{count:,}"
        yield (
            f"the baseline's final validation loss has a standard deviation of {spread:.4f} nats over {len(values)} "
            f"seeds: to show a difference of {margin:.3g} takes {number} seeds per variant, fewer where the losses of "
            "paired seeds are correlated"
        )


# ---- figures of files and tasks ----


def drop_incomparable(members: Sequence[Sequence[Member]]) -> tuple[list[list[Member]], list[str]]:
    """Return the runs of each variant without figures whose content differs between runs, and notes on these.

    What a run did not record is taken to be the same as in other runs, if the name of the file is.
    """
    runs, dropped, notes = [m for variant in members for m in variant], set[str](), list[str]()
    for name in dict.fromkeys(evaluated.find_name(key) for m in runs for key in m.run.figures):
        contents = _group_by_content(runs, name)
        files, digests = {file for file, _ in contents}, {digest for _, digest in contents}
        unknown = [run for (_, digest), names in contents.items() if not digest for run in names]
        if len(digests - {""}) > 1 or (unknown and len(files) > 1):
            dropped.add(name)
            parts = (f"{d or 'not recorded'} in {_list_runs(names)}" for (_, d), names in contents.items())
            verb = "differ" if len(files) > 1 else "differs"
            what = f"{', '.join(sorted(files))} {verb}, or how it is read"
            notes.append(f"not compared: {what}: evaluation/{name} is of {'; '.join(parts)}")
        elif unknown and len(digests) > 1:
            what = f"evaluation/{name}: the content of {min(files)} is not recorded in {_list_runs(unknown)}"
            notes.append(f"{what}, and taken to be that of the other runs")

    def drop(m: Member) -> Member:
        kept = {key: value for key, value in m.run.figures.items() if evaluated.find_name(key) not in dropped}
        return replace(m, run=replace(m.run, figures=kept))

    return [[drop(m) for m in variant] for variant in members], notes


def _group_by_content(runs: Sequence[Member], name: str) -> dict[tuple[str, str], list[str]]:
    """Return the directories of the runs that have figures of a set or task, by its content.

    That is the name of the file and the digest of its content, which is empty where a run did not record it.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for m in runs:
        if name in map(evaluated.find_name, m.run.figures):
            attempt = m.history.final_validation.get("attempt")  # others may have measured other content
            document = next((d for d in m.raw.documents if d["attempt"] == attempt), m.raw.last_document)
            content = Path(evaluated.find_file(document, name)).name, document.get(evaluated.KEY, {}).get(name, "")
            names.setdefault(content, []).append(m.raw.directory.name)
    return names


def _list_runs(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - INCOMPARABLE_RUNS} more" if len(names) > INCOMPARABLE_RUNS else ""
    return ", ".join(names[:INCOMPARABLE_RUNS]) + remainder
