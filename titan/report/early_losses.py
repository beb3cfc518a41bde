"""Early losses and the ends of variants: how alike they rank these runs, and what stopping early would have saved.

The rule for stopping is that of `titan.scaling.early_stopping`, replayed on the variants of a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from titan.console.numbers import format_tokens
from titan.report.align import collect_differing_settings, find_common_measure
from titan.report.estimate import Member
from titan.report.findings import RunResult
from titan.report.rank import VariantCandidate
from titan.scaling.early_stopping import (
    FEWEST_EARLIER,
    Trajectory,
    examine_position,
    find_decay,
    list_shape_settings,
    replay_stops,
)

WINDOWS = 20
"""Parts of a run over which training losses are averaged, where it was not validated before its end."""
LEAST_VARIANTS = 8
"""Finished variants without which nothing is said."""


def note_early_losses(candidates: Sequence[VariantCandidate]) -> list[str]:
    """Return a sentence on the early losses of a comparison's finished variants; none where they are too few."""
    variants = build_trajectories(candidates)
    positions = sorted(set.intersection(*({*v.losses} - {v.length} for v in variants))) if variants else []
    if len(variants) < LEAST_VARIANTS or not positions:
        return []
    differs = collect_differing_settings([candidate.group for candidate in candidates])
    return [_describe(variants, positions, list_shape_settings(differs))]


def _describe(variants: Sequence[Trajectory], positions: Sequence[int], shapes: Sequence[str]) -> str:
    """Return the rank correlation at the first position at which all may stop, and what stopping would have done."""
    same_shape = not shapes
    allowed = [at for at in positions if all(variant.may_stop(at, same_shape) for variant in variants)]
    shown = allowed[0] if allowed else positions[-1]
    correlation = np.nan_to_num(examine_position(variants, shown, same_shape=True).correlation)  # equal: no ranks
    sentence = (
        f"early losses, after {format_tokens(shown)} tokens, rank the {len(variants)} variants as the ends do: "
        f"{correlation:.2f} (rank correlation)"
    )
    if shapes:
        sentence += f"; the variants differ in {', '.join(shapes[:4])}, which changes the shape of the curve"
    if not allowed:
        return f"{sentence}, and none has a loss between the decay of its rate and its end: stopping is not offered"
    return sentence + _describe_replay(variants, same_shape)


def _describe_replay(variants: Sequence[Trajectory], same_shape: bool) -> str:
    if len(variants) <= FEWEST_EARLIER:
        return f"; stopping is offered from {FEWEST_EARLIER + 1} variants on"
    when = "" if same_shape else " after the decay of the learning rate"
    result = replay_stops(variants, same_shape)
    if result.lost:
        return (
            f"; the margin rule would have stopped {len(result.lost)} that ended best so far{when}: it is not offered"
        )
    if not result.stopped:
        return f"; the margin rule would have stopped none of them{when}"
    return (
        f"; the margin rule (hydra.sweeper.pruner=margin) would have stopped {len(result.stopped)} of them{when}, "
        f"saved {100 * result.saved:.0f} % of the tokens and kept each best one, on these runs"
    )


def build_trajectories(candidates: Sequence[VariantCandidate]) -> list[Trajectory]:
    """Return the losses of variants by tokens, the mean of their finished runs; none where no measure compares all."""
    finished = [[m for m in candidate.members if _has_ended(m.run)] for candidate in candidates]
    labels = [candidate.group.label for candidate in candidates]
    pairs = [(label, members) for label, members in zip(labels, finished, strict=True) if members]
    measures = {find_common_measure(members[0].raw, pairs[0][1][0].raw) for _, members in pairs}
    if not measures or None in measures:
        return []
    built = [_average_runs(label, members, "bits per byte" in measures) for label, members in pairs]
    return [variant for variant in built if variant is not None]


def _has_ended(run: RunResult) -> bool:
    return run.state == "finished" and run.decayed and run.validation is not None and bool(np.isfinite(run.validation))


def _average_runs(name: str, members: Sequence[Member], by_bytes: bool) -> Trajectory | None:
    """Return the mean trajectory of a variant's runs, at the tokens that all have; None without any early loss."""
    runs = [member.run for member in members]
    ends = [run.bits if by_bytes else run.validation for run in runs]
    losses = [_collect_losses(run, by_bytes) for run in runs]
    shared = sorted(set.intersection(*({*by_tokens} for by_tokens in losses)))
    if None in ends or not shared:
        return None
    means = {tokens: float(np.mean([by_tokens[tokens] for by_tokens in losses])) for tokens in shared}
    decayed_from = max(_find_decay(run) for run in runs)
    return Trajectory(name, means, max(run.tokens for run in runs), float(np.mean(ends)), decayed_from)  # type: ignore[arg-type]


def _find_decay(run: RunResult) -> float:
    """Return the tokens from which on the learning rate has decayed."""
    curves = run.curves
    peak = float(np.nanmax(curves.rates)) if np.isfinite(curves.rates).any() else 0.0
    return find_decay(curves.tokens, curves.rates / peak) if peak > 0 else float("inf")


def _collect_losses(run: RunResult, by_bytes: bool) -> Mapping[int, float]:
    """Return a run's losses before its end, by tokens.

    They are its validations, else means of the training loss; these only where all validate on the same set, so that
    they learn from the same data.
    """
    curves = run.curves
    early = np.isfinite(curves.validation_tokens) & (curves.validation_tokens < run.tokens)
    tokens, losses = curves.validation_tokens[early], (curves.bits_per_byte if by_bytes else curves.validation)[early]
    if not len(tokens) and not by_bytes:
        tokens, losses = _average_windows(run)
    return {int(at): float(loss) for at, loss in zip(tokens, losses, strict=True) if np.isfinite(loss)}


def _average_windows(run: RunResult) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Return the tokens at the ends of the parts of a run but the last, and the mean training loss of each part."""
    curves, width = run.curves, max(1, run.steps // WINDOWS)
    ends = np.arange(1, WINDOWS) * width - 1
    ends = ends[ends < len(curves.steps)]
    means = [float(np.mean(curves.losses[end + 1 - width : end + 1])) for end in ends]
    return curves.tokens[ends], np.array(means)
