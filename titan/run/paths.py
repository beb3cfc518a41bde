"""Names and directories of runs, and the files in a run's directory. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from titan.errors import ConfigError
from titan.files.run_directory import STOP_REQUEST

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
    """Raise ConfigError for a directory whose path is too long for file systems, with a run's files in it.

    Args:
        typed: the setting and its value.
    """
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
