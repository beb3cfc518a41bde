"""Items of tasks, and the formats in which published tasks have them: HellaSwag, ARC and LAMBADA.

Prompts are those of lm-evaluation-harness, so that results can be compared with it. Free of torch.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.errors import ConfigError
from titan.files import untrusted

_ITEM_TYPES: dict[str, Any] = {"context": str, "choices": tuple[str, ...], "label": int | bool, "delimiter": str}


@dataclass(frozen=True)
class TaskItem:
    """A context and its continuations: several to choose from, or the one that a cloze asks for.

    Attributes:
        context: the text that is given.
        choices: the continuations; lengths are counted without the delimiter.
        label: index of the right one.
        delimiter: the text between the context and a continuation.
    """

    context: str
    choices: tuple[str, ...]
    label: int = 0
    delimiter: str = " "

    def __post_init__(self) -> None:
        """Raise ValueError for values of another type, for no or empty choices, and for a label that is none of them.

        What makes items reports this with the line of the file.
        """
        for name, kind in _ITEM_TYPES.items():
            untrusted.check_type(getattr(self, name), kind, name)
        if not self.choices or not all(self.choices):
            raise ValueError("an item needs choices that are not empty")
        if not 0 <= self.label < len(self.choices):
            raise ValueError(f"answer {self.label} of {len(self.choices)} choices")


def parse_hellaswag(record: Mapping[str, Any]) -> TaskItem:
    """Return an item of HellaSwag: `ctx_a`, `ctx_b`, `activity_label`, `endings` and `label`."""
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return TaskItem(_strip_marks(context), tuple(map(_strip_marks, record["endings"])), int(record["label"]))


def _strip_marks(text: str) -> str:
    """Return a text of HellaSwag without the marks of WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def parse_arc(record: Mapping[str, Any]) -> TaskItem:
    """Return an item of ARC, as published (`question.stem`) or as the hub has it (`choices.text`)."""
    question = record["question"]
    if isinstance(question, str):
        texts, labels = record["choices"]["text"], record["choices"]["label"]
    else:
        texts, labels = zip(*((choice["text"], choice["label"]) for choice in question["choices"]), strict=True)
        question = question["stem"]
    return TaskItem(f"Question: {question}\nAnswer:", tuple(texts), list(labels).index(record["answerKey"]))


def parse_lambada(record: Mapping[str, Any]) -> TaskItem:
    """Return an item of LAMBADA: the last word of `text` is to be continued."""
    *context, word = record["text"].split(" ")
    return TaskItem(" ".join(context), (word,))


FORMATS: dict[str, Callable[[Mapping[str, Any]], TaskItem]] = {
    "hellaswag": parse_hellaswag,
    "arc": parse_arc,
    "lambada": parse_lambada,
}


def read_items(
    path: str, parse_item: Callable[[Mapping[str, Any]], TaskItem], limit: int | None, setting: str
) -> tuple[TaskItem, ...]:
    """Return the items of a file with one JSON object per line.

    Args:
        limit: how many of the first items to read; None: all.

    Raises:
        ConfigError: when the file can't be read or has no items, or a line has another format.
    """
    items: list[TaskItem] = []
    for number, record in read_records(path, setting):
        if len(items) == limit:
            break
        try:
            items.append(parse_item(record))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{setting}={path}: line {number} is no item of this task ({type(error).__name__}: {error}); correct "
                "it, or give another format."
            ) from error
    if not items:
        raise ConfigError(f"{setting}={path}: has no items; give another file.")
    return tuple(items)


def read_records(path: str, setting: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line of a file that is not empty.

    Raises:
        ConfigError: when the file can't be read, or a line is no JSON object.
    """
    with (
        name_unreadable(path, setting, "a file with one JSON object per line"),
        untrusted.open_regular_file(Path(path).expanduser()) as file,
    ):
        for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise ConfigError(f"{setting}={path}: line {number} is not a JSON object; correct it.")
            yield number, record


@contextmanager
def name_unreadable(path: str, setting: str, wanted: str) -> Iterator[None]:
    """Turn the errors of reading a file into a ConfigError that names the setting, and what to give instead."""
    try:
        yield
    except (OSError, ValueError) as error:
        is_undecodable = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8" if is_undecodable else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{setting}={path}: can't be read ({reason}); give {wanted}.") from error


def read_texts(path: str, field: str, prefix: str) -> Iterator[str]:
    """Yield the documents of a file: the texts of its JSON objects, or its whole text.

    Args:
        path: a .jsonl file, or a file of UTF-8 text.
        field: the key of the text in an object.

    Raises:
        ConfigError: when the file can't be read, or an object has no text.
    """
    if Path(path).suffix != ".jsonl":
        with name_unreadable(path, f"{prefix}.path", "a file of text"):
            yield untrusted.read_regular_file(Path(path).expanduser()).decode()
        return
    for number, record in read_records(path, f"{prefix}.path"):
        text = record.get(field)
        if not isinstance(text, str):
            keys = ", ".join(map(str, record))
            raise ConfigError(
                f"{prefix}.field={field}: line {number} of {path} has no text of this name; it has {keys}."
            )
        yield text
