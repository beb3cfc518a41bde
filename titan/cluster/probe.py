"""How device detection reads the machine: files, environment variables, programs and optional packages.

Every reader goes through a `Probe`, so that a test can simulate any machine. psutil and nvidia-ml-py (imported as
pynvml) are optional: `pip install -e '.[probe]'`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.files.platform import count_cores

PROGRAM_SECONDS = 20.0  # a driver without persistence mode wakes eight GPUs for several seconds


def run_program(arguments: Sequence[str]) -> str | None:
    """Return the output of a program; None if it is missing, fails or exceeds `PROGRAM_SECONDS`."""
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout


def import_optional(name: str) -> Any:
    """Return an optional package's module; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_torch_version() -> str:
    """Return the text of the installed torch's version file without importing torch; empty without torch."""
    spec = importlib.util.find_spec("torch")
    return read_text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""


def _read_physical_bytes() -> int | None:
    """Return the machine's memory: from psutil, which also knows systems without SC_PHYS_PAGES, else from sysconf."""
    if psutil := import_optional("psutil"):
        return int(psutil.virtual_memory().total)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@dataclass(frozen=True)
class Probe:
    """How device detection reads the machine; a test passes other values.

    Attributes:
        root: the directory that contains /proc, /sys and /dev.
        environ: the environment variables.
        run: returns a program's output, or None.
        nvml: imports and returns nvidia-ml-py's module, or None where it is not installed.
        torch_version: the text of torch/version.py.
        cores: cores in this process's affinity mask.
        physical_bytes: the machine's memory, or None.
        architecture: the output of `uname -m`.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = run_program
    nvml: Callable[[], Any] = lambda: import_optional("pynvml")
    torch_version: str = field(default_factory=_read_torch_version)
    cores: int = field(default_factory=count_cores)
    physical_bytes: int | None = field(default_factory=_read_physical_bytes)
    architecture: str = field(default_factory=platform.machine)

    def read_text(self, path: str) -> str:
        """Return the text of a file below the root; empty if it can't be read."""
        return read_text(self.root / path)


def parse_fields(text: str) -> dict[str, str]:
    """Return the pairs of a text of "key: value" lines, as files below /proc have them."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_number(text: str) -> float | None:
    """Return a text as a number; None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None
