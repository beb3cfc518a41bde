"""Conversations for supervised fine-tuning: only the assistant's messages count in the loss.

A chat template turns a conversation into turns: the assistant's text and its end marker count, headers and other
messages don't. A template's markup may become special tokens, message text never does. Messages after the last answer
are dropped. bos and eos are added by `titan.dataset.tokenizers.tokenizer.Tokenizer.encode_turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.config.settings import format_value
from titan.dataset.documents import Document, Skip, Turn
from titan.dataset.sources.files import BadDocumentError
from titan.dataset.sources.records import (
    RowFormat,
    TableRow,
    get_value,
    repair_surrogates,
)
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.dataset.tokenizers.tokenizer import Tokenizer

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}

Message = tuple[str, str]
"""A role and the text of its message."""


def render_llama3(messages: Sequence[Message]) -> Iterator[Turn]:
    """Llama 3's template, with white space stripped from the text (as published with the model)."""
    for role, text in messages:
        is_answer = role == "assistant"
        yield Turn("<|start_header_id|>", trained=False, special=True)
        yield Turn(role, trained=False)
        yield Turn("<|end_header_id|>\n\n", trained=False, special=True)
        yield Turn(text.strip(), trained=is_answer)
        yield Turn("<|eot_id|>", trained=is_answer, special=True)


def render_chatml(messages: Sequence[Message]) -> Iterator[Turn]:
    """ChatML, Qwen's template."""
    for number, (role, text) in enumerate(messages):
        is_answer = role == "assistant"
        yield Turn("\n<|im_start|>" if number else "<|im_start|>", trained=False, special=True)
        yield Turn(f"{role}\n", trained=False)
        yield Turn(text, trained=is_answer)
        yield Turn("<|im_end|>", trained=is_answer, special=True)


def render_plain(messages: Sequence[Message]) -> Iterator[Turn]:
    """Role names and colons, one message per line, for tokenizers without special tokens for turns."""
    for number, (role, text) in enumerate(messages, start=1):
        is_answer = role == "assistant"
        yield Turn(f"{role.capitalize()}:", trained=False)
        yield Turn(f" {text.strip()}", trained=is_answer)
        if number < len(messages):
            yield Turn("\n", trained=is_answer)


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens that it needs."""

    render: Callable[[Sequence[Message]], Iterator[Turn]]
    tokens: tuple[str, ...] = ()


TEMPLATES = {
    "llama3": Template(render_llama3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "chatml": Template(render_chatml, ("<|im_start|>", "<|im_end|>")),
    "plain": Template(render_plain),
}


def choose_template(name: str, tokenizer: Tokenizer) -> str:
    """Return the name of the template; for "auto" the first one whose special tokens `tokenizer` has."""
    if name == "auto":
        return next(
            candidate_name
            for candidate_name, candidate in TEMPLATES.items()
            if all(map(tokenizer.has_special, candidate.tokens))
        )
    missing = [token for token in TEMPLATES[name].tokens if not tokenizer.has_special(token)]
    if missing:
        raise ConfigError(
            f"dataset.template={name}: the tokenizer {tokenizer.name} has no special token {missing[0]}; "
            f"choose dataset.template=auto or another tokenizer."
        )
    return name


@dataclass(frozen=True)
class Conversation(RowFormat):
    """The conversation in a row: a list of messages, or a prompt with its completion.

    Attributes:
        template: a name in TEMPLATES.
        messages: the key of the list; unless `prompt` and `completion` are given.
        prompt: the key of the user's message; None: the row has `messages`.
        completion: the key of the answer; None: the row has `messages`.
        masked: whether rows have a loss mask: yes.
    """

    template: str
    messages: str = "messages"
    prompt: str | None = None
    completion: str | None = None
    masked = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys to read."""
        return (self.prompt, self.completion) if self.prompt and self.completion else (self.messages,)

    def list_parameters(self) -> list[Any]:
        """Return the template and the keys."""
        return [1, self.template, *self.columns]

    def extract_document(self, row: TableRow) -> Document:
        """Return the conversation's turns, or Skip when it has no answer."""
        messages = list(self._read_messages(row))
        while messages and not (messages[-1][0] == "assistant" and messages[-1][1].strip()):
            messages.pop()
        if not messages:
            return Skip("no answer")
        return tuple(turn for turn in TEMPLATES[self.template].render(messages) if turn.text)

    def _read_messages(self, row: TableRow) -> Iterator[Message]:
        keys = [("", self.messages, "dataset.messages")]
        if self.prompt and self.completion:
            keys = [
                ("user", self.prompt, "dataset.prompt"), ("assistant", self.completion, "dataset.completion"),
            ]  # fmt: skip
        for role, key, setting in keys:
            value = get_value(row, key, setting)
            if role and isinstance(value, str):
                yield role, repair_surrogates(value)
            else:
                yield from _parse_messages(value, key, setting)


def _parse_messages(value: Any, key: str, setting: str) -> Iterator[Message]:
    """Parse messages, each {role, content} or {from, value}."""
    way_out = f"give the right key in {setting}."
    if not isinstance(value, list):
        problem = f"{key!r} is {format_value(value)[:40]}, not a list of messages"
        raise BadDocumentError("no text", f"{problem}; {way_out}")
    for message in value:
        fields = message if isinstance(message, Mapping) else {}
        role, text = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(text, str):
            problem = f"{key!r} contains {format_value(message)[:60]}, not {{role, content}} of text"
            raise BadDocumentError("no text", f"{problem}; {way_out}")
        yield ROLES.get(role, role), repair_surrogates(text)
