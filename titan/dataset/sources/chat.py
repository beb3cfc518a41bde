"""Conversations for supervised fine-tuning: only the assistant's messages count in the loss.

A chat template turns a conversation into turns: the assistant's text and its end marker count, headers and other
messages don't. A template's markup may become special tokens, message text never does. Messages after the last answer
are dropped. bos and eos are added by `titan.dataset.tokenizers.tokenizer.Tokenizer.encode_turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.config.settings import show
from titan.dataset.documents import Document, Skip, Source, Turn
from titan.dataset.sources import files
from titan.dataset.sources.files import BadDocument
from titan.dataset.sources.records import JsonLines, Parquet, Pick, Reader, Row, Rows, repaired, value_of
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.dataset.tokenizers.tokenizer import Tokenizer

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_TABLES = (".parquet", ".pq")
_LINES = (".jsonl", ".json")

Message = tuple[str, str]
"""A role and the text of its message."""


def llama3(messages: Sequence[Message]) -> Iterator[Turn]:
    """Llama 3's template, with white space stripped from the text (as published with the model)."""
    for role, words in messages:
        answer = role == "assistant"
        yield Turn("<|start_header_id|>", trained=False, special=True)
        yield Turn(role, trained=False)
        yield Turn("<|end_header_id|>\n\n", trained=False, special=True)
        yield Turn(words.strip(), trained=answer)
        yield Turn("<|eot_id|>", trained=answer, special=True)


def chatml(messages: Sequence[Message]) -> Iterator[Turn]:
    """ChatML, Qwen's template."""
    for number, (role, words) in enumerate(messages):
        answer = role == "assistant"
        yield Turn("\n<|im_start|>" if number else "<|im_start|>", trained=False, special=True)
        yield Turn(f"{role}\n", trained=False)
        yield Turn(words, trained=answer)
        yield Turn("<|im_end|>", trained=answer, special=True)


def plain(messages: Sequence[Message]) -> Iterator[Turn]:
    """Role names and colons, one message per line, for tokenizers without special tokens for turns."""
    for number, (role, words) in enumerate(messages, start=1):
        answer = role == "assistant"
        yield Turn(f"{role.capitalize()}:", trained=False)
        yield Turn(f" {words.strip()}", trained=answer)
        if number < len(messages):
            yield Turn("\n", trained=answer)


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens that it needs."""

    render: Callable[[Sequence[Message]], Iterator[Turn]]
    tokens: tuple[str, ...] = ()


TEMPLATES = {
    "llama3": Template(llama3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "chatml": Template(chatml, ("<|im_start|>", "<|im_end|>")),
    "plain": Template(plain),
}


def template(name: str, tokenizer: Tokenizer) -> str:
    """Return the name of the template; for "auto" the first one whose special tokens `tokenizer` has.

    Raises:
        ConfigError: when the tokenizer lacks a special token of the template.
    """
    if name == "auto":
        return next(t for t, about in TEMPLATES.items() if all(map(tokenizer.has, about.tokens)))
    missing = [token for token in TEMPLATES[name].tokens if not tokenizer.has(token)]
    if missing:
        raise ConfigError(
            f"dataset.template={name}: the tokenizer {tokenizer.name} has no special token {missing[0]}; "
            f"choose dataset.template=auto or another tokenizer."
        )
    return name


@dataclass(frozen=True)
class Conversation(Pick):
    """The conversation in a row: a list of messages, or a prompt with its completion.

    Attributes:
        template: a name in TEMPLATES.
        messages: the key of the list; unless `prompt` and `completion` are given.
        prompt, completion: the keys of the user's message and of the answer.
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

    def parameters(self) -> list[Any]:
        """Return the template and the keys."""
        return [1, self.template, *self.columns]

    def document(self, row: Row) -> Document:
        """Return the conversation's turns, or Skip when it has no answer."""
        messages = list(self._messages(row))
        while messages and not (messages[-1][0] == "assistant" and messages[-1][1].strip()):
            messages.pop()
        if not messages:
            return Skip("no answer")
        return tuple(turn for turn in TEMPLATES[self.template].render(messages) if turn.text)

    def _messages(self, row: Row) -> Iterator[Message]:
        roles = ("user", "assistant") if len(self.columns) == 2 else ("user",)
        names = ("dataset.prompt", "dataset.completion") if len(self.columns) == 2 else ("dataset.messages",)
        for key, role, name in zip(self.columns, roles, names, strict=True):
            value = value_of(row, key, name)
            if isinstance(value, str) and len(roles) == 2:
                yield role, repaired(value)
            else:
                yield from _listed(value, key, name)


def _listed(value: Any, key: str, setting: str) -> Iterator[Message]:
    if not isinstance(value, list):
        what = show(value)[:40]
        raise BadDocument("no text", f"{key!r} is {what}, not a list of messages; give the right key in {setting}.")
    for message in value:
        yield _message(message, key, setting)


def _message(message: Any, key: str, setting: str) -> Message:
    """Parse a message {role, content} or {from, value}."""
    known = message if isinstance(message, Mapping) else {}
    role, words = known.get("role", known.get("from")), known.get("content", known.get("value"))
    if not isinstance(role, str) or not isinstance(words, str):
        what = show(message)[:60]
        raise BadDocument(
            "no text", f"{key!r} contains {what}, not {{role, content}} of text; give the right key in {setting}."
        )
    return ROLES.get(role, role), repaired(words)


def chat(reader: Reader, pick: Conversation, on_error: str = "refuse") -> Source:
    """Return the source of the conversations in rows."""
    return Rows("chat", reader, pick, on_error)


def of_files(path: str, columns: tuple[str, ...]) -> Reader:
    """Return the reader of the JSON Lines or Parquet files at `path`.

    Raises:
        ConfigError: when there are no files, or files of both kinds.
    """
    found = files.find(path, (*_LINES, *_TABLES))
    tables = [file for file in found if files.suffix(file.path) in _TABLES]
    if tables and len(tables) < len(found):
        raise ConfigError(f"dataset.path={path}: there are JSON Lines and Parquet files; select one kind with a glob.")
    return Parquet(found, columns) if tables else JsonLines(found)
