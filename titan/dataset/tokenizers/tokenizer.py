"""The interface of a tokenizer: text to ids and back, with the framing of documents.

Text that spells a special token is ordinary text: only `encode_document` and the markup of `encode_turns` give
special tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Turn
from titan.errors import ConfigError

END = "<|end_of_text|>"


class Tokenizer(ABC):
    """What every tokenizer offers.

    Attributes:
        vocab_size: one more than the largest id, special tokens included.
        eos, bos: the ids that end and begin a document, or None.
        fingerprint: hexadecimal digest of all that decides which ids a text gets.
        name: what messages call it.
        threads: how many threads `encode_batch` uses; None: as many as there are cores. A tokenizer.json knows one or
            several only.
    """

    name: str = "tokenizer"
    threads: int | None = None
    vocab_size: int
    eos: int | None
    bos: int | None
    fingerprint: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; uses several threads, or as many as `threads` says."""

    @abstractmethod
    def encode_markup(self, text: str) -> list[int]:
        """The ids of `text`, in which what spells special tokens becomes them."""

    @abstractmethod
    def has(self, token: str) -> bool:
        """Whether there is a special token of this name."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Write what it consists of into `folder`, and return the name there by which `load_tokenizer` reads it.

        The name of a built-in tokenizer is its own, and nothing is written.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for, with U+FFFD where they are no UTF-8.

        Raises:
            ConfigError: when there is no such id.
        """

    @abstractmethod
    def token_bytes(self) -> NDArray[np.uint16]:
        """How many bytes of UTF-8 each id stands for, 0 for special tokens: [vocab_size]."""

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """As `encode_batch`, as arrays."""
        return [np.frombuffer(array("I", ids), np.uint32) for ids in self.encode_batch(texts)]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_document(self, text: str) -> list[int]:
        """The ids of `text` between those that begin and end a document, where there are such."""
        return self.framed(self.encode(text))

    def framed(self, ids: list[int]) -> list[int]:
        """`ids` as a document: `bos` before and `eos` after, where there are such."""
        return [*([] if self.bos is None else [self.bos]), *ids, *([] if self.eos is None else [self.eos])]

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        """The ids of a document made of turns, and of each whether it counts in the loss.

        The document is framed as `framed` does it, except by tokens that the turns bring; the eos added counts.
        """
        ids, trained = list[int](), list[bool]()
        for turn in turns:
            new = self.encode_markup(turn.text) if turn.special else self.encode(turn.text)
            ids += new
            trained += [turn.trained] * len(new)
        if self.bos is not None and ids[:1] != [self.bos]:
            ids, trained = [self.bos, *ids], [False, *trained]
        if self.eos is not None and ids[-1:] != [self.eos]:
            ids, trained = [*ids, self.eos], [*trained, True]
        return ids, trained

    def notes(self) -> list[str]:
        """Lines for the report: how documents end and begin, and a warning of what is unusual."""
        begin = "without a token" if self.bos is None else f"with {self.decode([self.bos])}"
        end = "without a token" if self.eos is None else f"with {self.decode([self.eos])}"
        lines = [f"{self.name}: {self.vocab_size:,} ids; documents end {end}, begin {begin}"]
        if self.eos is None:
            lines.append(f"warning: {self.name} has no token that ends a document: documents run into each other")
        gaps = self._gaps()
        if gaps:
            lines.append(f"warning: {self.name}: {len(gaps):,} ids stand for nothing, the first {gaps[0]}")
        return lines

    def _gaps(self) -> list[int]:
        """The ids below `vocab_size` that stand for nothing."""
        return []

    def _check(self, ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ConfigError(f"token {i}: the tokenizer has ids 0 to {self.vocab_size - 1}; use its own ids.")
        return ids


def read(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        ConfigError: when it can't be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset.tokenizer={path}: can't be read ({error.strerror}); make it readable.") from error
