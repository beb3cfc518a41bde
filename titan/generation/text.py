"""Tokens to text as they come. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan.dataset.tokenizers.base import Tokenizer

_UNFINISHED = "\ufffd"
_CONTEXT = 6
"""How many tokens of the prompt are decoded with what follows: some tokenizers write a text's first word otherwise."""


class Text:
    """The text of one continuation, which grows token by token.

    A character may be spread over several tokens: it is given once it is complete. What may become a stop text is held
    back until it has become one, or something else.

    Attributes:
        given: the text so far, without what is held back.
        stopped: whether a stop text came; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.tokens = list(prompt[-_CONTEXT:])
        self.begin, self.decoded = 0, len(self.tokens)
        self.held, self.given, self.stopped = "", "", False

    def add(self, token: int) -> str:
        """Take a token; the text that can be shown since."""
        self.tokens.append(token)
        return self._give(self._decode(last=False))

    def end(self) -> str:
        """No token follows; what was held back of the text."""
        if self.stopped:
            return ""
        rest = self._give(self._decode(last=True))
        self.given, rest, self.held = self.given + self.held, rest + self.held, ""
        return rest

    def _decode(self, last: bool) -> str:
        """The text of the tokens that were not decoded yet; nothing while their last character is incomplete."""
        before = self.tokenizer.decode(self.tokens[self.begin : self.decoded])
        text = self.tokenizer.decode(self.tokens[self.begin :])
        if len(text) <= len(before) or (text.endswith(_UNFINISHED) and not last):
            return ""
        self.begin, self.decoded = self.decoded, len(self.tokens)
        return text[len(before) :]

    def _give(self, new: str) -> str:
        """What of the held and the new text can be shown."""
        text = self.held + new
        ends = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if ends and not self.stopped:
            self.stopped, shown, self.held = True, text[: min(ends)], ""
        else:
            shown, self.held = _cut(text, self.stop)
        self.given += shown
        return shown


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """`text`, and apart from it the longest end that is the beginning of a stop text."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size], text[-size:]
    return text, ""
