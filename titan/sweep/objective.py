"""What a sweeper that learns from trials, such as Optuna's, gets of each: `sweep.objective` of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError
from titan.files.run_directory import RUN
from titan.run import evaluated
from titan.run.directory import read_attempts, read_result
from titan.run.run import Run
from titan.sweep.schema import Sweep


def check_measured(setting: str, metric: str, runs: Sequence[Run]) -> None:
    """Raise ConfigError, before any trial starts, where a run will not measure what a setting names."""
    needs_evaluation = metric.partition("/")[0] in ("validation_loss", "bits_per_byte")
    if needs_evaluation and any(run.evaluation.tokens == 0 for run in runs):
        raise ConfigError(
            f"{setting}={metric}: evaluation.tokens=0 asks for no evaluation; give some tokens, or {setting}=last_loss."
        )


def find_worst_value(sweep: Sweep, sweeper: Mapping[str, Any]) -> float:
    """Return the value of a trial that failed.

    Args:
        sweep: the settings; a `direction` of "auto" is the sweeper's.

    Raises:
        ConfigError: for directions that contradict each other, and for several objectives.
    """
    asked = sweeper.get("direction")
    asked = None if asked is None else str(getattr(asked, "name", asked))  # Optuna's is an enumeration
    if asked not in (None, "minimize", "maximize"):
        raise ConfigError(f"hydra.sweeper.direction={asked}: a trial has one objective; give minimize or maximize.")
    if asked is not None and sweep.direction not in ("auto", asked):
        raise ConfigError(
            f"sweep.direction={sweep.direction}: the sweeper has hydra.sweeper.direction={asked}; leave one of them "
            "out."
        )
    direction = asked or sweep.direction
    return sweep.worst if sweep.worst is not None else -math.inf if direction == "maximize" else math.inf


def _check_content(sweep: Sweep, directory: Path) -> None:
    """Raise ConfigError where a trial's objective is of another content than the first trial's."""
    name = evaluated.find_name(sweep.objective)
    first = next(iter(sorted(directory.parent.glob(f"*/{RUN}"))), directory / RUN).parent if name else directory
    if first == directory:
        return
    digests = [(read_attempts(folder) or [{}])[-1].get(evaluated.KEY, {}).get(name) for folder in (first, directory)]
    if None not in digests and digests[0] != digests[1]:
        raise ConfigError(
            f"sweep.objective={sweep.objective}: what it is measured on has changed since {first} ({digests[0]} -> "
            f"{digests[1]}); restore it, or give the sweep another name."
        )


def read_objective(sweep: Sweep, directory: Path, code: int, worst: float) -> float:
    """Return the objective of a trial with its exit code; `find_worst_value` where it failed or is not finite.

    Raises:
        ConfigError: when the result has no such number, or it is of other content than that of the first trial.
    """
    result = read_result(directory)[0] if code == 0 else {}
    if not result:
        return worst
    _check_content(sweep, directory)
    objective = result.get(sweep.objective)
    names = [k for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if sweep.objective not in result and not result.get("ended_by"):
        raise ConfigError(
            f"sweep.objective={sweep.objective}: {directory}/result.json has no such number"
            f"{suggest_nearest(sweep.objective, names)} It has {', '.join(names)}."
        )
    return float(objective) if isinstance(objective, (int, float)) and math.isfinite(objective) else worst
