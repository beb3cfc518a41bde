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
class LearningRateTuning:
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
    tuning: LearningRateTuning


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
    tunings = find_best_learning_rates(groups, members)
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
        if _names_learning_rate(sweep_baseline):
            return indices[:1]
        return _select_family(groups, indices[0], indices if sweep_baseline else range(len(groups)))
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
    return find_fitting(groups, settings), _names_learning_rate(settings)


def _names_learning_rate(settings: Mapping[str, str]) -> bool:
    return any(name in (LEARNING_RATE, "lr") for name in settings)


def _select_family(groups: Sequence[RunGroup], index: int, indices: Iterable[int]) -> list[int]:
    """Return the variants among some that differ from one of them in the learning rate only."""
    return [i for i in indices if groups[i].other_settings == groups[index].other_settings]


def find_fitting(groups: Sequence[RunGroup], settings: Mapping[str, str]) -> list[int]:
    """Return the indices of the groups with all wanted settings; none where nothing is wanted."""
    return [i for i, group in enumerate(groups) if settings and has_settings(group, settings)]


def has_settings(group: RunGroup, settings: Mapping[str, str]) -> bool:
    """Return whether a group has settings, by full or short names, with values as typed."""
    return all(any(is_same_value(value, v) for v in _list_values(group, name)) for name, value in settings.items())


def _list_values(group: RunGroup, name: str) -> list[str]:
    """Return the values of a setting in a group, by its full or short name."""
    facts = group.facts
    if name in facts.choices:
        return [facts.choices[name], *([facts.resolved[name]] if name in facts.resolved else [])]
    full = [n for n in facts.values if shorten_name(n, facts.values) == name]
    resolved = [facts.resolved[n] for n in (full or [name]) if n in facts.resolved]
    typed = [o.partition("=")[2] for o in group.runs[0].overrides if o.partition("=")[0].lstrip("+~") == name]
    return [format_value(facts.values[n]) for n in (full or [name]) if n in facts.values] + typed + resolved


def find_best_learning_rates(
    groups: Sequence[RunGroup], members: Sequence[Sequence[Member]]
) -> list[LearningRateTuning]:
    """Return for each variant whether it has the best of several learning rates."""
    families: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        families.setdefault(group.other_settings, []).append(index)
    tunings = [LearningRateTuning(True, None)] * len(groups)
    if len({_format_recipe(group) for group in groups}) < 2:
        return tunings  # one recipe: its learning rate may be the question
    for family in families.values():
        learning_rates = [float(groups[i].facts.values.get(LEARNING_RATE) or 0.0) for i in family]
        for i, tuning in zip(family, _tune_family(learning_rates, [members[i] for i in family]), strict=True):
            tunings[i] = tuning
    return tunings


def _format_recipe(group: RunGroup) -> str:
    """Return the hyperparameters without learning rate and seed as one text."""
    science = group.runs[0].last_document["science"].items()
    return repr(sorted((name, format_value(v)) for name, v in science if name not in (LEARNING_RATE, "training.seed")))


def _tune_family(learning_rates: Sequence[float], members: Sequence[Sequence[Member]]) -> list[LearningRateTuning]:
    """Return the tunings of variants that differ in their learning rate only."""
    count = len(learning_rates)
    if count == 1:
        return [LearningRateTuning(True, "learning rate not tuned", 1)]
    final_losses = [collect_outcomes(side, lambda m: m.run.validation) for side in members]
    merits = [_compute_learning_rate_merit(results.values()) for results in final_losses]
    if not any(np.isfinite(mean) for _, mean in merits):
        return [LearningRateTuning(True, f"none of its {count} learning rates has a finished run")] * count
    best = merits.index(min(merits))
    tried = sorted(learning_rates)
    note = f"best of {count} learning rates ({', '.join(map(format_value, tried))}), selected by these same runs"
    if learning_rates[best] in (tried[0], tried[-1]):
        note += "; it is the lowest or highest one, so a better one may lie outside"
    rejection = f"not ranked: the best of its learning rates is {format_value(learning_rates[best])}"
    tunings = []
    for losses in final_losses:
        comparison, against_best = compare_seeds(losses, final_losses[best]), ""
        if comparison and comparison.lost_seeds:  # runs of this rate diverged
            wins = f"better on {comparison.wins} of {comparison.pairs} seeds"
            against_best = f"{wins}, {comparison.lost_seeds} diverged"
        tunings.append(LearningRateTuning(False, rejection, count, against_best))
    tunings[best] = LearningRateTuning(True, note, count)
    return tunings


def _compute_learning_rate_merit(final_losses: Iterable[float]) -> tuple[float, float]:
    """Return the sort key of a variant, the best first: the share of diverged seeds, and the mean of the others.

    Args:
        final_losses: the final loss of each seed, infinite where it diverged; without seeds the variant comes last.
    """
    values = np.array([*final_losses])
    finite = values[np.isfinite(values)]
    share = 1 - len(finite) / len(values) if len(values) else 0.0
    return share, float(finite.mean()) if len(finite) else np.inf


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


def rank_variants(variants: Sequence[Variant]) -> list[int]:
    """Return the indices of the variants, the best first.

    Layouts of one recipe by their speed; others by the share of seeds that diverged, then by loss. Where the numbers of
    tokens differ, losses do not rank them: by the tokens to the target where there is one, else as they are.
    """
    are_layouts = len(variants) > 1 and all(variant.same_science for variant in variants)
    has_unequal_tokens, bits = len(list_token_counts(variants)) > 1, uses_bits(variants)

    def compute_merit(variant: Variant) -> tuple[float, float]:
        if are_layouts:
            return 0.0, -variant.speed.estimate if variant.speed else 0.0
        if has_unequal_tokens:
            return 0.0, (variant.reached.median_tokens if variant.reached else None) or math.inf
        result = select_result(variant, bits)
        return compute_diverged_share(variant), result.estimate if result else math.inf

    return sorted(range(len(variants)), key=lambda i: compute_merit(variants[i]))


def compute_diverged_share(variant: Variant) -> float:
    """Return the share of seeds that diverged, of those with an outcome."""
    return variant.outcomes.diverged / variant.outcomes.known if variant.outcomes.known else 0.0
