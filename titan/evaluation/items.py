"""Items of tasks, and the formats in which published tasks have them: HellaSwag, ARC and LAMBADA.

Prompts are those of lm-evaluation-harness, so that results can be compared with it. Free of torch.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.errors import ConfigError
from titan.files import untrusted


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
        path: the file.
        parse_item: makes an item of a record.
        limit: how many of the first items to read; None: all.
        setting: the setting that names the file.

    Raises:
        ConfigError: when the file can't be read or has no items, or a line has another format.
    """
    items: list[TaskItem] = []
    for number, record in read_records(path, setting):
        if len(items) == limit:
            break
        try:
            items.append(_check_item(parse_item(record)))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{setting}={path}: line {number} is no item of this task ({type(error).__name__}: {error}); correct "
                "it, or give another format."
            ) from error
    if not items:
        raise ConfigError(f"{setting}={path}: has no items; give another file.")
    return tuple(items)


def _check_item(item: TaskItem) -> TaskItem:
    if not item.choices or not all(item.choices):
        raise ValueError("an item needs choices that are not empty")
    if not 0 <= item.label < len(item.choices):
        raise ValueError(f"answer {item.label} of {len(item.choices)} choices")
    return item


def read_records(path: str, setting: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line of a file that is not empty.

    Raises:
        ConfigError: when the file can't be read, or a line is no JSON object.
    """
    try:
        with untrusted.open_regular_file(Path(path).expanduser()) as file:
            for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), 1):
                if line.strip():
                    yield number, _parse_object(line, f"{setting}={path}: line {number}")
    except (OSError, ValueError) as error:
        is_undecodable = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8" if is_undecodable else getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{setting}={path}: can't be read ({reason}); give a file with one JSON object per line."
        ) from error


def _parse_object(line: str, location: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{location} is not a JSON object; correct it.")
    return record
