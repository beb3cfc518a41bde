"""Secrets in what leaves the machine: settings and texts without them. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from titan.config.text_kinds import TextKind, list_kinds, read_declared_types
from titan.console.text import redact

T = TypeVar("T")

_SECRET = re.compile(
    r"secret|passw(or)?d|credential|api_?key|access_?key|private_?key|(^|[_.-])(key|token|auth|bearer)$", re.IGNORECASE
)

_ASSIGNED = re.compile(
    r"((?<![A-Za-z])(?:secret|passw(?:or)?d|passphrase|pwd|credentials?|(?:api|access|private)[_-]?key|key|token|auth|bearer)"
    r"['\"]?\s*[=:]\s*['\"]?)[^\s,;'\"&}\])]+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?<![\w/])([\w.+-]+:)[^\s:/@]+(?=@[\w-])")


def remove_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a copy of nested settings without keys that look like secrets, and with secrets in strings masked."""

    def clean_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean_value(v) for k, v in value.items() if not _SECRET.search(str(k))}
        if isinstance(value, (list, tuple)):
            return type(value)(map(clean_value, value))
        return hide_secrets(value, environ) if isinstance(value, str) else value

    return {key: clean_value(value) for key, value in config.items() if not _SECRET.search(str(key))}


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords and tokens, in URLs or named in it, and without those of the environment."""
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return _LOGIN.sub(r"\g<1>***", _ASSIGNED.sub(r"\g<1>***", redact(text)))


def hide_in_labels(settings: T) -> T:
    """Return a tracker's settings with secrets masked in texts that it shows, such as tags, or left out by name."""
    types = read_declared_types(type(settings))
    names = [f.name for f in fields(settings) if f.init and TextKind.LABEL in list_kinds(types[f.name])]  # type: ignore[arg-type]
    labels = {name: getattr(settings, name) for name in names}
    shown = {name: remove_secrets({"": value})[""] for name, value in labels.items()}
    return replace(settings, **shown) if shown != labels else settings  # type: ignore[type-var]


def summarise_error(error: BaseException) -> str:
    """Return the first line of an error without secrets, or the name of its class where it says nothing."""
    text = hide_secrets(str(error)).strip()
    text = f"{type(error).__name__} {text}".strip() if not text or text.isdigit() else text
    return text.splitlines()[0].rstrip(".")
