"""Secrets in what leaves the machine: settings and texts without them. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from titan.console.text import redact

_SECRET = re.compile(
    r"secret|passw(or)?d|credential|api_?key|access_?key|private_?key|(^|[_.-])(key|token|auth|bearer)$", re.IGNORECASE
)


def remove_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a copy of nested settings without keys that look like secrets, and with secrets in strings masked."""

    def clean_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean_value(v) for k, v in value.items() if not _SECRET.search(str(k))}
        if isinstance(value, (list, tuple)):
            return [clean_value(v) for v in value]
        return hide_secrets(value, environ) if isinstance(value, str) else value

    return {key: clean_value(value) for key, value in config.items() if not _SECRET.search(str(key))}


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords and tokens in URLs and without the values of secret environment variables."""
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return redact(text)


def summarise_error(error: BaseException) -> str:
    """Return the first line of an error without secrets, or the name of its class where it says nothing."""
    text = hide_secrets(str(error)).strip()
    text = f"{type(error).__name__} {text}".strip() if not text or text.isdigit() else text
    return text.splitlines()[0].rstrip(".")
