"""What a search varies: the values of overrides as Optuna's distributions, and drawn values as overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from titan.errors import ConfigError
from titan.sweep.labels import clean_override

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]
"""The distribution of each setting that varies, by its name as typed."""
MAX_COMBINATIONS = 10_000
"""Combinations of a grid that Optuna is given."""


def build_space(overrides: Sequence[Override]) -> Space:
    """Return the distributions of the overrides that have several values.

    Raises:
        ConfigError: where nothing varies, or an interval has no values.
    """
    space = {str(o.get_key_element()): _build_distribution(o) for o in overrides if o.is_sweep_override()}
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna: nothing varies; give values, such as 'optimizer.lr=tag(log,interval(1e-4,1e-2))'."
        )
    return space


def list_fixed(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides that have one value."""
    return [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in overrides if not o.is_sweep_override()]


def _build_distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    try:
        if override.is_interval_sweep():
            return _build_interval(override.value())
        if override.is_range_sweep():
            return _build_range([float(value) for value in override.sweep_string_iterator()], override.value())
        return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{override.input_line}: {reason}; correct the values.") from error


def _build_interval(interval: Any) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high, is_log = interval.start, interval.end, "log" in interval.tags
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _build_range(values: Sequence[float], sweep: Any) -> BaseDistribution:
    """Return the distribution of a range; as in a grid, its end is not in it."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if not values:
        raise ValueError("the range is empty")
    if all(isinstance(number, int) for number in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(min(values)), int(max(values)), step=abs(sweep.step))
    bounds = [add_steps(float(sweep.start), float(sweep.step), count) for count in (0, len(values) - 1)]
    return FloatDistribution(min(bounds), max(bounds), step=abs(float(sweep.step)))


def add_steps(low: float, step: float, count: int) -> float:
    """Return low + count * step as in decimal numbers: Optuna leaves out an end that is a rounding error away."""
    return float(Decimal(str(low)) + count * Decimal(str(step)))


def format_values(values: Mapping[str, Any]) -> list[str]:
    """Return drawn values as overrides."""
    return [clean_override(f"{name}={value}") for name, value in values.items()]


def list_corners(space: Space) -> list[dict[str, Any]]:
    """Return two combinations, of the first and of the last values, by which a search is checked before it starts."""
    bounds = {name: _find_bounds(distribution) for name, distribution in space.items()}
    return [{name: pair[index] for name, pair in bounds.items()} for index in (0, 1)]


def _find_bounds(distribution: Any) -> tuple[Any, Any]:
    choices = getattr(distribution, "choices", None)
    return (choices[0], choices[-1]) if choices else (distribution.low, distribution.high)


def list_values(name: str, distribution: Any) -> list[Any]:
    """Return all values of a distribution, for a grid.

    Raises:
        ConfigError: where it has infinitely many, or too many.
    """
    if choices := getattr(distribution, "choices", None):
        return list(choices)
    if distribution.step is None or distribution.log:
        raise ConfigError(
            f"hydra.sweeper.sampler=grid: {name} has an interval; give values or range(START,STOP,STEP), or take "
            "another sampler."
        )
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    if count > MAX_COMBINATIONS:
        raise ConfigError(f"hydra.sweeper.sampler=grid: {name} has {count:,} values; give fewer.")
    if isinstance(distribution.low, int):
        return [distribution.low + index * distribution.step for index in range(count)]
    return [add_steps(distribution.low, distribution.step, index) for index in range(count)]
