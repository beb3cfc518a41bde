"""Modules of Python and libraries that titan is built on: they have no class that a setting may name. Free of torch."""

from __future__ import annotations

import sys

from titan.console.requirements import REQUIREMENTS


def describe_library(package: str) -> str | None:
    """Return what a package is that can't have a user's own classes; None for all others.

    Args:
        package: the first part of a dotted path.
    """
    if package in sys.stdlib_module_names:
        return f"{package} is a module of Python"
    return f"{package} is a library that titan uses" if package in REQUIREMENTS else None
