"""The evaluation axis: validation sets, tasks and averaged weights. Free of torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titan.config.kinds import get_kind
from titan.config.settings import MISSING, setting
from titan.config.text_kinds import Input, Label
from titan.errors import ConfigError
from titan.evaluation.items import FORMATS, TaskItem, name_unreadable, read_items, read_texts
from titan.files import untrusted


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Text of a local file, whose loss is measured beside that of the dataset's own evaluation set."""

    path: Input = setting(MISSING, "a text file, or a .jsonl file with one JSON object per line")
    field: Label = setting("text", "the key of a JSON object that holds the document's text")
    tokens: int = setting(16384, "tokens of the file to use, the first ones", at_least=1)

    def check(self, prefix: str) -> None:
        """Raise ConfigError when the file can't be read, or its first document has no text."""
        if not next(read_texts(self.path, self.field, prefix), ""):
            raise ConfigError(f"{prefix}.path={self.path}: its first document is empty; give another file.")

    def compute_digest(self, prefix: str) -> str:
        """Return 12 hex digits of a hash of the file's content and of how its first `tokens` are read.

        Raises:
            ConfigError: when the file can't be read.
        """
        key = self.field if Path(self.path).suffix == ".jsonl" else None
        with (
            name_unreadable(self.path, f"{prefix}.path", "a file of text"),
            untrusted.open_regular_file(Path(self.path).expanduser()) as file,
        ):
            content = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return hashlib.sha256(f"{content} {key} {self.tokens}".encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Items of a local file: choosing between continuations, or predicting one (cloze).

    A task of your own derives from this class and defines `item`.
    """

    path: Input = setting(MISSING, "a file with one JSON object per line, one for each item")
    format: Literal["hellaswag", "arc", "lambada"] | None = setting(
        None, "the format of the file, as published; null: the class that _target_ names reads it"
    )
    limit: int | None = setting(None, "items to use, the first ones; null: all", at_least=1)
    bos: bool = setting(False, "begin each context with the tokenizer's token that begins a document")
    # the class of a task of one's own, so that ids and run.yaml tell tasks of equal settings apart
    _target_: str = field(init=False, default="", metadata={"later": True})

    def __post_init__(self) -> None:
        """Record which class this is, if not this one, whose name is in no id."""
        if type(self) is not Task:
            object.__setattr__(self, "_target_", get_kind(type(self)))

    def build(self, prefix: str = "task") -> tuple[TaskItem, ...]:
        """Return the items.

        Raises:
            ConfigError: when the file or an item can't be read.
        """
        return read_items(self.path, self.item, self.limit, f"{prefix}.path")

    def compute_digest(self, prefix: str) -> str:
        """Return 12 hex digits that tell its items apart from others, whatever file and class they are from."""
        return hashlib.sha256(repr((self.build(prefix), self.bos)).encode()).hexdigest()[:12]

    def item(self, record: Mapping[str, Any]) -> TaskItem:
        """Return the item of one JSON object; one of another format may raise KeyError, ValueError or TypeError."""
        return FORMATS[str(self.format)](record)

    def check(self, prefix: str) -> None:
        """Raise ConfigError when there is no format, or the items can't be read."""
        if self.format is None and type(self) is Task:
            raise ConfigError(f"{prefix}.format=null: give one of {', '.join(FORMATS)}, or a class by _target_.")
        self.build(prefix)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a run measures of its weights while it trains, and how often."""

    every: int = setting(50, "steps between evaluations; 0: only at the end", at_least=0)
    tokens: int = setting(16384, "tokens of each source's evaluation set; 0: none", at_least=0)
    sets: Mapping[str, ValidationSet] | None = setting(None, "files of text, by names that you choose")
    tasks: Mapping[str, Task] | None = setting(None, "tasks with items from files, by names that you choose")
    ema: float | None = setting(
        None, "decay per step of a moving average of the weights that is evaluated too; null: none", above=0, below=1
    )

    def check(self) -> None:
        """Raise ConfigError when a name can't be a part of a key, or a file can't be read."""
        sets, tasks = self.sets or {}, self.tasks or {}
        for axis, named in (("sets", sets), ("tasks", tasks)):
            for name, entry in named.items():
                prefix = f"evaluation.{axis}.{name}"
                if not re.fullmatch(r"\w[\w.-]*", name):
                    raise ConfigError(f"{prefix}: a name has letters, digits, '_', '-' and '.'; give another one.")
                entry.check(prefix)
        if shared := sorted(sets.keys() & tasks.keys()):
            raise ConfigError(f"evaluation.sets.{shared[0]}: is the name of a task too; give another one.")
