"""What attention gets once per micro-batch: masks for full attention and for attention in chunks, and the tokens.

In chunked attention a token attends to earlier tokens of its chunk only: a document's tokens at positions
[n * chunk, (n + 1) * chunk). So a chunk is masked like a document, by an id of document and chunk together, and two
masks serve all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNKS = 2**20
"""Ids of chunks are below it; those of documents are multiplied by it."""


class Masks(NamedTuple):
    """The masks of full and of chunked attention; the same object where no row is longer than a chunk."""

    full: Any
    chunked: Any


class DocumentTokens(NamedTuple):
    """Tokens of rows: document ids [1 or B, T] and positions [1 or B, T], both int64."""

    document_ids: Tensor
    positions: Tensor


class CoreInputs(NamedTuple):
    """What the attention of a block gets where a block of the model has an attention of one's own.

    The mask is that of titan's attention, None where no block has it.
    """

    mask: Any
    queries: DocumentTokens
    keys: DocumentTokens

    def find_visible(self) -> Tensor:
        """Return which keys each query may attend to, bool [1 or B, 1, T, S]: of its document, not after it."""
        (ids, positions), (key_ids, key_positions) = self.queries, self.keys
        is_same_document = ids[..., None] == key_ids[..., None, :]
        return (is_same_document & (positions[..., None] >= key_positions[..., None, :]))[:, None]


def number_documents(document_ids: Tensor | None, positions: Tensor) -> DocumentTokens:
    """Return the tokens of rows; without document ids, rows of one document."""
    return DocumentTokens(torch.zeros_like(positions) if document_ids is None else document_ids, positions)


def add_tokens(mask: Any, queries: DocumentTokens, keys: DocumentTokens, chunk: int | None = None) -> Any:
    """Return a mask with the tokens that it is for.

    With `chunk` it is `Masks` or None, and `Masks` are returned, for the second of which chunks of so many tokens are
    documents.
    """
    if chunk is None:
        return CoreInputs(mask, queries, keys)
    full, chunked = mask if mask is not None else (None, None)
    split = (DocumentTokens(chunk_ids(*side, chunk), side.positions) for side in (queries, keys))
    return Masks(CoreInputs(full, queries, keys), CoreInputs(chunked, *split))


def select_mask(inputs: Any) -> Any:
    """Return the mask of titan's attention."""
    return inputs.mask if isinstance(inputs, CoreInputs) else inputs


def build_masks(
    make_for_ids: Callable[[Tensor | None], Any],
    document_ids: Tensor | None,
    positions: Tensor,
    length: int,
    chunk: int | None,
) -> Any:
    """Return the mask of a micro-batch, or its `Masks`.

    Args:
        make_for_ids: returns the mask for ids, int64 [1 or B, T]; tokens attend only to earlier ones of the same id.
        document_ids: int64 [B, T]; None: one document per row, and all rows have the positions of the first.
        positions: in the document, int64 [1 or B, T].
        length: tokens of whole rows, of which T may be a part.
        chunk: tokens of a chunk; None: no block has chunked attention, and the result is the mask itself.
    """
    full = make_for_ids(document_ids)
    if chunk is None:
        return full
    return Masks(full, full if length <= chunk else make_for_ids(chunk_ids(document_ids, positions, chunk)))


def chunk_ids(document_ids: Tensor | None, positions: Tensor, chunk: int) -> Tensor:
    """Return ids that differ between chunks, int64 [1 or B, T]; see `build_masks` for the arguments."""
    if document_ids is None:
        return positions[:1] // chunk
    return document_ids * CHUNKS + positions // chunk
