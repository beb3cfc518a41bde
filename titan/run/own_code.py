"""A user's own code: the packages outside of titan that a run imports, and a digest of their files. Free of torch.

`modules` and `_target_` name them. The digests are part of code_id and stand in run.yaml, so that a continuation with
changed code is noticed; a launcher's copy of the code includes the files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan.run.run import Run

KEY = "own_code"
"""The key of the digests in a document of run.yaml."""
LARGEST = 1 << 20
"""The size in bytes above which a file is data: its size counts, and its content does not."""
RESULTS = ("run.yaml", "ledger.jsonl")
"""Files that make a folder one of results, which is no code."""


def packages(run: Run) -> tuple[str, ...]:
    """Return the top-level packages outside of titan that a run names, in order."""
    named = {name.partition(".")[0] for name in run.modules}
    own = named | {cls.__module__.partition(".")[0] for cls in _classes({a: getattr(run, a) for a in _axes(run)})}
    return tuple(sorted(own - {"titan"} - sys.stdlib_module_names))


def _axes(run: Run) -> tuple[str, ...]:
    return (*run.axes(), "hooks")


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes of all schemas in a value."""
    if dataclasses.is_dataclass(value):
        yield type(value)
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from _classes(part)


def files(package: str) -> dict[str, Path]:
    """Return the files of a package by their paths from the folder that it is imported from; none if it has none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made without a file, as a notebook's
        spec = None
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {Path(spec.origin).name: Path(spec.origin)} if spec.origin and Path(spec.origin).is_file() else {}
    found: dict[str, Path] = {}
    for folder in map(Path, spec.submodule_search_locations):
        found = {f"{package}/{file.relative_to(folder)}": file for file in walk(folder)} | found
    return dict(sorted(found.items()))


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are code: none that are hidden or compiled, and no results of runs."""
    for at, folders, names in os.walk(folder):
        if any(name in RESULTS for name in names):
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (Path(at, n) for n in sorted(names) if not n.startswith(".") and not n.endswith(".pyc"))


def is_installed(package: str) -> bool:
    """Return whether a package is among those of this Python's site-packages, where every job finds it."""
    places = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    return any(file.is_relative_to(place) for file in files(package).values() for place in places)


def digests(run: Run) -> dict[str, str]:
    """Return 12 hex digits of a hash of the files of each package: of their paths and contents."""
    return {package: _digest(files(package)) for package in packages(run)}


def _digest(content: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in content.items():
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        digest.update(file.read_bytes() if size <= LARGEST else b"")
    return digest.hexdigest()[:12]


def changes(run: Run, last: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where packages have changed since the last attempt, which its document describes."""
    before, now = last.get(KEY) or {}, digests(run)
    changed = [f"{name} ({before[name]} -> {now[name]})" for name in now if before.get(name, now[name]) != now[name]]
    return (f"your code has changed since attempt {last['attempt']}: {', '.join(changed)}",) if changed else ()
