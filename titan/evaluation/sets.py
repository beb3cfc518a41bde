"""Validation sets from files of text: their tokens as a split that rows are read from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.evaluation.schema import ValidationSet
from titan.evaluation.texts import read_texts

ENCODE_BATCH = 64
"""Documents that are encoded together."""


@dataclass(frozen=True)
class TextSplit:
    """Tokens in memory, with the interface of `titan.dataset.shards.Split`; behind them nothing counts.

    Attributes:
        ids: int32 [tokens].
        starts: where documents begin; int64.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]

    def count_rows(self, seq_len: int) -> int:
        """Return the number of rows, the last of which may be padded."""
        return -(-(len(self.ids) - 1) // seq_len)

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return the tokens [start, start + count), padded with zeros."""
        tokens = self.ids[start : start + count]
        return np.pad(tokens, (0, count - len(tokens)))

    def read_loss_mask(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return which of the tokens [start, start + count) are no padding."""
        return np.arange(start, start + count) < len(self.ids)

    def find_document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the positions, relative to `start`, of documents that begin in [start + 1, start + count)."""
        return self.starts[(self.starts > start) & (self.starts < start + count)] - start


def read_validation_set(settings: ValidationSet, tokenizer: Tokenizer, prefix: str) -> TextSplit:
    """Return the first tokens of a file.

    Raises:
        ConfigError: when the file can't be read, or has fewer than two tokens.
    """
    ids, starts = list[int](), list[int]()
    for document in _encode_texts(read_texts(settings.path, settings.field, prefix), tokenizer):
        starts.append(len(ids))
        ids += document
        if len(ids) > settings.tokens:
            break
    if len(ids) < 2:
        raise ConfigError(f"{prefix}.path={settings.path}: has fewer than two tokens; give a longer file.")
    return TextSplit(np.array(ids[: settings.tokens + 1], dtype=np.int32), np.array(starts, dtype=np.int64))


def _encode_texts(texts: Iterable[str], tokenizer: Tokenizer) -> Iterable[list[int]]:
    texts = iter(texts)
    while batch := list(islice(texts, ENCODE_BATCH)):
        yield from map(tokenizer.add_bos_eos, tokenizer.encode_batch(batch))
