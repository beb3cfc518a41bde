"""`compare`: collect runs, group them into variants, and compare each variant with the baseline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.console.numbers import billions, short
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
from titan.report.candidates import Candidate, find_candidates
from titan.report.collect import Collected, collect
from titan.report.findings import Comparison, Failed, Learning, Quality, Reached, Variant
from titan.report.runs import Member
from titan.report.superiority import hour_axis
from titan.report.variants import Group
from titan.sweep.ledger import SweepSpec

ENDED_BADLY = ("failed", "stopped")


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
    found = collect([Path(directory) for directory in directories])
    asked = _asked(found, options)
    candidates = find_candidates(found, asked, options.baseline)
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
        notes=notes.of_whole(candidates, found, asked, options.baseline, options.margin),
    )


def _asked(found: Collected, options: Options) -> SweepSpec:
    """Return the sweep's question, margin and target, if there is one sweep, overridden by the user's."""
    asked = found.sweeps[0][1] if len(found.sweeps) == 1 else SweepSpec()
    if options.margin is not None:
        asked = replace(asked, margin=options.margin)
    return replace(asked, target=options.target) if options.target is not None else asked


def _title(found: Collected, directories: Sequence[str | os.PathLike[str]]) -> str:
    if len(found.sweeps) == 1 and len(directories) == 1:
        return found.sweeps[0][0].name
    return ", ".join(os.fspath(directory).rstrip("/") for directory in directories)


def _judged(candidates: Sequence[Candidate], asked: SweepSpec) -> list[Variant]:
    """Return all variants, the baseline first."""
    if not candidates:
        return []
    baseline = candidates[0]
    others = [v for v in candidates[1:] if v.group.group_id != baseline.group.group_id and v.tuned.chosen]
    opened = [superiority.compared(v.members, baseline.members, asked.target) for v in others]
    qualities = dict(zip(map(id, others), verdicts.corrected(opened, asked.margin), strict=True))
    return [_variant(v, candidates, qualities.get(id(v), ()), asked) for v in candidates]


def _ordered(made: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the baseline first, then the others by their result."""
    return (*made[:1], *(made[i] for i in ranking.order(made) if i))


def _variant(
    candidate: Candidate, candidates: Sequence[Candidate], qualities: tuple[Quality, ...], asked: SweepSpec
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
        validation=statistics.mean(list(seeds.by_seed(own, lambda m: m.run.validation).values())),
        bits=statistics.mean(list(seeds.by_seed(own, lambda m: m.run.bits).values())),
        few=few,
        speed_doubt=doubt if rates and theirs else "",
        learning=_learning(candidate, candidates, asked.margin),
        quality=qualities,
        reached=_reached(own, asked.target) if _in_nats(own, baseline) else None,
        notes=notes.of_variant(candidate, candidates[0]),
        outcomes=outcomes.of_variant(own, candidate.missing),
        tried=candidate.tuned.tried,
        untuned=not candidate.tuned.chosen,
        against_best=candidate.tuned.against,
    )


def _doubt(own: Sequence[Member], baseline: Sequence[Member], few: bool) -> str:
    """Return why speed is not ranked; empty where it is."""
    if any(m.run.shared for m in (*own, *baseline)):
        return "trials ran on one machine at the same time"
    return f"fewer than {speed.FEW} runs of a variant" if few else ""


def _learning(candidate: Candidate, candidates: Sequence[Candidate], margin: float) -> Learning | None:
    """Return whether a variant learns the same as the one of its recipe: the baseline or a learning rate of it."""
    other = next((v for v in candidates if _must_learn_the_same(candidate, v, candidates[0])), None)
    if other is None or candidate is candidates[0]:
        return None
    found = equivalence.compared(candidate.members, other.members, margin)
    if other is candidates[0]:
        return found
    word, _, text = found.text.partition(": ")
    return replace(found, text=f"{word}: compared with {other.group.label}: {text}")


def _must_learn_the_same(candidate: Candidate, other: Candidate, baseline: Candidate) -> bool:
    """Return whether a variant must learn the same as `other`, which is the baseline or another learning rate of it."""
    same = candidate.group.group_id == other.group.group_id
    return same and candidate is not other and other.group.rest == baseline.group.rest


def _in_nats(own: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Return whether losses per token are comparable with the baseline's."""
    found = measure.measure_of(own[0], baseline[0])
    return found is not None and found.name == "validation loss"


def _reached(members: Sequence[Member], target: float | None) -> Reached | None:
    """Return when the runs reached the target; others are censored, and failed ones never reach it."""
    validated = [m for m in members if len(m.run.curves.validation)]
    if target is None or not validated:
        return None
    times: list[tuple[float, float, bool]] = []
    for m in validated:
        curves, hours = m.run.curves, hour_axis(m)
        tokens = superiority.crossing(curves.validation_tokens, curves.validation, target)
        if tokens is not None:
            times.append((tokens, superiority.crossing(hours, curves.validation, target) or 0.0, True))
        elif m.run.state == "failed" or m.run.diverged:  # leaving it out would bias the median
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


def _common(groups: Sequence[Group]) -> dict[str, str]:
    """Return the main settings that all variants share."""
    each_worth = [_worth_saying(group) for group in groups]
    return {
        key: value
        for key, value in (each_worth[0] if each_worth else {}).items()
        if all(t.get(key) == value for t in each_worth)
    }


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
    """Return the model's parameter count; None where its class can't be loaded."""
    model = speed.model_of(group.runs[0])
    return model.parameters() if model else None


def _failed(found: Collected, members: Sequence[Sequence[Member]]) -> tuple[Failed, ...]:
    """Return trials without metrics, and runs that failed or stopped."""
    out = list(found.failed)
    known = {m.raw.directory: m for each in members for m in each}
    for raw in found.runs:
        if raw.state not in ENDED_BADLY and raw.directory in known:
            continue
        label = known[raw.directory].run.label if raw.directory in known else " ".join(raw.overrides)
        reason = raw.reason or "its first step is not finished"
        out.append(Failed(label or raw.directory.name, str(raw.directory), raw.state, reason, raw.overrides))
    return tuple(out)
