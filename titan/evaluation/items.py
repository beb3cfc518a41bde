"""Items of tasks, and the formats in which published tasks have them: HellaSwag, ARC and LAMBADA.

Prompts are those of lm-evaluation-harness, so that results can be compared with it. Free of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.errors import ConfigError


@dataclass(frozen=True)
class Item:
    """A context and its continuations: several to choose from, or the one that a cloze asks for.

    Attributes:
        context: the text that is given.
        choices: the continuations; lengths are counted without the delimiter.
        answer: index of the right one.
        delimiter: the text between the context and a continuation.
    """

    context: str
    choices: tuple[str, ...]
    answer: int = 0
    delimiter: str = " "


def hellaswag(record: Mapping[str, Any]) -> Item:
    """Return an item of HellaSwag: `ctx_a`, `ctx_b`, `activity_label`, `endings` and `label`."""
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Item(_plain(context), tuple(map(_plain, record["endings"])), int(record["label"]))


def _plain(text: str) -> str:
    """Return a text of HellaSwag without the marks of WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def arc(record: Mapping[str, Any]) -> Item:
    """Return an item of ARC, as published (`question.stem`) or as the hub has it (`choices.text`)."""
    question = record["question"]
    if isinstance(question, str):
        texts, labels = record["choices"]["text"], record["choices"]["label"]
    else:
        texts, labels = zip(*((choice["text"], choice["label"]) for choice in question["choices"]), strict=True)
        question = question["stem"]
    return Item(f"Question: {question}\nAnswer:", tuple(texts), list(labels).index(record["answerKey"]))


def lambada(record: Mapping[str, Any]) -> Item:
    """Return an item of LAMBADA: the last word of `text` is to be continued."""
    *context, word = record["text"].split(" ")
    return Item(" ".join(context), (word,))


FORMATS: dict[str, Callable[[Mapping[str, Any]], Item]] = {"hellaswag": hellaswag, "arc": arc, "lambada": lambada}


def read_items(path: str, item: Callable[[Mapping[str, Any]], Item], limit: int | None, where: str) -> tuple[Item, ...]:
    """Return the items of a file with one JSON object a line.

    Args:
        path: the file.
        item: makes an item of a record.
        limit: how many of the first items to read; None: all.
        where: the setting that names the file.

    Raises:
        ConfigError: when the file can't be read or has no items, or a line has another format.
    """
    found: list[Item] = []
    for number, record in records(path, where):
        if len(found) == limit:
            break
        try:
            found.append(_checked(item(record)))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{where}={path}: line {number} is no item of this task ({type(error).__name__}: {error}); correct it, "
                "or give another format."
            ) from error
    if not found:
        raise ConfigError(f"{where}={path}: has no items; give another file.")
    return tuple(found)


def _checked(item: Item) -> Item:
    if not item.choices or not all(item.choices):
        raise ValueError("an item needs choices that are not empty")
    if not 0 <= item.answer < len(item.choices):
        raise ValueError(f"answer {item.answer} of {len(item.choices)} choices")
    return item


def records(path: str, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line of a file that is not empty.

    Raises:
        ConfigError: when the file can't be read, or a line is no JSON object.
    """
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, f"{where}={path}: line {number}")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{where}={path}: can't be read ({why}); give a file with one JSON object a line.") from error


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object; correct it.")
    return found
