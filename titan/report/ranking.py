"""The order of arms by their result, and what that result is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan.report.findings import Arm, Interval, Quality


def verdict(arm: Arm) -> Quality | None:
    """The comparison with the baseline that counts."""
    return next(iter(arm.quality), None)


def by_bits(arms: Sequence[Arm]) -> bool:
    """Whether arms have to be compared in bits a byte, as their tokens are not the same ones."""
    return any(quality.measure == "bits per byte" for arm in arms for quality in arm.quality)


def result(arm: Arm, bits: bool = False) -> Interval | None:
    """The final validation of an arm: in nats a token, or in bits a byte."""
    return arm.bits if bits else arm.validation


def tokens(arms: Sequence[Arm]) -> list[int]:
    """The different numbers of tokens that finished runs saw, the least first."""
    return sorted({run.tokens for arm in arms for run in arm.runs if run.state == "finished"})


def order(arms: Sequence[Arm]) -> list[int]:
    """The places of the arms, the best first.

    Layouts of one recipe by their speed; others by the share of seeds that diverged, then by loss. Where the numbers of
    tokens differ, losses do not rank them: by the tokens to the target where there is one, else as they are.
    """
    places = range(len(arms))
    if len(arms) > 1 and all(arm.same_science for arm in arms):
        return sorted(places, key=lambda i: -_speed(arms[i]))
    if len(tokens(arms)) > 1:
        return sorted(places, key=lambda i: _to_target(arms[i]))
    bits = by_bits(arms)
    return sorted(places, key=lambda i: merit(arms[i], bits))


def _speed(arm: Arm) -> float:
    return arm.speed.estimate if arm.speed else 0.0


def _to_target(arm: Arm) -> float:
    return arm.reached.median_tokens if arm.reached and arm.reached.median_tokens else math.inf


def merit(arm: Arm, bits: bool = False) -> tuple[float, float]:
    """By what arms of equal tokens are ranked, the least first."""
    found = result(arm, bits)
    return share(arm), found.estimate if found else math.inf


def share(arm: Arm) -> float:
    """The share of its seeds with an outcome that diverged."""
    return arm.outcomes.diverged / arm.outcomes.known if arm.outcomes.known else 0.0
