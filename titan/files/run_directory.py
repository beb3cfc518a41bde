"""The directory of a run as a user names it, its name, and the names of the files in it. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from titan.errors import ConfigError

RUN, SWEEP = "run.yaml", "multirun.yaml"
"""The files by which the directories of a run and of a sweep are recognised."""
STOP_REQUEST = "stop_request.txt"
"""The file in a run's directory that asks the run to end; it says why. `titan.hooks.stop_request` reads it."""


def check_directory(name: str | Path) -> Path:
    """Return the path of a directory."""
    directory = Path(name).expanduser()
    if not directory.is_dir():
        problem = "is a file, not a directory" if directory.exists() else "there is no such directory"
        raise ConfigError(f"{name}: {problem}; correct the path.")
    return directory


def check_run_directory(name: str | Path) -> Path:
    """Return the path of a run's directory."""
    directory = check_directory(name)
    if not (directory / RUN).is_file():
        above = next((folder for folder in directory.parents[:2] if (folder / RUN).is_file()), None)
        absent = f"holds no run (a run has a {RUN}); give a run's directory, such as runs/NAME"
        problem = absent if above is None else f"is a part of a run; give {above}"
        raise ConfigError(f"{name}: {describe_runs_below(name) or problem}.")
    return directory


def describe_runs_below(name: str | Path) -> str | None:
    """Return what a directory with runs in it is, and one of them to give instead; None where it has none."""
    directory = Path(name).expanduser()
    run_file = next((f for pattern in (f"*/{RUN}", f"*/*/{RUN}") for f in sorted(directory.glob(pattern))), None)
    if run_file is None:
        absent = "holds a sweep, and none of its trials has begun; give another run's directory"
        return absent if is_sweep_directory(directory) else None
    noun = "a sweep; give one of its trials" if is_sweep_directory(directory) else "runs; give one of them"
    return f"holds {noun}, such as {Path(name) / run_file.parent.relative_to(directory)}"


def is_sweep_directory(directory: Path) -> bool:
    """Return whether a sweep has begun in a directory."""
    return (directory / SWEEP).is_file()


LONGEST_FOLDER, LONGEST_PATH, DEEPEST = 240, 2000, 64
"""Bytes of a folder's name and of a run's path, and levels of that: file systems end at 255 and 4,096 bytes."""


FILES = {
    ".lock", ".hydra", "run.yaml", ".run.yaml", "env.json", "metrics.jsonl", "checkpoints", "result.json", "loss.svg",
    "log", "profile", "debug", "tensorboard", "wandb", "mlflow", "trackio", "save", "sweep.yaml", "ledger.jsonl",
    ".ledger.jsonl.lock", "slurm", "compare.html", STOP_REQUEST,
}  # fmt: skip
"""Names in a run's directory."""
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""The names of files that `titan.files.atomic` was writing when a kill came."""


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is no folder under runs/."""
    if not name.strip("/. ") or ".." in name.split("/") or name.startswith("/"):
        raise ConfigError(f"name={name}: must be the name of a folder under runs/; give another, or hydra.run.dir=DIR.")
    if name.startswith("-"):  # which commands would take for an option
        raise ConfigError(f"name={name}: begins with a dash, like an option; give another, or hydra.run.dir=DIR.")
    check_length(name, f"name={name}")


def check_length(directory: str, typed: str) -> None:
    """Raise ConfigError for a directory whose path is too long for file systems, with a run's files in it."""
    folders = [folder for folder in directory.split("/") if folder]
    longest = max((len(os.fsencode(folder)) for folder in folders), default=0)
    if longest > LONGEST_FOLDER:
        raise ConfigError(f"{typed}: a folder's name has {longest:,} bytes; give {LONGEST_FOLDER} at most.")
    if len(folders) > DEEPEST or len(os.fsencode(directory)) > LONGEST_PATH:
        raise ConfigError(
            f"{typed}: has {len(directory):,} characters in {len(folders):,} levels; give {LONGEST_PATH:,} characters "
            f"in {DEEPEST} levels at most."
        )


BEGUN = FILES - {".lock", "compare.html"}
"""What shows that a run has begun in a directory."""


def is_written(name: str) -> bool:
    """Return whether titan writes a file or folder of this name in a run's directory."""
    return name in FILES or _TEMPORARY.fullmatch(name) is not None


def foreign_files(names: Iterable[str]) -> list[str]:
    """Return the names in a directory that no run has made, sorted."""
    return sorted(name for name in set(names) if not is_written(name))


def shorten_path(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    working_directory = Path.cwd()
    return str(Path(path).relative_to(working_directory)) if Path(path).is_relative_to(working_directory) else path
