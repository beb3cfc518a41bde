"""Rename the keys of files from earlier versions, so that readers see the current ones only. Free of torch."""

from __future__ import annotations

from typing import Any, TypeVar

RENAMED_KEYS = {"life": "attempt"}
"""Former keys of run.yaml, metrics.jsonl and result.json, and the current ones."""
T = TypeVar("T")


def rename_keys(content: T) -> T:
    """Return a file's content with the current keys; anything but a mapping is returned unchanged."""
    if isinstance(content, dict):
        mapping: dict[str, Any] = content
        for old, new in RENAMED_KEYS.items():
            if old in mapping and new not in mapping:
                mapping[new] = mapping.pop(old)
    return content
