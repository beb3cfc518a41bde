"""The interface of a tokenizer: text to ids and back, with the framing of documents.

Text that spells a special token is ordinary text: only `encode_document` and the markup of `encode_turns` give
special tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Turn
from titan.errors import ConfigError

END_OF_TEXT = "<|end_of_text|>"


class Tokenizer(ABC):
    """A tokenizer.

    Attributes:
        name: its name in messages.
        threads: number of threads of `encode_batch`; None: one per core. A tokenizer.json uses one thread or all.
        vocab_size: one more than the largest id, special tokens included.
        eos: the id that ends a document, or None.
        bos: the id that begins a document, or None.
        fingerprint: hexadecimal digest of everything that determines the ids of a text.
    """

    name: str = "tokenizer"
    threads: int | None = None
    vocab_size: int
    eos: int | None
    bos: int | None
    fingerprint: str

    @abstractmethod
    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as an array, without special tokens, using `threads` threads."""

    @abstractmethod
    def encode_markup(self, text: str) -> list[int]:
        """Return the ids of `text`; names of special tokens in it become special tokens."""

    @abstractmethod
    def has_special(self, token: str) -> bool:
        """Return whether there is a special token of this name."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Write its files into `folder`, and return the file's name there for `load_tokenizer`.

        For a built-in tokenizer nothing is written and its own name is returned.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are not UTF-8."""

    @abstractmethod
    def count_token_bytes(self) -> NDArray[np.uint16]:
        """Return the number of bytes of UTF-8 of each id, 0 for special tokens: uint16 [vocab_size]."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as a list; see `encode_arrays`."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of `text` with bos and eos, if the tokenizer has them."""
        return self.add_bos_eos(self.encode(text))

    def add_bos_eos(self, ids: list[int]) -> list[int]:
        """Return `ids` with bos and eos added, if the tokenizer has them."""
        return [*([] if self.bos is None else [self.bos]), *ids, *([] if self.eos is None else [self.eos])]

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        """Return the ids of a document made of turns, and for each whether it counts in the loss.

        bos and eos are added as in `add_bos_eos`, unless the turns have them; an added eos counts.
        """
        ids, trained = list[int](), list[bool]()
        for turn in turns:
            turn_ids = self.encode_markup(turn.text) if turn.special else self.encode(turn.text)
            ids += turn_ids
            trained += [turn.trained] * len(turn_ids)
        if self.bos is not None and ids[:1] != [self.bos]:
            ids, trained = [self.bos, *ids], [False, *trained]
        if self.eos is not None and ids[-1:] != [self.eos]:
            ids, trained = [*ids, self.eos], [*trained, True]
        return ids, trained

    def notes(self) -> list[str]:
        """Return lines for the report: how documents begin and end, and warnings."""
        begin = "without a token" if self.bos is None else f"with {self.decode([self.bos])}"
        end = "without a token" if self.eos is None else f"with {self.decode([self.eos])}"
        lines = [f"{self.name}: {self.vocab_size:,} ids; documents end {end}, begin {begin}"]
        if self.eos is None:
            lines.append(f"warning: {self.name} has no end-of-document token: documents are not separated")
        unused = self._list_unused_ids()
        if unused:
            lines.append(f"warning: {self.name}: {len(unused):,} ids are unused, the first is {unused[0]}")
        return lines

    def _list_unused_ids(self) -> list[int]:
        """Return the unused ids below `vocab_size`."""
        return []

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ConfigError(f"token {i}: the tokenizer has ids 0 to {self.vocab_size - 1}; give one of these.")
        return ids
