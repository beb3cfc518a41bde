"""Where continuations go: to the terminal as they come, or one after the other; or to a file. Free of torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from titan.dataset.tokenizers.base import Tokenizer
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.generation.decode import Row


class Screen(Protocol):
    """What shows continuations; a context manager."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A single continuation, of this prompt, is about to come piece by piece."""

    def piece(self, token: int, text: str) -> None:
        """The next token of it, and the text that came with it."""

    def done(self, row: Row) -> None:
        """A continuation has ended."""


def text_of(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt, without the token that begins a document."""
    return tokenizer.decode(prompt[1:] if prompt[0] == tokenizer.bos else prompt)


class Nowhere:
    """For ranks that show nothing."""

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, prompt: Sequence[int]) -> None:
        """See `Screen`."""

    def piece(self, token: int, text: str) -> None:
        """See `Screen`."""

    def done(self, row: Row) -> None:
        """See `Screen`."""


class Terminal(Nowhere):
    """Prints each prompt with its continuation; as ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, count: int) -> None:
        """Take what reads tokens, and how many continuations there will be: a single one is shown as it comes."""
        self.tokenizer, self.count, self.number = tokenizer, count, 0
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character shows something else

    def begin(self, prompt: Sequence[int]) -> None:
        """See `Screen`."""
        if self.count == 1:
            print(self._prompt(prompt), end="", flush=True)

    def piece(self, token: int, text: str) -> None:
        """See `Screen`."""
        if self.count == 1:
            print(text if self.tokenizer is not None else f" {token}", end="", flush=True)

    def done(self, row: Row) -> None:
        """See `Screen`."""
        self.number += 1
        if self.count == 1:
            print(flush=True)
            return
        text = row.text.given if row.text is not None else " " + " ".join(map(str, row.tokens))
        print(f"--- {self.number} of {self.count}\n{self._prompt(row.prompt)}{text}\n", flush=True)

    def _prompt(self, prompt: Sequence[int]) -> str:
        return " ".join(map(str, prompt)) if self.tokenizer is None else text_of(prompt, self.tokenizer)


class JsonLines(Nowhere):
    """Writes a line for each continuation: {prompt, text, tokens, finish_reason}; texts are null without tokenizer."""

    def __init__(self, file: Path, tokenizer: Tokenizer | None) -> None:
        """Take the file, which is written anew."""
        self.file, self.tokenizer = file, tokenizer

    def __enter__(self) -> JsonLines:
        try:
            self.out = self.file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output={self.file}: can't be written ({error.strerror}); give another file.") from error
        return self

    def __exit__(self, *error: object) -> None:
        self.out.close()

    def done(self, row: Row) -> None:
        """See `Screen`."""
        line = {
            "prompt": None if self.tokenizer is None else text_of(row.prompt, self.tokenizer),
            "text": None if row.text is None else row.text.given,
            "tokens": row.tokens,
            "finish_reason": row.reason,
        }
        self.out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.out.flush()


@dataclass
class Clock:
    """How fast tokens came, prompts included."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    tokens: int = 0

    def tick(self) -> None:
        """A token came."""
        self.tokens += 1
        self.first = self.first or time.perf_counter()

    def line(self) -> str:
        """What to say at the end."""
        seconds = time.perf_counter() - self.began
        wait = (self.first or self.began) - self.began
        rate = self.tokens / seconds
        return f"{self.tokens:,} tokens in {seconds:.2f} s, {rate:,.1f} tokens/s; the first after {wait:.2f} s"
