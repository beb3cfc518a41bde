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
    """Shows continuations; a context manager. This one, for ranks other than 0, shows nothing."""

    def __enter__(self) -> GenerationOutput:
        return self

    def __exit__(self, *error: object) -> None:
        pass

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
        if self.count == 1:
            print(flush=True)
            return
        text = row.detokenizer.text if row.detokenizer is not None else " " + " ".join(map(str, row.tokens))
        print(f"--- {self.number} of {self.count}\n{self._format_prompt(row.prompt)}{text}\n", flush=True)

    def _format_prompt(self, prompt: Sequence[int]) -> str:
        return " ".join(map(str, prompt)) if self.tokenizer is None else decode_prompt(prompt, self.tokenizer)


class JsonLinesOutput(GenerationOutput):
    """Writes one line per continuation: {prompt, text, tokens, finish_reason}; texts are null without a tokenizer."""

    def __init__(self, file: Path, tokenizer: Tokenizer | None) -> None:
        """Take the file, which is overwritten."""
        self.file, self.tokenizer = file, tokenizer

    def __enter__(self) -> JsonLinesOutput:
        try:
            self.stream = self.file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"to={self.file}: can't be written ({error.strerror}); give another file.") from error
        return self

    def __exit__(self, *error: object) -> None:
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


_UNFINISHED = "\ufffd"
_CONTEXT = 6
"""Tokens of the prompt that are decoded with what follows: some tokenizers decode a text's first word differently."""


class Detokenizer:
    """The text of one continuation, which grows token by token.

    A character may consist of several tokens: it is returned once it is complete. What may be the beginning of a stop
    text is buffered until it is one, or not.

    Attributes:
        text: the text so far, without the buffer.
        stopped: whether a stop text was generated; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.tokens = list(prompt[-_CONTEXT:])
        self.window_start, self.window_end = 0, len(self.tokens)
        self.buffer, self.text, self.stopped = "", "", False

    def add_token(self, token: int) -> str:
        """Add a token, and return the text that can be shown now."""
        self.tokens.append(token)
        return self._filter_stops(self._decode(last=False))

    def finish(self) -> str:
        """End the text, and return what was buffered."""
        if self.stopped:
            return ""
        rest = self._filter_stops(self._decode(last=True))
        self.text, rest, self.buffer = self.text + self.buffer, rest + self.buffer, ""
        return rest

    def _decode(self, last: bool) -> str:
        """Return the text of the tokens that were not decoded yet; "" while their last character is incomplete."""
        decoded_text = self.tokenizer.decode(self.tokens[self.window_start : self.window_end])
        text = self.tokenizer.decode(self.tokens[self.window_start :])
        if len(text) <= len(decoded_text) or (text.endswith(_UNFINISHED) and not last):
            return ""
        self.window_start, self.window_end = self.window_end, len(self.tokens)
        return text[len(decoded_text) :]

    def _filter_stops(self, new_text: str) -> str:
        """Return what can be shown of the buffer and the new text."""
        text = self.buffer + new_text
        ends = [index for index in (text.find(stop) for stop in self.stop) if index >= 0]
        if ends and not self.stopped:
            self.stopped, released, self.buffer = True, text[: min(ends)], ""
        else:
            released, self.buffer = _split_partial_stop(text, self.stop)
        self.text += released
        return released


def _split_partial_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Split `text` before its longest end that is the beginning of a stop text."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size], text[-size:]
    return text, ""
