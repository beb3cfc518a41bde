"""Whether a run in a directory has nothing more to do. Free of torch and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.run.directory import is_finished, read_attempts, read_result
from titan.run.run import Run, as_config


def is_done(run: Run) -> bool:
    """Return whether the run in the directory has done all its steps, or a hook that it still has ended it."""
    directory = Path(run.directory)
    if is_finished(directory, run.training.steps):
        return True
    result = read_result(directory)[0]
    if not result.get("ended_by") or not (attempts := read_attempts(directory)):
        return False
    return is_ended_by_hook(run, attempts[-1], result)


def is_ended_by_hook(run: Run, last: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether a hook that the run still has, with the same settings, ended it before its last step."""
    hook = result.get("ended_by", {}).get("hook")
    last_config, config = last["config"], as_config(run)
    is_same_attempt = (
        result.get("attempt") == last["attempt"] and last_config["training"]["steps"] == run.training.steps
    )
    return (
        is_same_attempt
        and hook in config.get("hooks", {})
        and last_config.get("hooks", {}).get(hook) == config["hooks"][hook]
    )
