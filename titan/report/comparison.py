"""`compare`: from directories to findings. Collect, group into variants, judge each against the baseline."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.console.numbers import billions, short
from titan.report import (
    divergence,
    equivalence,
    lr_tuning,
    outcomes,
    quality,
    ranking,
    sharing,
    speed,
    statistics,
    variants,
)
from titan.report.collect import Collected, collect
from titan.report.findings import Comparison, Failed, Learning, Quality, Reached, Variant
from titan.report.lr_tuning import Tuned
from titan.report.quality import hour_axis
from titan.report.runs import Member, member
from titan.report.variants import Group
from titan.sweep.ledger import SweepSpec

ENDED_BADLY = ("failed", "stopped")


@dataclass(frozen=True)
class Options:
    """What the user says of a comparison.

    Attributes:
        baseline: of the variant that the others are held against: settings, as in "parallelism=single,lr=0.001", or a
            run's directory; None: as the sweep says, else the first one found.
        margin: difference in validation loss, nats, that counts as none; None: as the sweep says, else 0.02.
        target: the validation loss to come to; None: as the sweep says.
    """

    baseline: str | None = None
    margin: float | None = None
    target: float | None = None


def compare(directories: Sequence[str | os.PathLike[str]], options: Options | None = None) -> Comparison:
    """Compare all runs in and below some directories.

    Args:
        directories: of runs and sweeps, or folders that hold some.
        options: what the user says.

    Raises:
        ConfigError: for a directory without runs, or a baseline that fits no variant.
    """
    options = options or Options()
    found = collect([Path(directory) for directory in directories])
    asked = _asked(found, options)
    candidates = _candidates(found, asked, options)
    groups, members = [v.group for v in candidates], [v.members for v in candidates]
    return Comparison(
        title=_title(found, directories),
        question=asked.question,
        common=_common(groups),
        differs=variants.differs(groups),
        variants=_ordered(_judged(candidates, asked)),
        failed=_failed(found, members),
        target=asked.target,
        margin=asked.margin,
        notes=_notes(candidates, found, options, asked),
    )


@dataclass(frozen=True)
class Candidate:
    """What a variant is made of.

    Attributes:
        group: its runs' files, and the settings that tell it from the others.
        members: its runs.
        tuned: whether it has the best of its learning rates.
        missing: its trials without figures.
    """

    group: Group
    members: Sequence[Member]
    tuned: Tuned
    missing: tuple[Failed, ...] = ()


def _candidates(found: Collected, asked: SweepSpec, options: Options) -> list[Candidate]:
    """All variants, the baseline first: of several learning rates of it the one that is best."""
    begun = [raw for raw in found.runs if len(raw.metrics.steps) or divergence.gave_up(raw)]
    groups, alongside = variants.grouped(begun), sharing.shared(found.runs)
    members = outcomes.marked([_members(group, groups, alongside) for group in groups], asked.margin)
    tuned = lr_tuning.tuned(groups, members)
    missing = [_missing(group, found.failed) for group in groups]
    made = [Candidate(*each) for each in zip(groups, members, tuned, missing, strict=True)]
    if not made:
        return []
    possible = variants.baselines(groups, options.baseline, asked.baseline)
    first = next((i for i in possible if tuned[i].chosen), possible[0])
    return [made[first], *made[:first], *made[first + 1 :]]


def _missing(group: Group, failed: Sequence[Failed]) -> tuple[Failed, ...]:
    """The trials without figures that differ from a variant's runs in their seed alone."""
    recipes = {outcomes.recipe(raw.overrides) for raw in group.runs}
    return tuple(trial for trial in failed if trial.overrides and outcomes.recipe(trial.overrides) in recipes)


def _asked(found: Collected, options: Options) -> SweepSpec:
    """What the only sweep asks, with what the user says instead."""
    asked = found.sweeps[0][1] if len(found.sweeps) == 1 else SweepSpec()
    if options.margin is not None:
        asked = replace(asked, margin=options.margin)
    return replace(asked, target=options.target) if options.target is not None else asked


def _title(found: Collected, directories: Sequence[str | os.PathLike[str]]) -> str:
    if len(found.sweeps) == 1 and len(directories) == 1:
        return found.sweeps[0][0].name
    return ", ".join(os.fspath(directory).rstrip("/") for directory in directories)


def _members(group: Group, groups: Sequence[Group], alongside: Collection[Path]) -> list[Member]:
    labels = variants.labels(group, groups)
    return [member(raw, label, raw.directory in alongside) for raw, label in zip(group.runs, labels, strict=True)]


def _judged(candidates: Sequence[Candidate], asked: SweepSpec) -> list[Variant]:
    """All variants, the baseline first."""
    if not candidates:
        return []
    baseline = candidates[0]
    others = [v for v in candidates[1:] if v.group.group_id != baseline.group.group_id and v.tuned.chosen]
    opened = [quality.judged(v.members, baseline.members, asked.target) for v in others]
    judged = dict(zip(map(id, others), quality.corrected(opened, asked.margin), strict=True))
    return [_variant(v, candidates, judged.get(id(v), ()), asked) for v in candidates]


def _ordered(made: Sequence[Variant]) -> tuple[Variant, ...]:
    """The baseline first, then the others by their result."""
    return (*made[:1], *(made[i] for i in ranking.order(made) if i))


def _variant(
    candidate: Candidate, candidates: Sequence[Candidate], judged: tuple[Quality, ...], asked: SweepSpec
) -> Variant:
    group, own, baseline = candidate.group, candidate.members, candidates[0].members
    first = candidate is candidates[0]
    rates, theirs = (speed.rates([m.raw for m in side]) for side in (own, baseline))
    few = not first and speed.few(rates, theirs)
    doubt = "" if first else _doubt(own, baseline, few)
    return Variant(
        label=group.label,
        settings=group.settings,
        baseline=first,
        same_science=group.group_id == candidates[0].group.group_id,
        runs=tuple(m.run for m in own),
        speed=speed.of_variant(rates),
        speed_ratio=None if first else speed.doubted(speed.ratio(rates, theirs), doubt),
        validation=statistics.mean(list(quality.by_seed(own, lambda m: m.run.validation).values())),
        bits=statistics.mean(list(quality.by_seed(own, lambda m: m.run.bits).values())),
        few=few,
        speed_doubt=doubt if rates and theirs else "",
        learning=_learning(candidate, candidates, asked.margin),
        quality=judged,
        reached=_reached(own, asked.target) if _in_nats(own, baseline) else None,
        notes=_variant_notes(candidate, candidates[0]),
        outcomes=outcomes.of_variant(own, candidate.missing),
        tried=candidate.tuned.tried,
        untuned=not candidate.tuned.chosen,
        against_best=candidate.tuned.against,
    )


def _doubt(own: Sequence[Member], baseline: Sequence[Member], few: bool) -> str:
    """Why nothing is said of "faster" or "slower"; empty where it may be."""
    if any(m.run.shared for m in (*own, *baseline)):
        return "trials ran on one machine at the same time"
    return f"fewer than {speed.FEW} runs of a variant" if few else ""


def _learning(candidate: Candidate, candidates: Sequence[Candidate], margin: float) -> Learning | None:
    """Whether a variant learns what the one of the same recipe learns: the baseline, or another learning rate of it."""
    twin = next((v for v in candidates if _twins(candidate, v, candidates[0])), None)
    if twin is None or candidate is candidates[0]:
        return None
    found = equivalence.judged(candidate.members, twin.members, margin)
    if twin is candidates[0]:
        return found
    word, _, text = found.text.partition(": ")
    return replace(found, text=f"{word}: compared with {twin.group.label}: {text}")


def _twins(candidate: Candidate, other: Candidate, baseline: Candidate) -> bool:
    """Return whether a variant must learn the same as `other`, which is the baseline or another learning rate of it."""
    same = candidate.group.group_id == other.group.group_id
    return same and candidate is not other and other.group.rest == baseline.group.rest


def _in_nats(own: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Whether a loss a token of the baseline's means the same for a variant."""
    measure = quality.measure_of(own[0], baseline[0])
    return measure is not None and measure.name == "validation loss"


def _reached(members: Sequence[Member], target: float | None) -> Reached | None:
    """When the runs came to the target; those that have not are censored, those that failed will never."""
    validated = [m for m in members if len(m.run.curves.validation)]
    if target is None or not validated:
        return None
    times: list[tuple[float, float, bool]] = []
    for m in validated:
        curves, hours = m.run.curves, hour_axis(m)
        tokens = quality.crossing(curves.validation_tokens, curves.validation, target)
        if tokens is not None:
            times.append((tokens, quality.crossing(hours, curves.validation, target) or 0.0, True))
        elif m.run.state == "failed" or m.run.diverged:  # it never will: to leave it out would flatter those that did
            times.append((math.inf, math.inf, False))
        else:
            times.append((float(curves.validation_tokens[-1]), float(hours[-1]), False))
    spent, hours_spent, came = (list(column) for column in zip(*times, strict=True))
    return Reached(
        runs=len(times),
        reached=sum(came),
        median_tokens=statistics.median_time(spent, came),
        median_device_hours=statistics.median_time(hours_spent, came),
        at_first=sum(bool(m.run.curves.validation[0] <= target) for m in validated),
    )


def _variant_notes(candidate: Candidate, first: Candidate) -> tuple[str, ...]:
    """What has to be known of a variant."""
    own, baseline = candidate.members, first.members
    notes = [candidate.tuned.note] if candidate.tuned.note else []
    notes += [*_unfinished(own), *outcomes.notes(own)]
    if counts := outcomes.missing(candidate.missing):
        notes.append(f"{counts}: not counted as outcomes of the recipe")
    if own[0].raw.continued:
        steps = ", then ".join(f"{number:,}" for number in own[0].raw.continued)
        notes.append(
            f"continued: its schedule had {steps} steps before, so it counts as a variant with other hyperparameters"
        )
    if any(len({speed.way(d) for d in m.raw.documents}) > 1 for m in own):
        notes.append(
            "its layout, micro-batches, memory or compile settings changed between attempts: its speed is that of the "
            "last attempt's settings"
        )
    if shared := [m.run.label for m in own if m.run.shared]:
        notes.append(
            f"{len(shared)} of {len(own)} runs ran on one machine at the same time as another run: their times, "
            "speeds and device-hours are unreliable"
        )
    if own is not baseline:
        notes += [*_other(own, baseline), *_texts(own, baseline)]
    return tuple(notes)


def _unfinished(own: Sequence[Member]) -> list[str]:
    """That runs are not finished, for another reason than divergence."""
    lacking = [m.run for m in own if not m.run.decayed and not m.run.diverged]
    if not lacking:
        return []
    lost = sum(run.state == "failed" for run in lacking)
    failed = f" ({lost} failed)" if lost else ""
    rest = "; the final results are those of the other runs" if len(lacking) < len(own) else ""
    return [
        f"{len(lacking)} of {len(own)} runs not finished{failed}: their learning rate schedule is incomplete, so they "
        f"are not ranked{rest}"
    ]


def _texts(own: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """Whether fixed rows of as many tokens hold another length of text, where bits a byte are compared."""
    one, two = (_bytes_a_token(side[0]) for side in (own, baseline))
    measure = quality.measure_of(own[0], baseline[0])
    if one is None or two is None or measure is None or measure.name != "bits per byte" or abs(one / two - 1) < 0.02:
        return []
    return [
        f"its validation set has {one / two:.2f} times the baseline's text, so bits per byte are measured on different "
        "amounts of text"
    ]


def _bytes_a_token(member: Member) -> float | None:
    nats, bits = member.run.validation, member.run.bits
    return nats / math.log(2) / bits if nats and bits else None


def _other(own: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """In what the variant differs from the baseline beside its settings."""
    notes = []
    mine, theirs = ({m.run.hardware or "unknown" for m in side} for side in (own, baseline))
    if mine != theirs:
        notes.append(f"different hardware: {', '.join(sorted(mine))}; the baseline: {', '.join(sorted(theirs))}")
    codes = [_codes(side) for side in (own, baseline)]
    if codes[0] != codes[1]:
        notes.append(f"different code: {', '.join(sorted(codes[0]))}; the baseline: {', '.join(sorted(codes[1]))}")
    return notes


def _codes(members: Sequence[Member]) -> set[str]:
    return {str(document["ids"]["code"]) for m in members for document in m.raw.documents}


def _common(groups: Sequence[Group]) -> dict[str, str]:
    """What all variants share and is worth saying."""
    told = [_worth_saying(group) for group in groups]
    return {key: value for key, value in (told[0] if told else {}).items() if all(t.get(key) == value for t in told)}


def _worth_saying(group: Group) -> dict[str, str]:
    raw, choices = group.runs[0], group.facts.choices
    training, hardware = raw.config["training"], raw.hardware
    found = {
        axis: choices[axis] for axis in ("model", "dataset", "optimizer", "parallelism", "memory") if axis in choices
    }
    if size := _parameters(group):
        found["model"] = f"{found.get('model', '?')}, {billions(size)} parameters"
    batch = "" if training.get("grow") else f" of {short(training['global_batch'])} tokens"
    return found | {
        "precision": str(raw.config.get("precision", {}).get("compute", "?")),
        "training": f"{training['steps']:,} steps{batch}, rows of {training['seq_len']:,}",
        "optimizer.lr": f"{raw.config['optimizer'].get('lr', 0):g}",
        "devices": f"{raw.devices} x {hardware}" if hardware else str(raw.devices),
    }


def _parameters(group: Group) -> int | None:
    """Of the model; None where its class can't be loaded."""
    model = speed.model_of(group.runs[0])
    return model.parameters() if model else None


def _failed(found: Collected, members: Sequence[Sequence[Member]]) -> tuple[Failed, ...]:
    """Trials without figures, and runs that ended badly."""
    out = list(found.failed)
    known = {m.raw.directory: m for each in members for m in each}
    for raw in found.runs:
        if raw.state not in ENDED_BADLY and raw.directory in known:
            continue
        label = known[raw.directory].run.label if raw.directory in known else " ".join(raw.overrides)
        reason = raw.reason or "its first step is not finished"
        out.append(Failed(label or raw.directory.name, str(raw.directory), raw.state, reason, raw.overrides))
    return tuple(out)


def _notes(candidates: Sequence[Candidate], found: Collected, options: Options, asked: SweepSpec) -> tuple[str, ...]:
    """What holds for the whole."""
    groups, every = [v.group for v in candidates], [m for v in candidates for m in v.members]
    notes = [*found.damage, *(f"{raw.directory.name}: {wrong}" for raw in found.runs for wrong in raw.damage)]
    if len(codes := _codes(every)) > 1:
        notes.append(f"the runs use {len(codes)} different versions of code or libraries: {', '.join(sorted(codes))}")
    if len(hardware := {m.run.hardware for m in every}) > 1:
        notes.append(f"different hardware: {', '.join(sorted(hardware))}; speeds and device-hours depend on it")
    if len(found.sweeps) > 1 and options.margin is None:
        notes.append("several sweeps are given: their questions, margins and targets are ignored")
    if not found.sweeps and options.margin is None:
        notes.append("no equivalence margin was fixed in advance: the default of 0.02 nats is used")
    notes += _of_baseline(candidates, options, asked) if candidates else []
    emulated = [m for m in every if _emulated(m)]
    notes += [
        "some variants emulate 8-bit matmuls: their speed does not predict that of hardware with 8-bit matmuls"
    ] * bool(emulated)
    return (*notes, *(_seeds(candidates[0].members, asked.margin) if groups else []))


def _of_baseline(candidates: Sequence[Candidate], options: Options, asked: SweepSpec) -> list[str]:
    """How the baseline was found, where that is not plain."""
    first, groups = candidates[0], [v.group for v in candidates]
    notes = []
    wanted = {} if options.baseline is not None else asked.baseline
    if wanted and not variants.fits(first.group, wanted):
        told = " ".join(f"{name}={value}" for name, value in wanted.items())
        notes.append(f"the sweep's baseline ({told}) has no metrics: {first.group.label} is the baseline instead")
    fitting = [groups[i] for i in variants.fitting(groups, wanted)]
    if len({group.rest for group in fitting}) > 1 or (len(fitting) > 1 and first.tuned.tried < 2):
        notes.append(
            f"the sweep's baseline matches {len(fitting)} variants: the first one found, {first.group.label}, is used"
        )
    if first.tuned.chosen and first.tuned.tried > 1:
        notes.append(f"the baseline is {first.group.label}: the best of its {first.tuned.tried} learning rates")
    return notes


def _emulated(member: Member) -> bool:
    """Whether a run computed products in eight bits as if the hardware had them."""
    precision = member.raw.config.get("precision") or {}
    return bool(precision.get("emulate")) and precision.get("products", "compute") != "compute"


def _seeds(baseline: Sequence[Member], margin: float) -> list[str]:
    """How many seeds a difference as large as the margin takes, by the spread of the baseline's seeds."""
    losses = list(quality.by_seed(baseline, lambda m: m.run.validation).values())
    if len(losses) < 2 or not (spread := statistics.paired(losses).spread):
        return []
    needed = statistics.with_range(
        lambda s: statistics.seeds_needed(margin, math.sqrt(2) * s), spread, len(losses) - 1, len(losses)
    )
    return [
        f"the baseline's final validation loss has a standard deviation of {spread:.4f} nats over {len(losses)} seeds: "
        f"to show a difference of {margin:g} takes {statistics.about(needed, 'seeds per variant')}, fewer where the "
        "losses of paired seeds are correlated"
    ]
