"""What `optimizer.lr=auto` means for a run: a number by `titan.optimizer.step_law`. Free of torch."""

from __future__ import annotations

import dataclasses

from titan.config.settings import format_value
from titan.config.warning import warn_once
from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.optimizer import step_law
from titan.optimizer.schema import AdamW
from titan.run.run import Run
from titan.run.schema import Recipe

SETTING = "optimizer.lr"
DIGITS = 4
"""Significant digits of the number: the rule's own precision is far less."""


def apply_learning_rate(run: Run) -> Run:
    """Return the run with a number as `optimizer.lr`, also among its overrides, which repeat it at other lengths.

    Raises:
        ConfigError: where no published run resembles this one.
    """
    if run.optimizer.lr != "auto":
        return run
    rate = compute_learning_rate(run)
    others = tuple(o for o in run.overrides if o.lstrip("+").partition("=")[0] != SETTING)
    optimizer = dataclasses.replace(run.optimizer, lr=rate)
    return dataclasses.replace(run, optimizer=optimizer, overrides=(*others, f"{SETTING}={rate}"))


def compute_learning_rate(recipe: Recipe) -> float:
    """Return the rule's number for a recipe, and warn where it is an extrapolation."""
    _check_kind(recipe)
    parameters, tokens = count_parameters(recipe), recipe.training.total_tokens
    rate = float(f"{step_law.compute_learning_rate(parameters, tokens):.{DIGITS}g}")
    _check_range("parameters without embedding and head", step_law.PARAMETERS, parameters, rate)
    _check_range("tokens", step_law.TOKENS, tokens, rate)
    _check_batch(recipe, tokens)
    return rate


def count_parameters(recipe: Recipe) -> int:
    """Return the parameters that the rule counts: matrices of blocks, with all experts, without embedding and head."""
    return int(recipe.model.sum_over_blocks(recipe.model.block_matmul_parameters))


def _check_kind(recipe: Recipe) -> None:
    if type(recipe.optimizer) is not AdamW:
        raise ConfigError(
            f"optimizer.lr=auto: the rule is of AdamW, and the optimizer is {type(recipe.optimizer).__name__}; give a "
            "number, or optimizer=adamw."
        )
    if recipe.checkpoint.decay_steps is not None:
        raise ConfigError(
            "optimizer.lr=auto: the rule is of whole runs, and checkpoint.decay_steps="
            f"{recipe.checkpoint.decay_steps} decays another run's; give the optimizer.lr in that run's run.yaml."
        )


def _check_range(unit: str, published: step_law.Range, value: float, rate: float) -> None:
    """Warn outside of the published range; raise ConfigError far outside."""
    distance, words = published.find_distance(value), f"this one has {format_count(value)}"
    if distance >= step_law.FARTHEST:
        raise ConfigError(
            f"optimizer.lr=auto: the rule is of runs with {published} {unit}, and {words}, too far from them; give a "
            "number."
        )
    if distance > 1:
        warn_once(
            f"optimizer.lr=auto: {format_value(rate)} is an extrapolation: the rule is of runs with {published} "
            f"{unit}, and {words}; compare it with its neighbours in a sweep, or give a number."
        )


def _check_batch(recipe: Recipe, tokens: int) -> None:
    batch, own = step_law.compute_batch(tokens), recipe.training.global_batch
    if max(batch / own, own / batch) > step_law.BATCH_FACTOR:
        warn_once(
            f"optimizer.lr=auto: the rule goes with a global batch of {format_count(batch)} tokens, and "
            f"training.global_batch={own}; give a batch within a factor of {step_law.BATCH_FACTOR:g}, or a number."
        )
