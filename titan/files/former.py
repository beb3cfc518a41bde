"""Names that files of earlier versions have: readers see the present ones only. Free of torch."""

from __future__ import annotations

from typing import Any, TypeVar

FORMER = {"life": "attempt"}
"""Former keys of run.yaml, metrics.jsonl and result.json, and the present ones."""
T = TypeVar("T")


def renamed(content: T) -> T:
    """What a file holds, under present names; what is no mapping is left as it is."""
    if isinstance(content, dict):
        found: dict[str, Any] = content
        for old, new in FORMER.items():
            if old in found and new not in found:
                found[new] = found.pop(old)
    return content
