"""Documents of a file of text. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan.errors import ConfigError
from titan.evaluation.items import records


def read_texts(path: str, field: str, where: str) -> Iterator[str]:
    """Yield the documents of a file: the texts of its JSON objects, or its whole text.

    Args:
        path: a .jsonl file, or a file of UTF-8 text.
        field: the key of the text in an object.
        where: the setting that has `path`, for messages.

    Raises:
        ConfigError: when the file can't be read, or an object has no text.
    """
    if Path(path).suffix != ".jsonl":
        yield _whole(path, f"{where}.path")
        return
    for number, record in records(path, f"{where}.path"):
        text = record.get(field)
        if not isinstance(text, str):
            known = ", ".join(map(str, record))
            raise ConfigError(
                f"{where}.field={field}: line {number} of {path} has no text of this name; it has {known}."
            )
        yield text


def _whole(path: str, where: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{where}={path}: can't be read ({why}); give a file of text.") from error
