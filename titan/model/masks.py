"""Masks of a micro-batch, for blocks with full attention and for blocks with attention in chunks.

In chunked attention a token attends to earlier tokens of its chunk only: a document's tokens at positions
[n * chunk, (n + 1) * chunk). So a chunk is masked like a document, by an id of document and chunk together, and two
masks serve all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

CHUNKS = 2**20
"""Ids of chunks are below it; those of documents are multiplied by it."""


class Masks(NamedTuple):
    """The masks of full and of chunked attention; the same object where no row is longer than a chunk."""

    full: Any
    chunked: Any


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
