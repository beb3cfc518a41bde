"""Documents of a file of text. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan.errors import ConfigError
from titan.evaluation.items import read_records
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
    try:
        return untrusted.read_regular_file(Path(path).expanduser()).decode()
    except (OSError, ValueError) as error:
        is_undecodable = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8" if is_undecodable else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{setting}={path}: can't be read ({reason}); give a file of text.") from error
