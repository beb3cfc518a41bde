"""What a source of documents is: the interface between where text comes from and how it is prepared.

A source is divided into parts, which are read independently of each other, each front to back: so several processes and
several jobs can share the work, and one that was killed begins with the next part. What comes of a part depends on the
source's content only.

Your own source is a subclass with a name, a digest and documents:

    class Poems(Source):
        name = "poems"

        def digest(self, memo=None):
            return content_digest("poems", version=1)

        def documents(self, part):
            yield "Roses are red,\\n..."

and a dataclass that builds it (see `titan.dataset.schema`), which `_target_` names in a YAML file of `dataset/` in a
folder of $TITAN_CONF; `modules=[...]` has to name its module. docs/data.md shows all of it.
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
class Part:
    """A piece of a source that is read by itself.

    Attributes:
        name: what messages call it; no two parts of a source have the same.
        bytes: about how many bytes are read for it; 0 when unknown.
        place: whatever the source needs to find it again; must survive pickling.
    """

    name: str
    bytes: int = 0
    place: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Turn:
    """A stretch of a document that is made of several.

    Attributes:
        text: its text.
        trained: whether its tokens count in the loss.
        special: whether what spells special tokens in it becomes them: of a template, never of content.
    """

    text: str
    trained: bool = True
    special: bool = False


@dataclass(frozen=True)
class Skip:
    """A document that is left out: `reason` is a word or two that the report counts, `where` tells one place."""

    reason: str
    where: str = ""


Document = str | tuple[Turn, ...] | NDArray[Any] | Skip
"""Text; turns; of a source of tokens a one-dimensional array of ids; or what was left out."""


class Source(ABC):
    """A corpus. It is pickled to the processes that read it, so it holds settings and no open files.

    Attributes:
        name: a word for it, which becomes part of a folder's name.
        vocab_size: of a source of tokens, one more than the largest id; None for a source of text.
        masked: whether some tokens don't count in the loss: whether documents may be turns.
    """

    name: str
    vocab_size: int | None = None
    masked: bool = False

    @abstractmethod
    def digest(self, memo: Path | None = None) -> str:
        """The identity of the content and of how it is divided, in hexadecimal: 16 digits or more.

        Args:
            memo: a folder to remember parts of it in; see `titan.dataset.sources.files`.
        """

    def parts(self) -> Sequence[Part]:
        """The parts, in the source's order; they depend on its content only."""
        return [Part(self.name)]

    @abstractmethod
    def documents(self, part: Part) -> Iterator[Document]:
        """The documents of a part, always in the same order.

        Raises:
            ConfigError: when the part can't be read.
        """


def content_digest(*values: Any, **more: Any) -> str:
    """A digest of plain values, for sources whose content follows from them."""
    text = json.dumps([values, more], sort_keys=True)
    return blake2b(text.encode(), digest_size=32).hexdigest()
