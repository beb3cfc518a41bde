"""Equal budgets: each variant of a sweep gets the steps that it has of the baseline's tokens, FLOPs or time.

So its schedule ends where the budget ends, and final losses are compared at equal tokens, FLOPs or time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from titan.config.settings import format_value
from titan.console.numbers import format_rounded
from titan.errors import ConfigError
from titan.run.budget import BudgetStepTime, check_steps, count_steps, find_step_time
from titan.run.directory import REPEATS
from titan.run.run import Run
from titan.sweep.labels import is_same_value
from titan.sweep.schema import Sweep

STEP_SETTINGS = ("training.steps", "training.tokens", "training.hours")


def equalise_steps(runs: Sequence[Run], varied: Sequence[Sequence[str]], sweep: Sweep) -> list[Run]:
    """Return the runs of a grid with the steps of one budget.

    Args:
        varied: the overrides of each trial that not all have.
        sweep: its `budget` and `baseline`.

    Raises:
        ConfigError: where steps vary, no trial is the baseline, or the time of a step is not known.
    """
    if sweep.budget == "steps":
        return list(runs)
    for override in (override for trial in varied for override in trial):
        if override.lstrip("+").startswith(STEP_SETTINGS):
            raise ConfigError(f"sweep.budget={sweep.budget}: decides the steps, and the sweep varies {override}.")
    if any(run.checkpoint.decay_steps is not None for run in runs):
        raise ConfigError(
            f"sweep.budget={sweep.budget}: decides the steps, and so does checkpoint.decay_steps; drop one."
        )
    first = find_baseline(runs, varied, sweep)
    if sweep.budget == "time":  # the steps whose device-hours are nearest to those of the baseline
        times = _find_times(runs, varied)
        costs = [time.seconds * run.layout.devices for run, time in zip(runs, times, strict=True)]
        steps = [max(1, round(runs[first].training.steps * costs[first] / cost)) for cost in costs]
    else:  # the most steps that the baseline's tokens or FLOPs allow
        tokens = float(runs[first].training.total_tokens)
        flops = [run.model.flops_per_token(run.training.seq_len) for run in runs]
        allowed = [tokens * flops[first] / own if sweep.budget == "flops" else tokens for own in flops]
        steps = [count_steps(run.training, math.floor(most)) for run, most in zip(runs, allowed, strict=True)]
    return [_set_steps(run, number, sweep.budget) for run, number in zip(runs, steps, strict=True)]


def find_baseline(runs: Sequence[Run], varied: Sequence[Sequence[str]], sweep: Sweep) -> int:
    """Return the index of the first trial with the settings of `sweep.baseline`; without these, of the first trial.

    A setting that the sweep does not vary counts where the trial's run has the value.

    Raises:
        ConfigError: where no trial has them.
    """
    settings = sweep.baseline_settings
    for index, (run, trial) in enumerate(zip(runs, varied, strict=True)):
        typed = dict(override.lstrip("+").split("=", 1) for override in trial if "=" in override)
        values = {name: typed.get(name, _find_value(run, name)) for name in settings}
        if all(is_same_value(value, values[name]) for name, value in settings.items()):
            return index
    raise ConfigError(
        f"sweep.baseline={format_value(settings)}: no trial has it, and sweep.budget={sweep.budget} is the budget of "
        "the baseline; name settings that a trial has."
    )


def _find_value(run: Run, name: str) -> str:
    """Return a run's choice of a group, or its value of a dotted setting, as typed; empty where it has none."""
    if name in run.choices:
        return str(run.choices[name])
    value: Any = run
    for part in name.split("."):
        value = getattr(value, part, MISSING)
    return "" if value is MISSING else format_value(value)


def describe_times(runs: Sequence[Run], varied: Sequence[Sequence[str]], sweep: Sweep) -> list[tuple[str, str]]:
    """Return what `sweep.budget=time` gives each variant: its steps and their time, and why that time is doubtful.

    Args:
        runs: of all trials, with their steps.
    """
    if sweep.budget != "time":
        return []
    found = dict[tuple[str, str], None]()  # one for all runs of a variant
    for run, trial, time in zip(runs, varied, _find_times(runs, varied), strict=True):
        subject = f"sweep.budget=time: {label_variant(trial) or 'all trials'}"
        spread = f" ({time.spread.describe()})" if time.spread else ""
        line = f"{subject}: {run.training.steps:,} steps of {format_rounded(time.seconds)} s{spread}, {time.origin}"
        doubt = time.spread.find_doubt() if time.spread else ""
        found[line, f"sweep.budget=time: {doubt}." if doubt else ""] = None
    return list(found)


def label_variant(trial: Sequence[str]) -> str:
    """Return the overrides that the runs of a variant share, of those that a trial varies."""
    return " ".join(o for o in trial if o.lstrip("+").partition("=")[0] not in REPEATS)


def _find_times(runs: Sequence[Run], varied: Sequence[Sequence[str]]) -> list[BudgetStepTime]:
    """Return the time of a step of each run; runs of one variant have the same, which is found once.

    Raises:
        ConfigError: where it is not known.
    """
    labels, times = [label_variant(trial) for trial in varied], dict[str, BudgetStepTime]()
    for run, label in zip(runs, labels, strict=True):
        if label in times:
            continue
        if (time := find_step_time(run)) is None:
            raise ConfigError(
                "sweep.budget=time: the time of a step is not known, because cluster.hardware is not described; choose "
                "a cluster that describes it, measure this machine with python -m titan.calibrate, give "
                "training.measured=DIR, the folder of finished runs of the same variants, or give training.steps of "
                "each variant."
            )
        times[label] = time
    return [times[label] for label in labels]


def _set_steps(run: Run, steps: int, budget: str) -> Run:
    """Return the run with other steps, and with the overrides that compose it, whatever files set.

    Raises:
        ConfigError: where no schedule has so many steps.
    """
    if steps == run.training.steps:
        return run
    run.schedule.check(check_steps(steps, f"sweep.budget={budget}"))
    undone = [f"training.{name}=null" for name in ("tokens", "hours") if getattr(run.training, name) is not None]
    training = dataclasses.replace(run.training, steps=steps, tokens=None, hours=None)
    others = tuple(o for o in run.overrides if not o.lstrip("+").startswith(STEP_SETTINGS))
    return dataclasses.replace(run, training=training, overrides=(*others, *undone, f"training.steps={steps}"))
