"""Whether the learning rate was tuned for each arm: a recipe that was not may lose for that alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan.report.arms import Group
from titan.report.collect import neat
from titan.report.runs import Member
from titan.settings import show

RATE = "optimizer.lr"


@dataclass(frozen=True)
class Tuned:
    """What there is to say of an arm's learning rate.

    Attributes:
        chosen: whether it is the one to compare among the arms that differ from it in the learning rate alone.
        note: in words; None where there is nothing to say.
    """

    chosen: bool
    note: str | None


def tuned(groups: Sequence[Group], members: Sequence[Sequence[Member]]) -> list[Tuned]:
    """For each arm whether it has the best of several learning rates.

    Args:
        groups: the arms.
        members: their runs.
    """
    families: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        families.setdefault(rest(group), []).append(index)
    found = [Tuned(True, None)] * len(groups)
    if len({_recipe(group) for group in groups}) < 2:
        return found  # one recipe, whose learning rate may be what is asked for
    for family in families.values():
        for index, each in zip(family, _family([(_rate(groups[i]), members[i]) for i in family]), strict=True):
            found[index] = each
    return found


def rest(group: Group) -> str:
    """All settings but the learning rate, as one text."""
    values = {name: show(value) for name, value in group.facts.values.items() if name != RATE}
    return repr(sorted(values.items()))


def _recipe(group: Group) -> str:
    """What decides what is learned, but for the learning rate and the seed, as one text."""
    science = group.runs[0].last["science"]
    return repr(sorted((name, show(value)) for name, value in science.items() if name not in (RATE, "training.seed")))


def _rate(group: Group) -> float:
    return float(group.facts.values.get(RATE) or 0.0)


def _family(family: Sequence[tuple[float, Sequence[Member]]]) -> list[Tuned]:
    if len(family) == 1:
        return [Tuned(True, "learning rate not tuned for this arm")]
    losses = [[m.run.validation for m in members if m.run.validation is not None] for _, members in family]
    means = [float(np.mean(values)) if values else float("inf") for values in losses]
    if not np.isfinite(means).any():
        return [Tuned(True, f"of its {len(family)} learning rates none has come to an end")] * len(family)
    best = int(np.argmin(means))
    rates = sorted(rate for rate, _ in family)
    edge = family[best][0] in (rates[0], rates[-1])
    note = f"best of {len(family)} learning rates ({', '.join(map(neat, rates))}), chosen by these same runs"
    note += ", but at the edge of them: a better one may lie beyond" if edge else ""
    lost = f"not compared: of its learning rates {neat(family[best][0])} was best"
    return [Tuned(True, note) if index == best else Tuned(False, lost) for index in range(len(family))]
