"""Output of continuations: streamed to the terminal, printed one after the other, or written to a file. No torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.generation.decode import Row


class Output(Protocol):
    """Shows continuations; a context manager."""

    def __enter__(self) -> Output: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a continuation of this prompt."""

    def piece(self, token: int, text: str) -> None:
        """Show the next token, and the text that it completes."""

    def done(self, row: Row) -> None:
        """End a continuation."""


def text_of(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt, without the token that begins a document."""
    return tokenizer.decode(prompt[1:] if prompt[0] == tokenizer.bos else prompt)


class NoOutput:
    """For ranks that show nothing."""

    def __enter__(self) -> NoOutput:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, prompt: Sequence[int]) -> None:
        """See `Output`."""

    def piece(self, token: int, text: str) -> None:
        """See `Output`."""

    def done(self, row: Row) -> None:
        """See `Output`."""


class Terminal(NoOutput):
    """Prints each prompt with its continuation; as token ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, count: int) -> None:
        """Take the tokenizer and the number of continuations: a single one is streamed."""
        self.tokenizer, self.count, self.number = tokenizer, count, 0
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding lacks

    def begin(self, prompt: Sequence[int]) -> None:
        """See `Output`."""
        if self.count == 1:
            print(self._prompt(prompt), end="", flush=True)

    def piece(self, token: int, text: str) -> None:
        """See `Output`."""
        if self.count == 1:
            print(text if self.tokenizer is not None else f" {token}", end="", flush=True)

    def done(self, row: Row) -> None:
        """See `Output`."""
        self.number += 1
        if self.count == 1:
            print(flush=True)
            return
        text = row.text.given if row.text is not None else " " + " ".join(map(str, row.tokens))
        print(f"--- {self.number} of {self.count}\n{self._prompt(row.prompt)}{text}\n", flush=True)

    def _prompt(self, prompt: Sequence[int]) -> str:
        return " ".join(map(str, prompt)) if self.tokenizer is None else text_of(prompt, self.tokenizer)


class JsonLines(NoOutput):
    """Writes one line per continuation: {prompt, text, tokens, finish_reason}; texts are null without a tokenizer."""

    def __init__(self, file: Path, tokenizer: Tokenizer | None) -> None:
        """Take the file, which is overwritten."""
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
        """See `Output`."""
        line = {
            "prompt": None if self.tokenizer is None else text_of(row.prompt, self.tokenizer),
            "text": None if row.text is None else row.text.given,
            "tokens": row.tokens,
            "finish_reason": row.reason,
        }
        self.out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.out.flush()


@dataclass
class Throughput:
    """Measures tokens per second, including the time for prompts."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    tokens: int = 0

    def count(self) -> None:
        """Count a token."""
        self.tokens += 1
        self.first = self.first or time.perf_counter()

    def line(self) -> str:
        """Return the figures in one line."""
        seconds = time.perf_counter() - self.began
        wait = (self.first or self.began) - self.began
        rate = self.tokens / seconds
        return f"{self.tokens:,} tokens in {seconds:.2f} s, {rate:,.1f} tokens/s; first token after {wait:.2f} s"
