"""Captions of the synthetic images: a small vocabulary, and the ids of a caption. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan.errors import ConfigError

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "black": (20, 20, 20), "white": (235, 235, 235), "red": (215, 40, 40), "green": (40, 160, 60),
    "blue": (45, 80, 210), "yellow": (235, 205, 40), "purple": (140, 60, 175), "orange": (240, 135, 30),
}  # fmt: skip
"""Names and RGB values."""
SIZES = {"small": 0.22, "large": 0.38}
"""Names and the half width of a shape, in units of the image's shorter side."""
WORDS = ("", "a", "on", *SIZES, *COLOURS, *SHAPES)
"""A word's id is its index; 0 fills up a caption."""


def encode_caption(caption: str, length: int, setting: str = "caption") -> list[int]:
    """Return the ids of a caption, filled up with 0 to `length`.

    Raises:
        ConfigError: for an unknown word, or more than `length` words.
    """
    words = caption.split()
    for word in words:
        if word not in WORDS:
            raise ConfigError(f"{setting}={caption}: unknown word {word}; give words of {', '.join(WORDS[1:])}.")
    if len(words) > length:
        raise ConfigError(f"{setting}={caption}: has {len(words)} words; give at most {length}.")
    return [*(WORDS.index(word) for word in words), *[0] * (length - len(words))]


def decode_caption(ids: Sequence[int]) -> str:
    """Return the caption of some ids."""
    return " ".join(WORDS[i] for i in ids if i)
