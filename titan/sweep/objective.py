"""What a sweeper that learns from trials, such as Optuna's, gets of each: `sweep.objective` of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError
from titan.run.directory import read_result
from titan.run.run import Run
from titan.sweep.schema import Sweep


def check(sweep: Sweep, runs: list[Run]) -> None:
    """Raise ConfigError where a run will not measure the objective.

    Raises:
        ConfigError: before any trial starts.
    """
    validated = sweep.objective.partition("/")[0] in ("validation_loss", "bits_per_byte")
    if validated and any(run.evaluation.tokens == 0 for run in runs):
        raise ConfigError(
            f"sweep.objective={sweep.objective}: evaluation.tokens=0 asks for no evaluation; give some tokens, "
            "or sweep.objective=last_loss."
        )


def worst(sweep: Sweep, sweeper: Mapping[str, Any]) -> float:
    """Return the value of a trial that failed.

    Args:
        sweep: the settings; a `direction` of "auto" is the sweeper's.
        sweeper: the sweeper's own settings.

    Raises:
        ConfigError: for directions that contradict each other, and for several objectives.
    """
    own = sweeper.get("direction")
    own = getattr(own, "name", own)  # Optuna's is an enumeration
    if own is not None and str(own) not in ("minimize", "maximize"):
        raise ConfigError(f"hydra.sweeper.direction={own}: a trial has one objective; give minimize or maximize.")
    if own is not None and sweep.direction not in ("auto", str(own)):
        raise ConfigError(
            f"sweep.direction={sweep.direction}: the sweeper has hydra.sweeper.direction={own}; leave one of them out."
        )
    direction = str(own or sweep.direction)
    return sweep.worst if sweep.worst is not None else -math.inf if direction == "maximize" else math.inf


def value(sweep: Sweep, directory: Path, code: int, worst: float) -> float:
    """Return the objective of a trial that has ended with an exit code; `worst` where it failed or is not finite.

    Raises:
        ConfigError: when the result has no such number.
    """
    result = read_result(directory)[0] if code == 0 else {}
    if not result:
        return worst
    found = result.get(sweep.objective)
    names = [k for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if sweep.objective not in result and not result.get("ended_by"):
        raise ConfigError(
            f"sweep.objective={sweep.objective}: {directory}/result.json has no such number"
            f"{suggest_nearest(sweep.objective, names)} It has {', '.join(names)}."
        )
    return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else worst
