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
from titan.report.collect import format_setting
from titan.report.runs import Member
from titan.report.variants import LEARNING_RATE, RunGroup


@dataclass(frozen=True)
class RateTuning:
    """How the learning rate of a variant was tuned.

    Attributes:
        is_best: whether it is the best among the variants that differ from it in the learning rate only.
        note: as text; None without one.
        rate_count: the number of rates.
        against_best: how a rate at which runs diverged compares with the best one; empty for others.
    """

    is_best: bool
    note: str | None
    rate_count: int = 0
    against_best: str = ""


def find_best_rates(groups: Sequence[RunGroup], members: Sequence[Sequence[Member]]) -> list[RateTuning]:
    """Return for each variant whether it has the best of several learning rates.

    Args:
        groups: the variants.
        members: their runs.
    """
    families: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        families.setdefault(group.other_settings, []).append(index)
    tunings = [RateTuning(True, None)] * len(groups)
    if len({_format_recipe(group) for group in groups}) < 2:
        return tunings  # one recipe: its learning rate may be the question
    for family in families.values():
        for index, tuning in zip(
            family, _tune_family([(_read_rate(groups[i]), members[i]) for i in family]), strict=True
        ):
            tunings[index] = tuning
    return tunings


def _format_recipe(group: RunGroup) -> str:
    """Return the hyperparameters without learning rate and seed as one text."""
    science = group.runs[0].last_document["science"]
    return repr(
        sorted(
            (name, format_value(value))
            for name, value in science.items()
            if name not in (LEARNING_RATE, "training.seed")
        )
    )


def _read_rate(group: RunGroup) -> float:
    return float(group.facts.values.get(LEARNING_RATE) or 0.0)


def _tune_family(family: Sequence[tuple[float, Sequence[Member]]]) -> list[RateTuning]:
    if len(family) == 1:
        return [RateTuning(True, "learning rate not tuned", 1)]
    final_losses = [seeds.collect_outcomes(members, lambda m: m.run.validation) for _, members in family]
    means = [compute_merit(results.values()) for results in final_losses]
    if not any(np.isfinite(mean) for _, mean in means):
        return [RateTuning(True, f"none of its {len(family)} learning rates has a finished run")] * len(family)
    best = means.index(min(means))
    rate, rates = family[best][0], sorted(rate for rate, _ in family)
    note = (
        f"best of {len(family)} learning rates ({', '.join(map(format_setting, rates))}), selected by these same runs"
    )
    note += (
        "; it is the lowest or highest one, so a better one may lie outside" if rate in (rates[0], rates[-1]) else ""
    )
    rejection = f"not ranked: the best of its learning rates is {format_setting(rate)}"
    results = [
        RateTuning(False, rejection, len(family), _compare_with_best(losses, final_losses[best]))
        for losses in final_losses
    ]
    results[best] = RateTuning(True, note, len(family))
    return results


def compute_merit(final_losses: Iterable[float]) -> tuple[float, float]:
    """Return the sort key of a variant, the best first: the share of diverged seeds, and the mean of the others.

    Args:
        final_losses: the final loss of each seed, infinite where it diverged; without seeds the variant comes last.
    """
    values = np.array([*final_losses])
    finite = values[np.isfinite(values)]
    share = 1 - len(finite) / len(values) if len(values) else 0.0
    return share, float(finite.mean()) if len(finite) else np.inf


def _compare_with_best(final_losses: Mapping[int, float], best: Mapping[int, float]) -> str:
    """Return how a rate at which runs diverged compares with the best one; empty where none did."""
    comparison = seeds.compare_seeds(final_losses, best)
    if comparison is None or comparison.signs is None or not comparison.lost_seeds:
        return ""
    return f"better on {comparison.signs.wins} of {comparison.signs.count} seeds, {comparison.lost_seeds} diverged"
