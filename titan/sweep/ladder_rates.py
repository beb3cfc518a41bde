"""Learning rates of a ladder's sizes, by a rule. Free of torch and numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.run import budget
from titan.sweep.ladder_sizes import Variant
from titan.sweep.schema import Sweep

AUTO = "optimizer.lr=auto"
"""The override that has each size take the rate of `titan.optimizer.step_law`."""
DIGITS = 6
"""Significant digits of a rate by rule."""


@dataclass(frozen=True)
class Rates:
    """What gives the learning rate of a trunk.

    Attributes:
        description: in words.
        compute: from the variant, the model at the size and the steps of its longest length to the rate.
    """

    description: str
    compute: Callable[[Variant, Decoder, int], float]


def choose_rates(variants: Sequence[Variant], sweep: Sweep, is_auto: bool = False) -> Rates:
    """Return the rates by `sweep.lr_rule`, or by `optimizer.lr=auto`.

    Args:
        is_auto: whether the command line has `optimizer.lr=auto`.

    Raises:
        ConfigError: for two rules at once.
    """
    if is_auto:
        _check_auto(variants, sweep)
        return Rates("by Step Law for the longest length of each size (optimizer.lr=auto)", _compute_by_step_law)
    if sweep.lr_rule == "tuned":
        tried = f"{sweep.tuned_sizes} of the sizes with {len(set(sweep.tuned_factors))} rates each"
        return Rates(f"in proportion to 1 / width, before it is tuned at {tried}", compute_by_width)
    rule = sweep.lr_rule or ("fixed" if any(map(scales_rates, variants)) else "width")
    if rule == "fixed":
        scaled = "; the model scales it by size" if any(map(scales_rates, variants)) else ""
        return Rates(f"fixed{scaled}", lambda variant, model, steps: variant.base.optimizer.peak_lr)
    return Rates("in proportion to 1 / width", compute_by_width)


def compute_by_width(variant: Variant, model: Decoder, steps: int) -> float:
    """Return the recipe's rate times its width over that of the model."""
    return round_rate(variant.base.optimizer.peak_lr * variant.base.model.dim / model.dim)


def round_rate(rate: float) -> float:
    """Return a rate with the digits that a command line gets."""
    return float(f"{rate:.{DIGITS}g}")


def scales_rates(variant: Variant) -> bool:
    """Return whether a variant's model has factors for its learning rates, as where they transfer over sizes."""
    return bool(variant.base.model.update_factors(variant.base.optimizer))


def _check_auto(variants: Sequence[Variant], sweep: Sweep) -> None:
    if sweep.lr_rule is not None:
        raise ConfigError(f"{AUTO}: is a rule, and so is sweep.lr_rule={sweep.lr_rule}; give one of them.")
    if scaled := next(filter(scales_rates, variants), None):
        raise ConfigError(
            f"{AUTO}: is a rule of the model's size, and {type(scaled.base.model).__name__} scales its learning rates "
            "by its size too; give the number that is best at its base."
        )


def _compute_by_step_law(variant: Variant, model: Decoder, steps: int) -> float:
    """Return Step Law's rate for a size at its longest length; warn or raise ConfigError outside its range."""
    parts: dict[str, Any] = {"model": model, "training": dataclasses.replace(variant.base.training, steps=steps)}
    return budget.compute_learning_rate(dataclasses.replace(variant.base, **parts))
