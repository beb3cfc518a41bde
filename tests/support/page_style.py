"""Colours of pages in their light and dark themes, and where the text of drawings lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations

from titan.metrics.svg import LETTER
from titan.report.render.document import read_file

Lab = tuple[float, float, float]
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", re.S)


def read_themes(*names: str) -> dict[str, dict[str, str]]:
    """The colours by variable name, of the light and the dark theme of style sheets."""
    css = "\n".join(map(read_file, names))
    light, dark = DARK.sub("", css), "\n".join(DARK.findall(css))
    return {"light": _read_colours(light), "dark": _read_colours(light) | _read_colours(dark)}


def _read_colours(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css))


def compute_contrast(colour: str, other: str) -> float:
    """The contrast of WCAG 2: from 1 to 21."""
    low, high = sorted((_compute_luminance(colour), _compute_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _to_linear(colour: str) -> list[float]:
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _compute_luminance(colour: str) -> float:
    red, green, blue = _to_linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def find_least_difference(colours: dict[str, str]) -> tuple[float, str, str]:
    """The smallest distance of two colours in CIELAB, in which 2 is just visible, with their names."""
    return min((_compute_distance(colours[a], colours[b]), a, b) for a, b in combinations(colours, 2))


def _compute_distance(colour: str, other: str) -> float:
    pairs = zip(_to_lab(colour), _to_lab(other), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def _to_lab(colour: str) -> Lab:
    red, green, blue = _to_linear(colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (_compress(part) for part in (x, _compute_luminance(colour), z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _compress(part: float) -> float:
    return float(part ** (1 / 3)) if part > 0.008856 else 7.787 * part + 16 / 116


@dataclass(frozen=True)
class Text:
    """A line of text of a drawing: where it begins and ends, its base line, and its words."""

    left: float
    right: float
    y: float
    words: str


@dataclass(frozen=True)
class Drawing:
    """A drawing's size and its lines of text."""

    width: float
    height: float
    texts: tuple[Text, ...]

    def list_cut_texts(self) -> list[str]:
        """The lines that leave the drawing."""
        return [
            text.words
            for text in self.texts
            if text.left < -2 or text.right > self.width + 2 or not 8 < text.y < self.height
        ]

    def list_overlaps(self) -> list[tuple[str, str]]:
        """The lines that cover each other on one base line."""
        return [
            (a.words, b.words)
            for a, b in combinations(self.texts, 2)
            if abs(a.y - b.y) < 6 and a.left < b.right - 1 and b.left < a.right - 1
        ]


def list_drawings(page: str) -> list[Drawing]:
    """The charts of a page."""
    return [
        Drawing(float(width), float(height), tuple(_list_texts(body)))
        for width, height, body in re.findall(
            r'<svg class="chart" viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*?)</svg>', page, re.S
        )
    ]


def _list_texts(body: str) -> list[Text]:
    pattern = r'<text(?: class="\w+")? x="([-\d.]+)" y="([-\d.]+)" text-anchor="(\w+)">([^<]*)<'
    texts = []
    for x, y, anchor, words in re.findall(pattern, body):
        width = 0.9 * LETTER * len(re.sub(r"&\w+;", "x", words))  # a letter of the usual fonts is a little narrower
        left = float(x) - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        texts.append(Text(left, left + width, float(y), words))
    return texts
