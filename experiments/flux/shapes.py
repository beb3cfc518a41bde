"""Synthetic images with captions as a source of ids: one document is one image, and one row of training.

A document has the ids of the caption's words, then the values of the image: rows from the top, pixels from the left,
red, green and blue, each from 0 to 255. All documents have the same length, so that rows of that length are whole
documents. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.flux.captions import COLOURS, SHAPES, SIZES, encode_caption
from titan.config.settings import setting
from titan.dataset.documents import Document, Source, SourcePart, content_digest
from titan.dataset.schema import Dataset
from titan.errors import ConfigError

VALUES = 256
"""Values of a colour channel; also the ids of the source."""
CHANNELS = 3
PART_IMAGES = 1024
"""Images that one process makes at a time."""
VERSION = 1
"""Of the images: another one makes others."""


def describe_rows(text_tokens: int, height: int, width: int, channels: int, levels: int) -> str:
    """Return what a row consists of, as model and dataset state it; `levels` are scaled to the same interval."""
    return f"{text_tokens} words and images of {height} x {width} x {channels} values of {levels} levels"


class ShapesSource(Source):
    """Images of one shape on a plain background."""

    name = "shapes"
    vocab_size = VALUES

    def __init__(self, images: int, height: int, width: int, text_tokens: int, seed: int) -> None:
        """Make so many images of a size, with captions of at most `text_tokens` words."""
        self.images, self.height, self.width, self.text_tokens, self.seed = images, height, width, text_tokens, seed

    def digest(self, memo: Path | None = None) -> str:
        """Return the digest of the settings, which determine the images."""
        return content_digest("shapes", VERSION, self.images, self.height, self.width, self.text_tokens, self.seed)

    def parts(self) -> list[SourcePart]:
        """Return consecutive images, as many as one process makes at a time."""
        size = (self.text_tokens + self.height * self.width * CHANNELS) * PART_IMAGES
        firsts = range(0, self.images, PART_IMAGES)
        return [SourcePart(f"shapes-{first}", size, (first,)) for first in firsts]

    def documents(self, part: SourcePart) -> Iterator[Document]:
        """Yield the images of a part, each a function of the seed and its number."""
        (first,) = part.location
        for number in range(first, min(self.images, first + PART_IMAGES)):
            picture = draw_picture(self.seed, number)
            ids = encode_caption(picture.caption, self.text_tokens, "dataset.text_tokens: the caption")
            yield np.concatenate([np.array(ids), render(picture, self.height, self.width).reshape(-1)])


@dataclass(frozen=True)
class Picture:
    """What an image shows.

    Attributes:
        shape: of `SHAPES`.
        size: of `SIZES`.
        colour: of the shape.
        background: another colour.
        centre: of the shape, from 0 (top, left) to 1.
        is_short: whether the caption leaves the size out.
    """

    shape: str
    size: str
    colour: str
    background: str
    centre: tuple[float, float]
    is_short: bool

    @property
    def caption(self) -> str:
        """The image in words."""
        size = [] if self.is_short else [self.size]
        return " ".join(["a", *size, self.colour, self.shape, "on", self.background])


def draw_picture(seed: int, number: int) -> Picture:
    """Return the image of a number, from raw bits: numpy's distributions may change between versions."""
    bits = np.random.Philox(key=seed, counter=[0, 0, 0, number]).random_raw(8)
    share = (bits >> np.uint64(11)) / 2.0**53
    colours, sizes = list(COLOURS), list(SIZES)
    colour = int(share[2] * len(colours))
    background = (colour + 1 + int(share[3] * (len(colours) - 1))) % len(colours)
    return Picture(
        SHAPES[int(share[0] * len(SHAPES))],
        sizes[int(share[1] * len(sizes))],
        colours[colour],
        colours[background],
        (0.35 + 0.3 * float(share[4]), 0.35 + 0.3 * float(share[5])),
        bool(share[6] < 0.25),
    )


def render(picture: Picture, height: int, width: int) -> NDArray[Any]:
    """Return the image, uint8 [height, width, 3]."""
    unit = min(height, width)
    y = (np.arange(height)[:, None] + 0.5 - picture.centre[0] * height) / unit
    x = (np.arange(width)[None, :] + 0.5 - picture.centre[1] * width) / unit
    inside = _find_inside(picture.shape, x, y, SIZES[picture.size])
    image = np.empty((height, width, CHANNELS), dtype=np.uint8)
    image[:] = COLOURS[picture.background]
    image[inside] = COLOURS[picture.colour]
    return image


def _find_inside(shape: str, x: NDArray[Any], y: NDArray[Any], radius: float) -> NDArray[np.bool_]:
    """Return which points are inside of a shape, bool [height, width]."""
    if shape == "circle":
        inside = x**2 + y**2 < radius**2
    elif shape == "square":
        inside = np.maximum(abs(x), abs(y)) < 0.85 * radius
    elif shape == "triangle":
        inside = (abs(y) < 0.85 * radius) & (2 * abs(x) < y + 0.85 * radius)
    else:
        inside = (np.minimum(abs(x), abs(y)) < 0.3 * radius) & (np.maximum(abs(x), abs(y)) < radius)
    return np.asarray(inside, dtype=np.bool_)


@dataclass(frozen=True, kw_only=True)
class Shapes(Dataset):
    """Coloured shapes with captions, made by the experiment itself."""

    images: int = setting(8192, "number of images", at_least=2, cap=10**9)
    height: int = setting(16, "pixels from top to bottom", at_least=4, cap=4096)
    width: int = setting(16, "pixels from left to right", at_least=4, cap=4096)
    text_tokens: int = setting(8, "words of a caption; shorter ones are filled up", at_least=1, cap=4096)
    seed: int = setting(0, "seed of the images", at_least=0, below=2**63)

    @property
    def row_format(self) -> str:
        """What the ids of a document mean."""
        return describe_rows(self.text_tokens, self.height, self.width, CHANNELS, VALUES)

    def build(self) -> Source:
        """Return the images."""
        return ShapesSource(self.images, self.height, self.width, self.text_tokens, self.seed)

    def check(self, prefix: str = "dataset") -> None:
        """Raise ConfigError for captions that are longer than a row's text."""
        super().check(prefix)
        longest = len(Picture("circle", "small", "red", "blue", (0.5, 0.5), False).caption.split())
        if self.text_tokens < longest:
            raise ConfigError(
                f"{prefix}.text_tokens={self.text_tokens}: captions have up to {longest} words; give at least "
                f"{longest}."
            )
