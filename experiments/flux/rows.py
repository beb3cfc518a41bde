"""Images that other programs have encoded, as a source of ids: one row of a NumPy file is one caption and image.

The file has an array [images, ids] of unsigned integers: the ids of the caption, filled up to `text_tokens`, then the
image's values by row, column and channel, such as latents of an autoencoder rounded to 65,536 levels. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.flux.shapes import describe_rows
from titan.config.settings import MISSING, setting
from titan.dataset.documents import Document, Source, SourcePart, content_digest
from titan.dataset.schema import Dataset
from titan.dataset.sources.files import compute_file_digest
from titan.errors import ConfigError

PART_IMAGES = 64
VERSION = 1


class RowsSource(Source):
    """The rows of a NumPy file."""

    name = "images"

    def __init__(self, path: str, ids: int, vocab_size: int) -> None:
        """Read rows of so many ids, each below `vocab_size`."""
        self.path, self.ids, self.vocab_size = path, ids, vocab_size

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the file and its division."""
        self._open()
        content = compute_file_digest(Path(self.path).absolute(), memo).hex()
        return content_digest("rows", VERSION, self.ids, self.vocab_size, content)

    def parts(self) -> list[SourcePart]:
        """Return consecutive images."""
        rows = self._open()
        size = PART_IMAGES * self.ids * rows.dtype.itemsize
        return [SourcePart(f"images-{first}", size, (first,)) for first in range(0, len(rows), PART_IMAGES)]

    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the rows of a part."""
        (first,) = part.location
        for row in self._open()[first : first + PART_IMAGES]:
            yield np.array(row, dtype=np.int64)

    def _open(self) -> NDArray[Any]:
        try:
            rows: NDArray[Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"dataset.path={self.path}: is no readable NumPy file ({error}); correct the path."
            ) from error
        if rows.ndim != 2 or rows.shape[1] != self.ids or rows.dtype.kind != "u":
            raise ConfigError(
                f"dataset.path={self.path}: has {list(rows.shape)} values of type {rows.dtype}, and rows of unsigned "
                f"integers have {self.ids} ids; give another file, or the sizes of its images."
            )
        return rows


@dataclass(frozen=True, kw_only=True)
class Rows(Dataset):
    """A NumPy file of captions and images, as ids."""

    path: str = setting(MISSING, "a .npy file: unsigned integers [images, ids of a row]", science=False)
    height: int = setting(128, "rows of the image's values", at_least=1, cap=65536)
    width: int = setting(128, "columns of the image's values", at_least=1, cap=65536)
    channels: int = setting(16, "values at a place", at_least=1, cap=4096)
    text_tokens: int = setting(512, "ids of a caption", at_least=1, cap=65536)
    levels: int = setting(65536, "values of an id", at_least=2, cap=10**6)

    @property
    def row_format(self) -> str:
        """What the ids of a row mean."""
        return describe_rows(self.text_tokens, self.height, self.width, self.channels, self.levels)

    def build(self) -> Source:
        """Return the file's rows."""
        return RowsSource(self.path, self.text_tokens + self.height * self.width * self.channels, self.levels)
