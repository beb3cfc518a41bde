"""Documents of a file of text. Free of torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from titan.errors import ConfigError
from titan.evaluation.items import name_unreadable, read_records
from titan.files import untrusted


def read_texts(path: str, field: str, prefix: str) -> Iterator[str]:
    """Yield the documents of a file: the texts of its JSON objects, or its whole text.

    Args:
        path: a .jsonl file, or a file of UTF-8 text.
        field: the key of the text in an object.
        prefix: the setting that has `path`, for messages.

    Raises:
        ConfigError: when the file can't be read, or an object has no text.
    """
    if Path(path).suffix != ".jsonl":
        yield _read_whole_text(path, f"{prefix}.path")
        return
    for number, record in read_records(path, f"{prefix}.path"):
        text = record.get(field)
        if not isinstance(text, str):
            keys = ", ".join(map(str, record))
            raise ConfigError(
                f"{prefix}.field={field}: line {number} of {path} has no text of this name; it has {keys}."
            )
        yield text


def _read_whole_text(path: str, setting: str) -> str:
    with name_unreadable(path, setting, "a file of text"):
        return untrusted.read_regular_file(Path(path).expanduser()).decode()


def compute_digest(path: str, field: str, tokens: int, prefix: str) -> str:
    """Return 12 hex digits of a hash of a file's content and of how `read_validation_set` reads its first `tokens`.

    Raises:
        ConfigError: when the file can't be read.
    """
    key = field if Path(path).suffix == ".jsonl" else None
    with (
        name_unreadable(path, f"{prefix}.path", "a file of text"),
        untrusted.open_regular_file(Path(path).expanduser()) as file,
    ):
        content = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return hashlib.sha256(f"{content} {key} {tokens}".encode()).hexdigest()[:12]
