"""Warnings for the user."""

from __future__ import annotations

import functools
import sys


@functools.cache
def warn_once(sentence: str) -> None:
    """Print a sentence on stderr, once per process: the trials of a sweep have the same warnings."""
    print(f"titan: warning: {sentence}", file=sys.stderr)
