"""A user's own code: the packages outside of titan that a run imports, and a digest of their files. Free of torch.

`modules` and `_target_` name them. The digests are part of code_id and stand in run.yaml, so that a continuation with
changed code is noticed; a launcher's copy of the code includes the files.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.optimizer.external.packages import compute_files_digest, is_own

if TYPE_CHECKING:
    from titan.run.run import Run

KEY = "own_code"
"""The key of the digests in a document of run.yaml."""
RESULTS = ("run.yaml", "ledger.jsonl")
"""Files that make a folder one of results, which is no code."""


def find_packages(run: Run) -> tuple[str, ...]:
    """Return the top-level packages outside of titan that a run names, in order."""
    return tuple(list_uses(run))


def list_uses(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the settings whose classes are of each package outside of titan, in order; none where it is only imported.

    The standard library's are no packages of the user.
    """
    names: dict[str, list[str]] = {name.partition(".")[0]: [] for name in run.modules}
    for name, cls in find_classes({axis: getattr(run, axis) for axis in (*run.axes(), "hooks")}):
        names.setdefault(cls.__module__.partition(".")[0], []).append(name)
    for package in filter(is_own, run.optimizer.list_packages()):
        names.setdefault(package, []).append("optimizer.cls")
    own_packages = names.keys() - {"titan"} - sys.stdlib_module_names
    return {package: tuple(names[package]) for package in sorted(own_packages)}


def find_classes(value: Any, name: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted name and the class of all schemas in a value."""
    if dataclasses.is_dataclass(value):
        yield name, type(value)
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    parts = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, part in parts:
        yield from find_classes(part, f"{name}.{key}".lstrip("."))


def find_files(package: str) -> dict[str, Path]:
    """Return the files of a package by their paths from the folder that it is imported from; none if it has none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made without a file, as a notebook's
        spec = None
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {Path(spec.origin).name: Path(spec.origin)} if spec.origin and Path(spec.origin).is_file() else {}
    files_by_path: dict[str, Path] = {}
    for folder in map(Path, spec.submodule_search_locations):
        files_by_path = {f"{package}/{file.relative_to(folder)}": file for file in walk_files(folder)} | files_by_path
    return dict(sorted(files_by_path.items()))


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are code: none that are hidden or compiled, and no results of runs."""
    for root, folders, names in os.walk(folder):
        if any(name in RESULTS for name in names):
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (Path(root, n) for n in sorted(names) if not n.startswith(".") and not n.endswith(".pyc"))


def is_installed(package: str) -> bool:
    """Return whether a package is among those of this Python's site-packages, where every job finds it."""
    site_folders = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    return any(file.is_relative_to(folder) for file in find_files(package).values() for folder in site_folders)


def compute_digests(run: Run) -> dict[str, str]:
    """Return 12 hex digits of a hash of the files of each package: of their paths and contents."""
    return {package: compute_files_digest(find_files(package)) for package in find_packages(run)}


def note_changes(run: Run, last: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where packages have changed since the last attempt, which its document describes."""
    last_digests, current_digests = last.get(KEY) or {}, compute_digests(run)
    changed = [
        f"{name} ({last_digests[name]} -> {current_digests[name]})"
        for name in current_digests
        if last_digests.get(name, current_digests[name]) != current_digests[name]
    ]
    return (f"your code has changed since attempt {last['attempt']}: {', '.join(changed)}",) if changed else ()
