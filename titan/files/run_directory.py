"""The directory of a run as a user names it: one sentence about what is wrong with it. Free of torch."""

from __future__ import annotations

from pathlib import Path

from titan.errors import ConfigError

RUN, SWEEP = "run.yaml", "multirun.yaml"
"""The files by which the directories of a run and of a sweep are recognised."""
STOP_REQUEST = "stop_request.txt"
"""The file in a run's directory that asks the run to end; it says why. `titan.hooks.stop_request` reads it."""


def check_directory(name: str | Path) -> Path:
    """Return the path of a directory.

    Raises:
        ConfigError: when there is none.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        problem = "is a file, not a directory" if directory.exists() else "there is no such directory"
        raise ConfigError(f"{name}: {problem}; correct the path.")
    return directory


def check_run_directory(name: str | Path) -> Path:
    """Return the path of a run's directory.

    Raises:
        ConfigError: when there is no such directory, or it holds no run.
    """
    directory = check_directory(name)
    if not (directory / RUN).is_file():
        problem = describe_runs_below(name) or _describe_run_above(name) or f"holds no run (a run has a {RUN})"
        advice = "" if ";" in problem else "; give a run's directory, such as runs/NAME"
        raise ConfigError(f"{name}: {problem}{advice}.")
    return directory


def _describe_run_above(name: str | Path) -> str | None:
    """Return what a directory within a run's directory is; None for others."""
    above = next((folder for folder in Path(name).expanduser().parents[:2] if (folder / RUN).is_file()), None)
    return None if above is None else f"is a part of a run; give {above}"


def describe_runs_below(name: str | Path) -> str | None:
    """Return what a directory with runs in it is, and one of them to give instead; None where it has none."""
    directory = Path(name).expanduser()
    patterns = (f"*/{RUN}", f"*/*/{RUN}")
    run_file = next((file for pattern in patterns for file in sorted(directory.glob(pattern))), None)
    if not is_sweep_directory(directory) and run_file is None:
        return None
    if run_file is None:
        return "holds a sweep, and none of its trials has begun; give another run's directory"
    noun = "a sweep; give one of its trials" if is_sweep_directory(directory) else "runs; give one of them"
    return f"holds {noun}, such as {Path(name) / run_file.parent.relative_to(directory)}"


def is_sweep_directory(directory: Path) -> bool:
    """Return whether a sweep has begun in a directory."""
    return (directory / SWEEP).is_file()
