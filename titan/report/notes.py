"""What a reader has to know beside the answers: notes on a variant and on the whole comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan.report import outcomes, speed, statistics, variants
from titan.report.candidates import Candidate
from titan.report.collect import Collected
from titan.report.measure import measure_of
from titan.report.runs import Member
from titan.report.seeds import by_seed
from titan.sweep.ledger import SweepSpec


def of_variant(candidate: Candidate, first: Candidate) -> tuple[str, ...]:
    """Return the notes on a variant."""
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
    """Return a note on runs that are unfinished for another reason than divergence."""
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
    """Return a note on validation sets of different amounts of text, where bits per byte are compared."""
    one, two = (_bytes_a_token(side[0]) for side in (own, baseline))
    measure = measure_of(own[0], baseline[0])
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
    """Return notes on differences to the baseline other than settings."""
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


def of_whole(
    candidates: Sequence[Candidate], found: Collected, asked: SweepSpec, named: str | None, margin: float | None
) -> tuple[str, ...]:
    """Return the notes on the whole comparison.

    Args:
        candidates: the variants, the baseline first.
        found: the files.
        asked: the question, baseline, margin and target in effect.
        named: the baseline that the user named.
        margin: the margin that the user gave.
    """
    groups, every = [v.group for v in candidates], [m for v in candidates for m in v.members]
    notes = [*found.corruption, *(f"{raw.directory.name}: {wrong}" for raw in found.runs for wrong in raw.corruption)]
    if len(codes := _codes(every)) > 1:
        notes.append(f"the runs use {len(codes)} different versions of code or libraries: {', '.join(sorted(codes))}")
    if len(hardware := {m.run.hardware for m in every}) > 1:
        notes.append(f"different hardware: {', '.join(sorted(hardware))}; speeds and device-hours depend on it")
    if len(found.sweeps) > 1 and margin is None:
        notes.append("several sweeps are given: their questions, margins and targets are ignored")
    if not found.sweeps and margin is None:
        notes.append("no equivalence margin was fixed in advance: the default of 0.02 nats is used")
    notes += _of_baseline(candidates, named, asked) if candidates else []
    emulated = [m for m in every if _emulated(m)]
    notes += [
        "some variants emulate 8-bit matmuls: their speed does not predict that of hardware with 8-bit matmuls"
    ] * bool(emulated)
    return (*notes, *(_seeds(candidates[0].members, asked.margin) if groups else []))


def _of_baseline(candidates: Sequence[Candidate], named: str | None, asked: SweepSpec) -> list[str]:
    """Return notes on how the baseline was chosen, where that is not obvious."""
    first, groups = candidates[0], [v.group for v in candidates]
    notes = []
    wanted = {} if named is not None else asked.baseline
    if wanted and not variants.fits(first.group, wanted):
        settings = " ".join(f"{name}={value}" for name, value in wanted.items())
        notes.append(f"the sweep's baseline ({settings}) has no metrics: {first.group.label} is the baseline instead")
    fitting = [groups[i] for i in variants.fitting(groups, wanted)]
    if len({group.rest for group in fitting}) > 1 or (len(fitting) > 1 and first.tuned.tried < 2):
        notes.append(
            f"the sweep's baseline matches {len(fitting)} variants: the first one found, {first.group.label}, is used"
        )
    if first.tuned.chosen and first.tuned.tried > 1:
        notes.append(f"the baseline is {first.group.label}: the best of its {first.tuned.tried} learning rates")
    return notes


def _emulated(member: Member) -> bool:
    """Return whether a run emulated 8-bit matmuls."""
    precision = member.raw.config.get("precision") or {}
    return bool(precision.get("emulate")) and precision.get("matmuls", "compute") != "compute"


def _seeds(baseline: Sequence[Member], margin: float) -> list[str]:
    """Return a note on the seeds that show a difference of one margin, by the spread of the baseline's seeds."""
    losses = list(by_seed(baseline, lambda m: m.run.validation).values())
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
