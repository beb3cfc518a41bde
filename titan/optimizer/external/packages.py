"""The package of a class: an installed distribution, which its version names, or files of the user. Free of torch."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MAX_HASHED_BYTES = 1 << 20
"""The size in bytes above which a file is data: its size counts, and its content does not."""


def is_own(package: str) -> bool:
    """Return whether a top-level package belongs to no installed distribution."""
    return package not in importlib.metadata.packages_distributions()


def find_version(package: str) -> str:
    """Return a top-level package's distribution with its version, such as "heavyball 3.2.1"; without one, its name."""
    names = importlib.metadata.packages_distributions().get(package)
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else package


def compute_files_digest(content: Mapping[str, Path]) -> str:
    """Return 12 hex digits of a hash of files: of their names in `content` and of what they hold."""
    digest = hashlib.sha256()
    for name, file in content.items():
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        digest.update(file.read_bytes() if size <= MAX_HASHED_BYTES else b"")
    return digest.hexdigest()[:12]


def find_module_files(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of modules, and of the user's own modules that they import, by the modules' names, in order.

    Imports are read from the text, so that what else a process has imported doesn't matter. What has no file, as a
    notebook's module, is left out, and so are titan, Python's own modules, and what other distributions installed.
    """
    queue, files = list(modules), dict[str, Path | None]()
    excluded = {"titan", *sys.stdlib_module_names, *_list_installed() - {name.partition(".")[0] for name in queue}}
    while queue:
        name = queue.pop(0)
        parent = files.get(name.rpartition(".")[0])
        is_in_module = parent is not None and parent.name != "__init__.py"  # to look for it would import the module
        if name in files or is_in_module or name.partition(".")[0] in excluded:
            continue
        files[name] = file = _find_module_file(name)
        queue += _list_imports(name, file) if file else ()
    return {name: file for name, file in sorted(files.items()) if file}


@functools.cache
def _list_installed() -> frozenset[str]:
    return frozenset(importlib.metadata.packages_distributions())


def _find_module_file(name: str) -> Path | None:
    try:
        origin = getattr(sys.modules.get(name), "__file__", None) or getattr(
            importlib.util.find_spec(name), "origin", ""
        )
    except Exception:  # a name in a module, a module that was made without a file, or one that can't be imported
        return None
    return Path(origin) if origin and Path(origin).is_file() else None


def _list_imports(module: str, file: Path) -> Iterator[str]:
    """Yield the names that the import statements of a module name, of which some may be names in a module."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # a compiled module
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
