"""Trackers as users write them: one that writes a file, and ones that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.support.processes import LIMIT
from titan.config.settings import setting
from titan.metrics.schema import Tracker
from titan.metrics.tracker_run import RunDescription, extract_scalars

RELEASE = threading.Event()
"""Ends the wait of a tracker that hangs."""


class _LineFile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def log(self, record: Mapping[str, Any]) -> None:
        self._write({"step": record["step"], **extract_scalars(record)})

    def finish(self, result: Mapping[str, Any]) -> None:
        self._write({"result": dict(result)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


@dataclass(frozen=True, kw_only=True)
class Lines(Tracker):
    """Writes a line for the run and for each record."""

    file: str = setting("lines.jsonl", "the file in the run's directory")

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> _LineFile:
        lines = _LineFile(directory / self.file)
        lines._write({"run_id": description.run_id, "attempt": description.facts["attempt"]})
        warn(f"writes {self.file}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Hangs(Tracker):
    """Does not open until it is released."""

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> _LineFile:
        RELEASE.wait(LIMIT)
        raise OSError("released")


@dataclass(frozen=True, kw_only=True)
class Raises(Tracker):
    """Does not open."""

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> _LineFile:
        raise OSError("no such service")


@dataclass(frozen=True, kw_only=True)
class Lacks(Tracker):
    """Needs a package that is not installed, and would fail with it."""

    packages: ClassVar[Mapping[str, str]] = {"no_such_package": "no-such-package"}

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> _LineFile:
        raise AssertionError("built without its package")
