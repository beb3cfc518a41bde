"""The package of a class: an installed distribution, which its version names, or files of the user. Free of torch."""

from __future__ import annotations

import importlib.metadata


def is_own(package: str) -> bool:
    """Return whether a top-level package belongs to no installed distribution."""
    return package not in importlib.metadata.packages_distributions()


def find_version(package: str) -> str:
    """Return a top-level package's distribution with its version, such as "heavyball 3.2.1"; without one, its name."""
    names = importlib.metadata.packages_distributions().get(package)
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else package
