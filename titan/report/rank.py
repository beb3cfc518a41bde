"""Rank variants: the best learning rate of each recipe and the baseline before the tests, the order by result after.

The best of several rates is the one at which the smallest share of seeds diverged, and then the one with the lowest
mean loss: without its diverged seeds, the mean of a rate is biased.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.report.align import LEARNING_RATE, RunGroup, shorten_name
from titan.report.estimate import Member, collect_outcomes
from titan.report.findings import Interval, Quality, Variant
from titan.report.statistics import compare_seeds
from titan.sweep.labels import is_same_value


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


@dataclass(frozen=True)
class VariantCandidate:
    """A variant before it is compared.

    Attributes:
        group: its runs' files, and the settings that distinguish it.
        members: its runs.
        tuning: whether it has the best of its learning rates.
    """

    group: RunGroup
    members: Sequence[Member]
    tuning: RateTuning


def list_candidates(
    groups: Sequence[RunGroup],
    members: Sequence[Sequence[Member]],
    baseline: str | None,
    sweep_baseline: Mapping[str, str],
) -> list[VariantCandidate]:
    """Return all variants, the baseline first; of several learning rates of the baseline, the best one.

    Args:
        baseline: the baseline that the user named.
    """
    tunings = find_best_rates(groups, members)
    candidates = [VariantCandidate(*parts) for parts in zip(groups, members, tunings, strict=True)]
    if not candidates:
        return []
    possible_baselines = find_baselines(groups, baseline, sweep_baseline)
    index = next((i for i in possible_baselines if tunings[i].is_best), possible_baselines[0])
    return [candidates[index], *candidates[:index], *candidates[index + 1 :]]


def find_baselines(groups: Sequence[RunGroup], option: str | None, sweep_baseline: Mapping[str, str]) -> list[int]:
    """Return the indices of the variants that may be the baseline, in the order in which they were found.

    Several differ in the learning rate only, where neither user nor sweep names one: the best of them is the baseline.

    Args:
        option: what the user asks for: settings such as "parallelism=single,lr=0.001", or a run's directory.

    Raises:
        ConfigError: when the option matches no variant, or several that differ in more.
    """
    if option is None:
        indices = find_fitting(groups, sweep_baseline) or [0]
        return (
            indices[:1]
            if _names_rate(sweep_baseline)
            else _select_family(groups, indices[0], indices if sweep_baseline else range(len(groups)))
        )
    indices, exact = _match_option(groups, option)
    if indices and not exact and len(family := _select_family(groups, indices[0], indices)) == len(indices):
        return family
    if len(indices) != 1:
        names = "; ".join(group.label for group in groups[:8])
        raise ConfigError(
            f"baseline={option}: matches {len(indices) or 'none'} of the variants ({names}); give the settings of one."
        )
    return indices


def _match_option(groups: Sequence[RunGroup], option: str) -> tuple[list[int], bool]:
    """Return the indices of the variants that the option matches, and whether it names one learning rate."""
    if Path(option).is_dir():
        directory = Path(option).resolve()
        return [i for i, group in enumerate(groups) if directory in [raw.directory for raw in group.runs]], True
    if labelled := [i for i, group in enumerate(groups) if option == group.label]:
        return labelled, True
    names = [(*group.facts.choices.values(), *(Path(raw.directory).name for raw in group.runs)) for group in groups]
    if named := [i for i, group_names in enumerate(names) if option in group_names]:
        return named, False
    settings = dict(re.findall(r"([^\s,=]+)=(\[[^\]]*\]|[^\s,]*)", option))
    return find_fitting(groups, settings), _names_rate(settings)


def _names_rate(settings: Mapping[str, str]) -> bool:
    return any(name in (LEARNING_RATE, "lr") for name in settings)


def _select_family(groups: Sequence[RunGroup], index: int, indices: Iterable[int]) -> list[int]:
    """Return the variants among some that differ from one of them in the learning rate only."""
    return [i for i in indices if groups[i].other_settings == groups[index].other_settings]


def find_fitting(groups: Sequence[RunGroup], settings: Mapping[str, str]) -> list[int]:
    """Return the indices of the groups with all wanted settings; none where nothing is wanted."""
    return [i for i, group in enumerate(groups) if settings and has_settings(group, settings)]


def has_settings(group: RunGroup, settings: Mapping[str, str]) -> bool:
    """Return whether a group has settings, by full or short names, with values as typed."""
    return all(
        any(is_same_value(value, existing) for existing in _list_values(group, name))
        for name, value in settings.items()
    )


def _list_values(group: RunGroup, name: str) -> list[str]:
    """Return the values of a setting in a group, by its full or short name."""
    facts = group.facts
    if name in facts.choices:
        return [facts.choices[name], *([facts.resolved[name]] if name in facts.resolved else [])]
    full = [n for n in facts.values if shorten_name(n, facts.values) == name]
    resolved = [facts.resolved[n] for n in (full or [name]) if n in facts.resolved]
    typed = [o.partition("=")[2] for o in group.runs[0].overrides if o.partition("=")[0].lstrip("+~") == name]
    return [format_value(facts.values[n]) for n in (full or [name]) if n in facts.values] + typed + resolved


def find_best_rates(groups: Sequence[RunGroup], members: Sequence[Sequence[Member]]) -> list[RateTuning]:
    """Return for each variant whether it has the best of several learning rates."""
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
    final_losses = [collect_outcomes(members, lambda m: m.run.validation) for _, members in family]
    means = [compute_rate_merit(results.values()) for results in final_losses]
    if not any(np.isfinite(mean) for _, mean in means):
        return [RateTuning(True, f"none of its {len(family)} learning rates has a finished run")] * len(family)
    best = means.index(min(means))
    rate, rates = family[best][0], sorted(rate for rate, _ in family)
    note = f"best of {len(family)} learning rates ({', '.join(map(format_value, rates))}), selected by these same runs"
    note += (
        "; it is the lowest or highest one, so a better one may lie outside" if rate in (rates[0], rates[-1]) else ""
    )
    rejection = f"not ranked: the best of its learning rates is {format_value(rate)}"
    results = [
        RateTuning(False, rejection, len(family), _compare_with_best(losses, final_losses[best]))
        for losses in final_losses
    ]
    results[best] = RateTuning(True, note, len(family))
    return results


def compute_rate_merit(final_losses: Iterable[float]) -> tuple[float, float]:
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
    comparison = compare_seeds(final_losses, best)
    if comparison is None or comparison.signs is None or not comparison.lost_seeds:
        return ""
    return f"better on {comparison.signs.wins} of {comparison.signs.count} seeds, {comparison.lost_seeds} diverged"


def select_verdict(variant: Variant) -> Quality | None:
    """Return the comparison with the baseline that decides the answer; None without one."""
    return next(iter(variant.quality), None)


def uses_bits(variants: Sequence[Variant]) -> bool:
    """Return whether variants are compared in bits per byte, because their tokens differ."""
    return any(quality.measure == "bits per byte" for variant in variants for quality in variant.quality)


def select_result(variant: Variant, bits: bool = False) -> Interval | None:
    """Return the final validation loss of a variant in nats per token, or in bits per byte."""
    return variant.bits if bits else variant.validation


def list_token_counts(variants: Sequence[Variant]) -> list[int]:
    """Return the different numbers of tokens that finished runs saw, in rising order."""
    return sorted({run.tokens for variant in variants for run in variant.runs if run.state == "finished"})


def order_variants(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the baseline, which is the first one, then the others by their result."""
    return (*variants[:1], *(variants[i] for i in rank_variants(variants) if i))


def rank_variants(variants: Sequence[Variant]) -> list[int]:
    """Return the indices of the variants, the best first.

    Layouts of one recipe by their speed; others by the share of seeds that diverged, then by loss. Where the numbers of
    tokens differ, losses do not rank them: by the tokens to the target where there is one, else as they are.
    """
    indices = range(len(variants))
    if len(variants) > 1 and all(variant.same_science for variant in variants):
        return sorted(indices, key=lambda i: -_read_speed(variants[i]))
    if len(list_token_counts(variants)) > 1:
        return sorted(indices, key=lambda i: _read_tokens_to_target(variants[i]))
    bits = uses_bits(variants)
    return sorted(indices, key=lambda i: compute_merit(variants[i], bits))


def _read_speed(variant: Variant) -> float:
    return variant.speed.estimate if variant.speed else 0.0


def _read_tokens_to_target(variant: Variant) -> float:
    return variant.reached.median_tokens if variant.reached and variant.reached.median_tokens else math.inf


def compute_merit(variant: Variant, bits: bool = False) -> tuple[float, float]:
    """Return the sort key of a variant at equal tokens, the best first."""
    interval = select_result(variant, bits)
    return compute_diverged_share(variant), interval.estimate if interval else math.inf


def compute_diverged_share(variant: Variant) -> float:
    """Return the share of seeds that diverged, of those with an outcome."""
    return variant.outcomes.diverged / variant.outcomes.known if variant.outcomes.known else 0.0
