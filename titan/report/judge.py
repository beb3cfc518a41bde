"""`compare`: from directories to findings. Collect, group into arms, judge each against the baseline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.ledger import Asked
from titan.metrics.plot import short
from titan.report import arms, learning, quality, speed, statistics, tuning
from titan.report.arms import Group
from titan.report.collect import Collected, collect
from titan.report.findings import Arm, Comparison, Failed, Quality, Reached
from titan.report.quality import hour_axis
from titan.report.runs import Member, member
from titan.report.tuning import Tuned
from titan.run import billions

ENDED_BADLY = ("failed", "stopped")


@dataclass(frozen=True)
class Options:
    """What the user says of a comparison.

    Attributes:
        baseline: of the arm that the others are held against: settings, as in "parallelism=single,lr=0.001", or a
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
        Refusal: for a directory without runs, or a baseline that fits no arm.
    """
    options = options or Options()
    found = collect([Path(directory) for directory in directories])
    asked = _asked(found, options)
    begun = [raw for raw in found.runs if len(raw.metrics.steps)]
    groups = arms.grouped(begun)
    if groups:
        first = arms.baseline(groups, options.baseline, asked.baseline)
        groups = [groups[first], *groups[:first], *groups[first + 1 :]]
    members = [_members(group, groups) for group in groups]
    judged = _judged(groups, members, asked)
    return Comparison(
        title=_title(found, directories),
        question=asked.question,
        common=_common(groups),
        differs=arms.differs(groups),
        arms=tuple(judged),
        failed=_failed(found, members),
        target=asked.target,
        margin=asked.margin,
        notes=_notes(groups, members, found, options, asked),
    )


def _asked(found: Collected, options: Options) -> Asked:
    """What the only sweep asks, with what the user says instead."""
    asked = found.sweeps[0][1] if len(found.sweeps) == 1 else Asked()
    if options.margin is not None:
        asked = replace(asked, margin=options.margin)
    return replace(asked, target=options.target) if options.target is not None else asked


def _title(found: Collected, directories: Sequence[str | os.PathLike[str]]) -> str:
    if len(found.sweeps) == 1 and len(directories) == 1:
        return found.sweeps[0][0].name
    return ", ".join(os.fspath(directory).rstrip("/") for directory in directories)


def _members(group: Group, groups: Sequence[Group]) -> list[Member]:
    return [member(raw, label) for raw, label in zip(group.runs, arms.labels(group, groups), strict=True)]


def _judged(groups: Sequence[Group], members: Sequence[Sequence[Member]], asked: Asked) -> list[Arm]:
    """All arms; the first one is the baseline, or stands for the learning rate of it that was best."""
    tuned = tuning.tuned(groups, members)
    against = _best_of_baseline(groups, members, tuned)
    others = [
        i for i, group in enumerate(groups) if group.group_id != groups[against].group_id and tuned[i].chosen and i
    ]
    opened = [quality.judged(members[i], members[against]) for i in others]
    judged = dict(zip(others, quality.corrected(opened, asked.margin), strict=True))
    if against:
        judged = {i: tuple(_named(each, groups[against].label) for each in found) for i, found in judged.items()}
    return [_arm(i, groups, members, tuned[i], judged.get(i, ()), asked) for i in range(len(groups))]


def _named(found: Quality, against: str) -> Quality:
    """With what the arm was held against in its text, where that is not the baseline itself."""
    word, _, text = found.text.partition(": ")
    return replace(found, text=f"{word}: against {against} (the baseline's best learning rate): {text}")


def _best_of_baseline(groups: Sequence[Group], members: Sequence[Sequence[Member]], tuned: Sequence[Tuned]) -> int:
    """The arm that others' quality is held against: the baseline with the best of its learning rates."""
    family = [i for i, group in enumerate(groups) if tuning.rest(group) == tuning.rest(groups[0]) and tuned[i].chosen]
    return family[0] if groups and family else 0


def _arm(
    index: int,
    groups: Sequence[Group],
    members: Sequence[Sequence[Member]],
    tuned: Tuned,
    judged: tuple[Quality, ...],
    asked: Asked,
) -> Arm:
    group, own, baseline = groups[index], members[index], members[0]
    same = group.group_id == groups[0].group_id
    rates, theirs = (speed.rates([m.raw for m in side]) for side in (own, baseline))
    few = bool(index) and speed.from_blocks(rates, theirs)
    return Arm(
        label=group.label,
        settings=group.settings,
        baseline=index == 0,
        same_science=same,
        runs=tuple(m.run for m in own),
        speed=speed.of_arm(rates),
        speed_ratio=speed.ratio(rates, theirs) if index else None,
        validation=statistics.mean(list(quality.by_seed(own, lambda m: m.run.validation).values())),
        bits=statistics.mean(list(quality.by_seed(own, lambda m: m.run.bits).values())),
        few=few,
        learning=learning.judged(own, baseline, asked.margin) if same and index else None,
        quality=judged,
        reached=_reached(own, asked.target) if _in_nats(own, baseline) else None,
        notes=_arm_notes(own, baseline, tuned, few),
    )


def _in_nats(own: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Whether a loss a token of the baseline's means the same for an arm."""
    measure = quality.measure_of(own[0], baseline[0])
    return measure is not None and measure.name == "validation loss"


def _reached(members: Sequence[Member], target: float | None) -> Reached | None:
    """When the runs came to the target; those that have not are censored, those that failed will never."""
    validated = [m for m in members if len(m.run.curves.validation)]
    if target is None or not validated:
        return None
    times: list[tuple[float, float, bool]] = []
    for m in validated:
        failed = m.run.state == "failed"  # it will never come there: to leave it out would flatter those that did
        below = [i for i, value in enumerate(m.run.curves.validation) if value <= target]
        at = below[0] if below else -1
        tokens_hours = float(m.run.curves.validation_tokens[at]), float(hour_axis(m)[at])
        times.append((*((math.inf, math.inf) if failed and not below else tokens_hours), bool(below)))
    tokens, hours, came = (list(column) for column in zip(*times, strict=True))
    return Reached(
        runs=len(times),
        reached=sum(came),
        median_tokens=statistics.median_time(tokens, came),
        median_device_hours=statistics.median_time(hours, came),
    )


def _arm_notes(own: Sequence[Member], baseline: Sequence[Member], tuned: Tuned, blocks: bool) -> tuple[str, ...]:
    """What has to be known of an arm."""
    open_runs = [m.run for m in own if not m.run.decayed]
    notes = [tuned.note] if tuned.note else []
    if open_runs:
        lost = sum(run.state == "failed" for run in open_runs)
        failed = f" ({lost} failed)" if lost else ""
        rest = "; the final figures are of the others alone" if len(open_runs) < len(own) else ""
        notes.append(
            f"{len(open_runs)} of {len(own)} runs not finished{failed}: their decay is not done, they are not ranked"
            + rest
        )
    notes += _odd(own)
    if own[0].raw.continued:
        steps = ", then ".join(f"{number:,}" for number in own[0].raw.continued)
        notes.append(f"continued: its schedule was one of {steps} steps before; it counts as other science")
    if any(len({speed.way(d) for d in m.raw.documents}) > 1 for m in own):
        notes.append("its layout changed between lives, or its use of memory: its speed is that of the last life's")
    if own is not baseline:
        notes += [*_other(own, baseline), *_texts(own, baseline)]
        notes += ["its speed ratio is from blocks of steps of few runs: it says little of how runs differ"] * blocks
    return tuple(notes)


def _odd(own: Sequence[Member]) -> list[str]:
    """What was not finite in an arm's runs."""
    counts = [int(m.history.steps.odd().sum()) for m in own]
    notes = []
    if any(counts):
        of, steps = f"{sum(map(bool, counts))} of {len(own)} runs", f"{sum(counts):,} step{'s' * (sum(counts) > 1)}"
        notes.append(f"not finite in {of}: {steps}, which left the weights as they were")
    if lost := sum(not math.isfinite(m.history.last_validation) for m in own if m.run.state == "finished"):
        notes.append(f"the final validation of {lost} of {len(own)} runs is not finite: these are left out of its mean")
    return notes


def _texts(own: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """Whether fixed rows of as many tokens hold another length of text, where bits a byte are compared."""
    one, two = (_bytes_a_token(side[0]) for side in (own, baseline))
    measure = quality.measure_of(own[0], baseline[0])
    if one is None or two is None or measure is None or measure.name != "bits a byte" or abs(one / two - 1) < 0.02:
        return []
    return [
        f"its fixed rows hold {one / two:.2f} times the baseline's text: bits a byte are not of quite the same text"
    ]


def _bytes_a_token(member: Member) -> float | None:
    nats, bits = member.run.validation, member.run.bits
    return nats / math.log(2) / bits if nats and bits else None


def _other(own: Sequence[Member], baseline: Sequence[Member]) -> list[str]:
    """In what the arm differs from the baseline beside its settings."""
    notes = []
    mine, theirs = ({m.run.hardware or "unknown" for m in side} for side in (own, baseline))
    if mine != theirs:
        notes.append(f"other hardware: {', '.join(sorted(mine))}; the baseline: {', '.join(sorted(theirs))}")
    codes = [_codes(side) for side in (own, baseline)]
    if codes[0] != codes[1]:
        notes.append(f"other code: {', '.join(sorted(codes[0]))}; the baseline: {', '.join(sorted(codes[1]))}")
    return notes


def _codes(members: Sequence[Member]) -> set[str]:
    return {str(document["ids"]["code"]) for m in members for document in m.raw.documents}


def _common(groups: Sequence[Group]) -> dict[str, str]:
    """What all arms share and is worth saying."""
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
    """Points without figures, and runs that ended badly."""
    out = list(found.failed)
    known = {m.raw.directory: m for each in members for m in each}
    for raw in found.runs:
        if raw.state not in ENDED_BADLY and raw.directory in known:
            continue
        label = known[raw.directory].run.label if raw.directory in known else " ".join(raw.overrides)
        reason = raw.reason or "has not come to the end of its first step yet"
        out.append(Failed(label or raw.directory.name, str(raw.directory), raw.state, reason))
    return tuple(out)


def _notes(
    groups: Sequence[Group],
    members: Sequence[Sequence[Member]],
    found: Collected,
    options: Options,
    asked: Asked,
) -> tuple[str, ...]:
    """What holds for the whole."""
    every = [m for each in members for m in each]
    notes = [*found.damage, *(f"{raw.directory.name}: {wrong}" for raw in found.runs for wrong in raw.damage)]
    if len(codes := _codes(every)) > 1:
        notes.append(f"the runs have {len(codes)} different versions of code or libraries: {', '.join(sorted(codes))}")
    if len(hardware := {m.run.hardware for m in every}) > 1:
        notes.append(f"different hardware: {', '.join(sorted(hardware))}; speeds and hours differ by it")
    if len(found.sweeps) > 1 and options.margin is None:
        notes.append("there are several sweeps: their questions, margins and targets are left aside")
    if not found.sweeps and options.margin is None:
        notes.append("no margin was stated beforehand: that of 0.02 nats is titan's own")
    if groups and asked.baseline and options.baseline is None and not arms.fits(groups[0], asked.baseline):
        wanted = " ".join(f"{name}={value}" for name, value in asked.baseline.items())
        notes.append(f"the sweep's baseline ({wanted}) has no figures: {groups[0].label} stands in for it")
    if asked.baseline and options.baseline is None and (many := len(arms.fitting(groups, asked.baseline))) > 1:
        notes.append(f"the sweep's baseline fits {many} arms: {groups[0].label}, found first, is taken")
    against = _best_of_baseline(groups, members, tuning.tuned(groups, members))
    if against:
        notes.append(f"quality is held against {groups[against].label}: the baseline's best learning rate")
    emulated = [m for m in every if _emulated(m)]
    notes += ["eight bits are emulated in some arms: their speed says nothing of hardware that has them"] * bool(
        emulated
    )
    return (*notes, *_seeds(members, asked.margin))


def _emulated(member: Member) -> bool:
    """Whether a run computed products in eight bits as if the hardware had them."""
    precision = member.raw.config.get("precision") or {}
    return bool(precision.get("emulate")) and precision.get("products", "compute") != "compute"


def _seeds(members: Sequence[Sequence[Member]], margin: float) -> list[str]:
    """How many seeds a difference as large as the margin takes, by the spread of the baseline's seeds."""
    losses = list(quality.by_seed(members[0], lambda m: m.run.validation).values()) if members else []
    if len(losses) < 2 or not (spread := statistics.paired(losses).spread):
        return []
    needed = statistics.seeds_needed(margin, math.sqrt(2) * spread)
    count = f"about {needed:,}" if needed else f"more than {statistics.MOST:,}"
    return [
        f"the baseline's final validation loss spreads by {spread:.4f} nats over {len(losses)} seeds (standard "
        f"deviation): to show a difference of {margin:g} takes {count} seeds an arm, fewer where pairs go together"
    ]
