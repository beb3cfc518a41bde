"""Rename the keys of files from earlier versions, so that readers see the current ones only. Free of torch."""

from __future__ import annotations

from typing import Any, TypeVar

FORMER = {"life": "attempt"}
"""Former keys of run.yaml, metrics.jsonl and result.json, and the current ones."""
T = TypeVar("T")


def renamed(content: T) -> T:
    """Return a file's content with the current keys; anything but a mapping is returned unchanged."""
    if isinstance(content, dict):
        found: dict[str, Any] = content
        for old, new in FORMER.items():
            if old in found and new not in found:
                found[new] = found.pop(old)
    return content
