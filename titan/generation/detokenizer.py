"""Incremental detokenization: text from tokens as they are generated. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan.dataset.tokenizers.tokenizer import Tokenizer

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
