"""Output of continuations: streamed to the terminal, printed one after the other, or written to a file. No torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan.console.numbers import format_plural
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.generation.decode import Continuation


def decode_prompt(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt, without the token that begins a document."""
    return tokenizer.decode(prompt[1:] if prompt[0] == tokenizer.bos else prompt)


class GenerationOutput:
    """Shows continuations, until it is closed. This one, for ranks other than 0, shows nothing."""

    def close(self) -> None:
        """End the output."""

    def begin_prompt(self, prompt: Sequence[int]) -> None:
        """Start a continuation of this prompt."""

    def show_token(self, token: int, text: str) -> None:
        """Show the next token, and the text that it completes."""

    def finish_row(self, row: Continuation) -> None:
        """End a continuation."""


class TerminalOutput(GenerationOutput):
    """Prints each prompt with its continuation; as token ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, count: int) -> None:
        """Take the tokenizer and the number of continuations: a single one is streamed."""
        self.tokenizer, self.count, self.number = tokenizer, count, 0
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding lacks

    def begin_prompt(self, prompt: Sequence[int]) -> None:
        """See `GenerationOutput`."""
        if self.count == 1:
            print(self._format_prompt(prompt), end="", flush=True)

    def show_token(self, token: int, text: str) -> None:
        """See `GenerationOutput`."""
        if self.count == 1:
            print(text if self.tokenizer is not None else f" {token}", end="", flush=True)

    def finish_row(self, row: Continuation) -> None:
        """See `GenerationOutput`."""
        self.number += 1
        text = row.detokenizer.text if row.detokenizer is not None else " " + " ".join(map(str, row.tokens))
        shown = f"--- {self.number} of {self.count}\n{self._format_prompt(row.prompt)}{text}\n"
        print("" if self.count == 1 else shown, flush=True)

    def _format_prompt(self, prompt: Sequence[int]) -> str:
        return " ".join(map(str, prompt)) if self.tokenizer is None else decode_prompt(prompt, self.tokenizer)


class JsonLinesOutput(GenerationOutput):
    """Writes one line per continuation: {prompt, text, tokens, finish_reason}; texts are null without a tokenizer."""

    def __init__(self, file: Path, tokenizer: Tokenizer | None) -> None:
        """Take the file, which is overwritten."""
        self.tokenizer = tokenizer
        try:
            self.stream = file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"to={file}: can't be written ({error.strerror}); give another file.") from error

    def close(self) -> None:
        """See `GenerationOutput`."""
        self.stream.close()

    def finish_row(self, row: Continuation) -> None:
        """See `GenerationOutput`."""
        line = {
            "prompt": None if self.tokenizer is None else decode_prompt(row.prompt, self.tokenizer),
            "text": None if row.detokenizer is None else row.detokenizer.text,
            "tokens": row.tokens,
            "finish_reason": row.reason,
        }
        self.stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.stream.flush()


@dataclass
class Throughput:
    """Measures tokens per second, including the time for prompts."""

    start_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    tokens: int = 0

    def count_token(self) -> None:
        """Count a token."""
        self.tokens += 1
        self.first_token_time = self.first_token_time or time.perf_counter()

    def format_line(self) -> str:
        """Return the figures in one line."""
        seconds = time.perf_counter() - self.start_time
        wait = (self.first_token_time or self.start_time) - self.start_time
        rate = self.tokens / seconds
        tokens = format_plural(self.tokens, "token")
        return f"{tokens} in {seconds:.2f} s, {rate:,.1f} tokens/s; first token after {wait:.2f} s"
