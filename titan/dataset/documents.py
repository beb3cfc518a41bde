"""The interface of a source of documents: what the preparation reads, wherever the text comes from.

A source is divided into parts, which are read independently of each other, each from its beginning: several processes
and several jobs share the work, and a killed job restarts without the finished ones. The documents of a part depend on
the source's content only.

Your own source is a subclass with a name, a digest and documents:

    class Poems(Source):
        name = "poems"

        def digest(self, memo=None):
            return content_digest("poems", version=1)

        def documents(self, part):
            yield "Roses are red,\\n..."

and a dataclass that builds it (see `titan.dataset.schema`), which `_target_` names in a YAML file of `dataset/` in a
folder of $TITAN_CONF; `modules=[...]` must name its module. docs/data.md has a complete example.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class SourcePart:
    """A piece of a source that is read independently.

    Attributes:
        name: unique in the source; used in messages.
        bytes: the approximate number of bytes to read; 0 when unknown.
        location: what the source needs to find the part again; must be picklable.
    """

    name: str
    bytes: int = 0
    location: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Turn:
    """A segment of a document, such as a message of a chat.

    Attributes:
        text: its text.
        trained: whether its tokens count in the loss.
        special: whether the names of special tokens are encoded as special tokens: for a template's markup only.
    """

    text: str
    trained: bool = True
    special: bool = False


@dataclass(frozen=True)
class Skip:
    """A skipped document: the report counts them by `reason` and shows the first `location`."""

    reason: str
    location: str = ""


Document = str | tuple[Turn, ...] | NDArray[Any] | Skip
"""Text; turns; for a source of tokens a one-dimensional array of ids; or a skipped document."""


class Source(ABC):
    """A corpus. It is pickled for the processes that read it, so it holds settings and no open files.

    Attributes:
        name: part of the prepared folder's name.
        vocab_size: for a source of tokens, one more than the largest id; None for a source of text.
        masked: whether documents may be turns, some of which don't count in the loss.
    """

    name: str
    vocab_size: int | None = None
    masked: bool = False

    @abstractmethod
    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the content and its division into parts, in hexadecimal: 16 digits or more.

        Args:
            memo: a folder in which to cache digests of files; see `titan.dataset.sources.files`.
        """

    def parts(self) -> Sequence[SourcePart]:
        """Return the parts in the source's order; they depend on its content only."""
        return [SourcePart(self.name)]

    @abstractmethod
    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the documents of a part, always in the same order.

        Raises:
            ConfigError: when the part can't be read.
        """


def content_digest(*values: Any, **named_values: Any) -> str:
    """Return a digest of plain values, for sources whose content is determined by them."""
    text = json.dumps([values, named_values], sort_keys=True)
    return blake2b(text.encode(), digest_size=32).hexdigest()
