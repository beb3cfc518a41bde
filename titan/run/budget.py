"""What a recipe's budget means: the steps that tokens or device-hours make, and `optimizer.lr=auto`. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titan.checkpoint import select
from titan.config.settings import format_value
from titan.config.warning import warn_once
from titan.console.numbers import format_count, format_plural
from titan.errors import ConfigError
from titan.optimizer import step_law
from titan.optimizer.schema import AdamW
from titan.run.directory import read_attempts
from titan.run.measured import StepSpread, measure_step
from titan.run.prediction import predict
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.schedule.schema import WSD
from titan.training.schema import MOST_STEPS, Training

SECONDS_PER_HOUR = 3600.0


def apply_tokens(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with the steps that `training.tokens` makes, the last of which may exceed it.

    Args:
        overrides: as typed; steps that they set contradict a budget, steps of files are superseded.
    """
    training = recipe.training
    budget_settings = [
        f"training.{name}={getattr(training, name):g}" for name in ("tokens", "hours") if getattr(training, name)
    ]
    if budget_settings:
        budget_settings += [override for override in overrides if override.lstrip("+").startswith("training.steps=")]
        budget_settings += ["checkpoint.decay_steps"] if recipe.checkpoint.decay_steps is not None else []
    if len(budget_settings) > 1:
        name = budget_settings[0].partition("=")[0]
        raise ConfigError(
            f"{budget_settings[0]}: {budget_settings[1]} sets the number of steps too; give one of them "
            f"({name}=null leaves this one out)."
        )
    if training.tokens is None:
        return recipe
    training.check()
    steps = check_steps(count_steps(training, training.tokens), budget_settings[0])
    return dataclasses.replace(recipe, training=dataclasses.replace(training, steps=steps))


def count_steps(training: Training, tokens: float) -> int:
    """Return the fewest steps that read so many tokens."""
    rows = max(1, math.ceil(tokens / training.seq_len))
    phase = [phase for phase in training.phases if phase.rows_before < rows][-1]
    return phase.step - 1 + math.ceil((rows - phase.rows_before) / phase.rows)


def check_steps(steps: int, setting: str) -> int:
    """Return the steps of a budget; raise ConfigError, which names its setting, where they are too many for a run."""
    if steps > MOST_STEPS:
        raise ConfigError(
            f"{setting}: makes {steps:,} steps, and a run has {MOST_STEPS:,} at most; give less, or a larger "
            "training.global_batch."
        )
    return steps


def apply_hours(compiled: Run, run: Run) -> Run:
    """Return the run with the steps that `training.hours` of all its devices make; an unfinished run keeps its own.

    Args:
        compiled: the run with a scope of compilation, which decides the time of a step.
        run: the run as composed, since its scope may depend on its steps.

    Raises:
        ConfigError: where the time of a step is not known, or is longer than the budget.
    """
    if run.training.hours is None:
        return run
    attempts = read_attempts(Path(run.directory))
    begun = attempts[-1]["config"]["training"] if attempts else {}  # of the run in the directory
    has_budget = begun.get("hours") == run.training.hours
    steps = int(begun["steps"]) if has_budget else _count_steps_in_hours(compiled)
    run.schedule.check(steps)
    return dataclasses.replace(run, training=dataclasses.replace(run.training, steps=steps))


def _count_steps_in_hours(run: Run) -> int:
    step_time, hours = find_step_time(run), run.training.hours or 0.0
    if step_time is None:
        raise ConfigError(
            f"training.hours={hours:g}: the time of a step is not known, because cluster.hardware is not described; "
            "give training.step_seconds=SECONDS or training.measured=RUN as measured, choose a cluster that describes "
            "it, measure this machine with python -m titan.calibrate, or give training.steps."
        )
    if step_time.spread is not None and (doubt := step_time.spread.find_doubt()):
        warn_once(f"training.measured={run.training.measured}: {doubt}.")
    steps = int(hours * SECONDS_PER_HOUR / (step_time.seconds * run.layout.devices))
    if steps < 1:
        raise ConfigError(
            f"training.hours={hours:g}: a step of {step_time.seconds:.3g} s on "
            f"{format_plural(run.layout.devices, 'device')} takes longer; give at least "
            f"{step_time.seconds * run.layout.devices / SECONDS_PER_HOUR:.2g}."
        )
    return check_steps(steps, f"training.hours={hours:g}")


class BudgetStepTime(NamedTuple):
    """The seconds of a step, where they are from ("as given", "as predicted" or "measured in PATH"), and their spread.

    The spread is None where they are not measured.
    """

    seconds: float
    origin: str
    spread: StepSpread | None = None


def find_step_time(run: Run) -> BudgetStepTime | None:
    """Return the time of a step: as given or measured where the user says so, else as predicted; None where unknown.

    Raises:
        ConfigError: where the runs that it is to be measured by do not fit, and for two sources.
    """
    training, origin = run.training, describe_origin(run.training)
    if training.step_seconds is not None and training.measured is not None:
        raise ConfigError(
            f"training.measured={training.measured}: training.step_seconds={training.step_seconds:g} gives the time of "
            "a step, too; leave one of them out."
        )
    if training.measured is not None:
        spread = measure_step(run)
        return BudgetStepTime(spread.seconds, origin, spread)
    prediction = predict(run)[0] if training.step_seconds is None else None
    seconds = training.step_seconds if prediction is None else prediction.step_seconds.value
    return None if seconds is None else BudgetStepTime(seconds, origin)


def describe_hours(training: Training) -> str:
    """Return the device-hours that decide the steps, and where the time of a step is from; empty without them."""
    hours = training.hours
    return "" if hours is None else f"{hours:g} device-hours by the time of a step {describe_origin(training)}"


def describe_origin(training: Training) -> str:
    """Return where the time of a step is from; see `BudgetStepTime`."""
    if training.measured is not None:
        return f"measured in {training.measured}"
    return "as predicted" if training.step_seconds is None else "as given"


def apply_decay(recipe: Recipe) -> Recipe:
    """Return the recipe with the steps and the decay that `checkpoint.decay_steps` means for its checkpoint.

    With the schedule wsd one long run at a constant learning rate serves many lengths: each branch begins at one of its
    checkpoints and decays for a few steps (Hu et al. 2024, arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392).
    """
    count, resume = recipe.checkpoint.decay_steps, recipe.checkpoint.resume
    if count is None:
        return recipe
    if resume is None:
        raise ConfigError(
            f"checkpoint.decay_steps={count}: there is no checkpoint to decay from; give checkpoint.resume=RUN or "
            "checkpoint.resume=RUN/checkpoints/step-N."
        )
    if not isinstance(recipe.schedule, WSD):
        kind = type(recipe.schedule).__name__
        raise ConfigError(f"checkpoint.decay_steps={count}: the schedule {kind} has no decay; give schedule=wsd.")
    steps = select.load_named(resume).manifest.step + count
    training, schedule = recipe.training, dataclasses.replace(recipe.schedule, decay=count / steps)
    return dataclasses.replace(recipe, training=dataclasses.replace(training, steps=steps), schedule=schedule)


def build_continuation(run: Recipe, steps: int) -> list[str]:
    """Return the overrides that continue a finished run to `steps` steps.

    Those of a branch undo `checkpoint.decay_steps`, which would set the steps, and keep the share of steps that decay;
    those of a run with a budget undo it.
    """
    overrides = [f"training.{name}=null" for name in ("tokens", "hours") if getattr(run.training, name) is not None]
    overrides.append(f"training.steps={steps}")
    if run.checkpoint.decay_steps is None or not isinstance(run.schedule, WSD):
        return overrides
    return [*overrides, "checkpoint.decay_steps=null", f"schedule.decay={format_value(run.schedule.decay)}"]


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
    parameters, tokens = count_parameters(recipe), recipe.training.total_tokens
    rate = float(f"{step_law.compute_learning_rate(parameters, tokens):.{DIGITS}g}")
    _check_range("parameters without embedding and head", step_law.PARAMETERS, parameters, rate)
    _check_range("tokens", step_law.TOKENS, tokens, rate)
    batch, own = step_law.compute_batch(tokens), recipe.training.global_batch
    if max(batch / own, own / batch) > step_law.BATCH_FACTOR:
        warn_once(
            f"optimizer.lr=auto: the rule goes with a global batch of {format_count(batch)} tokens, and "
            f"training.global_batch={own}; give a batch within a factor of {step_law.BATCH_FACTOR:g}, or a number."
        )
    return rate


def count_parameters(recipe: Recipe) -> int:
    """Return the parameters that the rule counts: matrices of blocks, with all experts, without embedding and head."""
    return int(recipe.model.sum_over_blocks(recipe.model.block_matmul_parameters))


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
