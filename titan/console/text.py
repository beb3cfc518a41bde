"""Text that may be shown and saved: without secrets, and without characters that change what a terminal shows.

`redact` takes passwords and tokens out of URLs, `escape` writes control characters as Python would, `sanitize_line`
does both. All that titan prints, logs or writes into a run's directory goes through one of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

MARK = "***"
"""The replacement of a secret."""

_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"']+")
_WEB_USER = re.compile(r"(https?://)[^\s/?#]*@")
_USER = re.compile(r"(://[^\s/?#@:]*:)[^\s/?#]*@")
_ODD_PASSWORD = re.compile(r"(://[^\s/?#@:]*:)(?!\*\*\*@)(?!\d*(?:[/?#,;\]})]|$))[^\s,]*@")
"""A password with characters that a URL must encode; a port is none."""
_WORD = r"token(?!iz)|secret|passw(?:or)?d|pwd|credential|signature|api[_-]?key|access[_-]?key|private[_-]?key"
_QUERY = re.compile(
    rf"([?&;#](?:[\w.%-]*(?:{_WORD})[\w.%-]*|sig|key|auth|authorization|jwt)=)"
    r"(?:(?!,[A-Za-z][\w+.-]*://)[^&#])*?(?=[\])}.,:;]*(?:[&#]|,[A-Za-z][\w+.-]*://|$))",
    re.IGNORECASE,
)
_REDACTED = re.compile(r"[/:]\*\*\*@|[?&;#][^&#=]*=\*\*\*(?:[&#]|$)")
_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]*_(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)(?:=|: ?))(\"[^\"]*\"|'[^']*'|[^\s,;}\]\"']+)"
)
_SECRET_NAME = re.compile(r"TOKEN(?!IZ)|PASSW|PASSPHRASE|SECRET|KEY|CREDENTIAL", re.IGNORECASE)
_PASSWORD_NAME = re.compile(r"(PASSWORD|PASSWD|PASSPHRASE|SECRET)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(?!/).{8,}")
"""A value that a person may have chosen; a shorter one, or a path, is a part of other texts."""
_GENERATED = re.compile(r"(?!/)(?=\S*[A-Za-z])(?=\S*\d)\S{12,}")
"""A generated secret; a shorter value, a word or a path, such as of TOKEN_MODE or SSH_KEY, is a part of other texts."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, other line separators, marks that change the direction of text, and bytes that are no UTF-8."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL or a chain of file systems, such as simplecache::s3://bucket/x."""
    return "://" in path or "::" in path


def redact(text: str) -> str:
    """Return `text` without passwords and tokens in URLs, and without the values of secret variables."""
    secrets = (  # values that hardly occur in other texts
        value
        for name, value in os.environ.items()
        if is_secret(name) and (_PASSWORD if _PASSWORD_NAME.search(name) else _GENERATED).fullmatch(value)
    )
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MARK)
    return _VARIABLE.sub(rf"\g<1>{MARK}", _URL.sub(lambda url: _redact_url(url[0]), text))


def _redact_url(url: str) -> str:
    url = _WEB_USER.sub(rf"\g<1>{MARK}@", url)  # of web addresses the user too: many take a token for one
    url = _ODD_PASSWORD.sub(rf"\g<1>{MARK}@", _USER.sub(rf"\g<1>{MARK}@", url))
    return _QUERY.sub(rf"\g<1>{MARK}", url)


def redact_nested(value: Any) -> Any:
    """Return nested mappings and lists with all texts redacted, and entirely for keys that name a secret variable."""
    if isinstance(value, Mapping):
        return {
            k: MARK if isinstance(v, str) and _VARIABLE.fullmatch(f"{k}=x") else redact_nested(v)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_nested(v) for v in value]
    return redact(value) if isinstance(value, str) else value


def is_redacted(text: str) -> bool:
    """Return whether a text holds a URL from which a secret was removed: it can't be used as it is."""
    return any(_REDACTED.search(url) for url in _URL.findall(text))


def escape(text: str) -> str:
    r"""Return `text` with control characters written as `\n`, `\x1b` and the like."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def sanitize_line(text: str) -> str:
    """Return `text` redacted and escaped, as one line."""
    return escape(redact(text))


def sanitize_nested(value: Any) -> Any:
    """Return dataclasses, mappings, lists and tuples with all texts as one line, redacted and escaped; keys too."""
    if isinstance(value, str):
        return sanitize_line(value)
    if isinstance(value, Mapping):
        return {sanitize_nested(k): sanitize_nested(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(sanitize_nested, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(sanitize_nested, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{name: sanitize_nested(field) for name, field in fields.items()})
    return value


def sanitize_lines(text: str) -> str:
    """Return several lines, such as a traceback, redacted and escaped."""
    return "\n".join(map(escape, redact(text).split("\n")))


@cache
def is_secret(variable: str) -> bool:
    """Return whether the value of an environment variable is a secret, by the variable's name."""
    return bool(_SECRET_NAME.search(variable))


def format_message(text: str) -> str:
    """Return a message for a terminal: control characters escaped, and very long words cut."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    head, tail = LONG_WORD_ENDS
    return re.sub(rf"\S{{{LONG_WORD},}}", lambda word: f"{word[0][:head]}…{word[0][-tail:]}", text)


def format_error(error: object) -> str:
    """Return an error's text on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".")[:300]


LONG_WORD, LONG_WORD_ENDS = 240, (100, 40)
"""Words of so many characters are cut in messages, to so many of their first and last characters."""
