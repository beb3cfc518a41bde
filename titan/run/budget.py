"""How many steps a budget of tokens or device-hours makes. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from titan.console.numbers import format_plural, shorten_exponent
from titan.errors import ConfigError
from titan.run.directory import read_attempts
from titan.run.prediction import predict
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.training.schema import Training

HOUR = 3600.0


def apply_tokens(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with the steps that `training.tokens` makes, the last of which may exceed it.

    Args:
        recipe: its `training.tokens` and `training.hours` may be set.
        overrides: as typed; steps that they set contradict a budget, steps of files are superseded.

    Raises:
        ConfigError: for more than one of steps, tokens and hours.
    """
    training = recipe.training
    given = [
        f"training.{name}={_format_typed(getattr(training, name))}"
        for name in ("tokens", "hours")
        if getattr(training, name)
    ]
    if given:
        given += [o for o in overrides if o.lstrip("+").startswith("training.steps=")]
        given += ["checkpoint.decay_steps"] if recipe.checkpoint.decay_steps is not None else []
    if len(given) > 1:
        name = given[0].partition("=")[0]
        raise ConfigError(
            f"{given[0]}: {given[1]} sets the number of steps too; give one of them ({name}=null leaves this one out)."
        )
    if training.tokens is None:
        return recipe
    steps = count_steps(training, training.tokens)
    return dataclasses.replace(recipe, training=dataclasses.replace(training, steps=steps))


def count_steps(training: Training, tokens: float) -> int:
    """Return the fewest steps that read so many tokens."""
    rows = max(1, math.ceil(tokens / training.seq_len))
    phase = [phase for phase in training.phases if phase.rows_before < rows][-1]
    return phase.step - 1 + math.ceil((rows - phase.rows_before) / phase.rows)


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
    steps = _read_steps(run) or _count_steps_in_hours(compiled)
    run.schedule.check(steps)
    return dataclasses.replace(run, training=dataclasses.replace(run.training, steps=steps))


def _read_steps(run: Run) -> int | None:
    """Return the steps of the run that the directory holds, if it had the same budget."""
    attempts = read_attempts(Path(run.directory))
    training = attempts[-1]["config"]["training"] if attempts else {}
    return int(training["steps"]) if training.get("hours") == run.training.hours else None


def _count_steps_in_hours(run: Run) -> int:
    seconds, hours = estimate_step_seconds(run), run.training.hours or 0.0
    typed = f"training.hours={_format_typed(hours)}"
    if seconds is None:
        raise ConfigError(
            f"{typed}: the time of a step is not known, because cluster.hardware is not described; "
            "give training.step_seconds=SECONDS as measured, choose a cluster that describes it, measure this machine "
            "with python -m titan.calibrate, or give training.steps."
        )
    steps = int(hours * HOUR / (seconds * run.layout.devices))
    if steps < 1:
        raise ConfigError(
            f"{typed}: a step of {seconds:.3g} s on {format_plural(run.layout.devices, 'device')} is "
            f"longer; give at least {seconds * run.layout.devices / HOUR:.2g}."
        )
    return steps


def estimate_step_seconds(run: Run) -> float | None:
    """Return the seconds of a step: as measured where the user gives them, else as predicted, None where unknown."""
    if run.training.step_seconds is not None:
        return run.training.step_seconds
    prediction, _ = predict(run)
    return None if prediction is None else prediction.step_seconds.value


def _format_typed(value: float) -> str:
    """Return a budget as one types it, as in 1e9."""
    return shorten_exponent(f"{value:g}")
