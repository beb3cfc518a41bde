"""The directory of a run as a user names it: one sentence about what is wrong with it. Free of torch."""

from __future__ import annotations

from pathlib import Path

from titan.errors import ConfigError

RUN, SWEEP = "run.yaml", "multirun.yaml"
"""The files by which the directories of a run and of a sweep are recognised."""


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
        if (directory / SWEEP).is_file():
            raise ConfigError(f"{name}: holds a sweep; give the directory of one of its trials.")
        raise ConfigError(f"{name}: holds no run (a run has a {RUN}); give a run's directory, such as runs/NAME.")
    return directory
