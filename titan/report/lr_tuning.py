"""Whether the learning rate was tuned for each variant: a recipe that was not tuned may lose only because of that.

The best of several rates is the one at which the smallest share of seeds diverged, and then the one with the lowest
mean loss: without its diverged seeds, the mean of a rate is biased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.config.settings import format_value
from titan.report import seeds
from titan.report.collect import neat
from titan.report.runs import Member
from titan.report.variants import RATE, Group


@dataclass(frozen=True)
class Tuned:
    """How the learning rate of a variant was tuned.

    Attributes:
        chosen: whether it is the best among the variants that differ from it in the learning rate only.
        note: as text; None without one.
        tried: the number of rates.
        against: how a rate at which runs diverged compares with the best one; empty for others.
    """

    chosen: bool
    note: str | None
    tried: int = 0
    against: str = ""


def tuned(groups: Sequence[Group], members: Sequence[Sequence[Member]]) -> list[Tuned]:
    """Return for each variant whether it has the best of several learning rates.

    Args:
        groups: the variants.
        members: their runs.
    """
    families: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        families.setdefault(group.rest, []).append(index)
    found = [Tuned(True, None)] * len(groups)
    if len({_recipe(group) for group in groups}) < 2:
        return found  # one recipe: its learning rate may be the question
    for family in families.values():
        for index, each in zip(family, _family([(_rate(groups[i]), members[i]) for i in family]), strict=True):
            found[index] = each
    return found


def _recipe(group: Group) -> str:
    """Return the hyperparameters without learning rate and seed as one text."""
    science = group.runs[0].last["science"]
    return repr(
        sorted((name, format_value(value)) for name, value in science.items() if name not in (RATE, "training.seed"))
    )


def _rate(group: Group) -> float:
    return float(group.facts.values.get(RATE) or 0.0)


def _family(family: Sequence[tuple[float, Sequence[Member]]]) -> list[Tuned]:
    if len(family) == 1:
        return [Tuned(True, "learning rate not tuned", 1)]
    ends = [seeds.outcomes(members, lambda m: m.run.validation) for _, members in family]
    means = [merit(found.values()) for found in ends]
    if not any(np.isfinite(mean) for _, mean in means):
        return [Tuned(True, f"none of its {len(family)} learning rates has a finished run")] * len(family)
    best = means.index(min(means))
    rate, rates = family[best][0], sorted(rate for rate, _ in family)
    note = f"best of {len(family)} learning rates ({', '.join(map(neat, rates))}), selected by these same runs"
    note += (
        "; it is the lowest or highest one, so a better one may lie outside" if rate in (rates[0], rates[-1]) else ""
    )
    lost = f"not ranked: the best of its learning rates is {neat(rate)}"
    found = [Tuned(False, lost, len(family), _against(end, ends[best])) for end in ends]
    found[best] = Tuned(True, note, len(family))
    return found


def merit(ends: Iterable[float]) -> tuple[float, float]:
    """Return the sort key of a variant, the best first: the share of diverged seeds, and the mean of the others.

    Args:
        ends: the final loss of each seed, infinite where it diverged; without seeds the variant comes last.
    """
    values = np.array([*ends])
    known = values[np.isfinite(values)]
    share = 1 - len(known) / len(values) if len(values) else 0.0
    return share, float(known.mean()) if len(known) else np.inf


def _against(ends: Mapping[int, float], best: Mapping[int, float]) -> str:
    """Return how a rate at which runs diverged compares with the best one; empty where none did."""
    found = seeds.difference(ends, best)
    if found is None or found.signs is None or not found.lost:
        return ""
    return f"better on {found.signs.wins} of {found.signs.count} seeds, {found.lost} diverged"
