"""Runs as files, for the processes that a launcher starts: written for each start. Free of torch.

Such a file names classes by their modules and holds their fields as they are, so it is refused where other code than
this wrote it.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.config.kinds import kind
from titan.errors import ConfigError
from titan.run.run import Run

_AGAIN = "give the command that started it again: it writes the file anew."


def write(run: Run, file: Path) -> None:
    """Write a run down, in place of what an earlier launcher left; only this user may read it: it may hold secrets."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        pickle.dump((_settings(run), run), out)
    temporary.rename(file)


def read(file: Path) -> Run:
    """The run that was written down.

    Raises:
        ConfigError: when it can't be read, or when other code than this has written it.
    """
    try:
        content = pickle.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror}); {_AGAIN}") from error
    except Exception as error:  # unpickling raises whatever the classes that it names do
        raise _other(file, f"{type(error).__name__}: {error}") from error
    settings, run = content if isinstance(content, tuple) and len(content) == 2 else ({}, None)
    if not isinstance(run, Run):
        raise _other(file, "it has another format")
    here = _settings(run)
    if differ := sorted(name for name in here.keys() | settings.keys() if here.get(name) != settings.get(name)):
        raise _other(file, f"{', '.join(differ)} had other settings")
    return run


def _settings(value: Any) -> dict[str, tuple[str, ...]]:
    """The names of the settings of each schema that a value is made of."""
    found, parts = {}, []
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        found[kind(type(value))] = names
        parts = [getattr(value, name, None) for name in names]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    for part in parts:
        found |= _settings(part)
    return found


def _other(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file}: was written by other code of titan than is to run it ({why}); {_AGAIN}")
