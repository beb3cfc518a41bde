"""A comparison in the terminal: the table of variants, the answers in words, failures with reasons, and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from titan.report import ranking
from titan.report.findings import Comparison
from titan.report.render import predicted
from titan.report.render.sentences import answers, lead, missing, notes, question
from titan.report.render.table_data import Cell, Column, Mood, columns

GAP = "  "
NARROWEST = 20
"""The fewest columns for labels of variants, if they need them."""
VALUES = 12
"""The most values listed of a setting that differs."""
STYLES: dict[str, str] = {"head": "1", "good": "32", "bad": "31", "open": "33", "faint": "2"}


def text(comparison: Comparison, width: int, colour: bool = False) -> str:
    """Return the whole comparison as lines of at most `width` columns, where words allow it.

    Args:
        comparison: what was found.
        width: of the terminal; at least 20 are taken.
        colour: whether escape sequences for colours may be used.
    """
    width = max(20, width)
    parts = [
        _head(comparison, width, colour),
        _variants(comparison, width, colour),
        _predictions(comparison, width, colour),
        _answers(comparison, width, colour),
        _failed(comparison, width, colour),
        _list("Notes", notes(comparison), width, colour),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _head(comparison: Comparison, width: int, colour: bool) -> list[str]:
    common = "; ".join(f"{name}: {value}" for name, value in comparison.common.items())
    differs = "; ".join(f"{name} ({_some(values)})" for name, values in comparison.differs.items())
    return [
        *(_style(line, "head", colour) for line in _wrapped(comparison.title, width)),
        *_wrapped(question(comparison), width),
        *_wrapped(" ".join(lead(comparison)), width),
        *([""] if common or differs else []),
        *(_wrapped(f"Common: {common}", width, "  ") if common else []),
        *(_wrapped(f"Differs: {differs}", width, "  ") if differs else []),
    ]


def _some(values: Sequence[str]) -> str:
    """Return the first values in one line, and how many more there are."""
    more = [f"and {len(values) - VALUES:,} more"] if len(values) > VALUES else []
    return ", ".join([*values[:VALUES], *more])


def _variants(comparison: Comparison, width: int, colour: bool) -> list[str]:
    """Return the table, the best first."""
    labels = [variant.label for variant in comparison.variants]
    return _table(labels, columns(comparison), ranking.order(comparison.variants), width, colour)


def _predictions(comparison: Comparison, width: int, colour: bool) -> list[str]:
    """Return the table of predicted and measured values; empty where no run has a prediction."""
    indices = predicted.variants(comparison)
    labels = [comparison.variants[i].label for i in indices]
    table = _table(labels, predicted.columns(comparison), range(len(labels)), width, colour)
    summary = _wrapped(predicted.summary(comparison), width) if predicted.summary(comparison) else []
    return [_style(predicted.TITLE, "head", colour), *table, *summary] if table else []


def _table(labels: Sequence[str], shown: Sequence[Column], order: Sequence[int], width: int, colour: bool) -> list[str]:
    """Return a table in `order`: one line each, else intervals below, else fewer columns, else blocks."""
    if not labels:
        return []
    if _fits(labels, shown, width, stacked=False):
        return _grid(labels, shown, order, width, False, colour)
    kept = _kept(labels, shown, width)
    if not _fits(labels, kept, width, stacked=True):
        return _blocks(labels, shown, order, width, colour)
    left_out = ", ".join(dict.fromkeys(column.name for column in shown if column not in kept))
    note = _wrapped(f"Columns left out, as the terminal is too narrow: {left_out}.", width) if left_out else []
    return [*_grid(labels, kept, order, width, True, colour), *note]


def _kept(labels: Sequence[str], shown: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns without the heaviest ones, as far as needed."""
    kept = list(shown)
    while not _fits(labels, kept, width, stacked=True) and any(column.weight for column in kept):
        kept.remove(max(kept, key=lambda column: column.weight))
    return tuple(kept)


def _fits(labels: Sequence[str], shown: Sequence[Column], width: int, stacked: bool) -> bool:
    return _room(shown, width, stacked) >= min(NARROWEST, _longest([*labels, "variant"]))


def _room(shown: Sequence[Column], width: int, stacked: bool) -> int:
    """Return the width left for labels."""
    return width - sum(len(GAP) + _width(column, stacked) for column in shown)


def _width(column: Column, stacked: bool) -> int:
    return max(_longest([column.name, column.unit]), *(_longest(_lines(cell, stacked)) for cell in column.cells))


def _lines(cell: Cell, stacked: bool) -> list[str]:
    return [cell.main, *([cell.detail] if cell.detail else [])] if stacked else [cell.line()]


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _grid(
    labels: Sequence[str], shown: Sequence[Column], order: Sequence[int], width: int, stacked: bool, colour: bool
) -> list[str]:
    room = min(_room(shown, width, stacked), _longest([*labels, "variant"]))
    widths = [_width(column, stacked) for column in shown]
    heads = [[column.name, column.unit] for column in shown]
    lines = [_style(line, "head", colour) for line in _row(["variant"], heads, room, widths)]
    for i in order:
        label = labels[i]
        cells = [_lines(column.cells[i], stacked) for column in shown]
        lines += _row(_wrapped(label, room), cells, room, widths, [column.cells[i].mood for column in shown], colour)
    return lines


def _row(
    label: Sequence[str],
    cells: Sequence[Sequence[str]],
    room: int,
    widths: Sequence[int],
    moods: Sequence[Mood] = (),
    colour: bool = False,
) -> list[str]:
    """Return as many lines as the tallest cell needs; labels are aligned left, numbers right."""
    lines = []
    for k in range(max(len(label), *map(len, cells), 1)):
        figures = [f"{_at(cell, k):>{wide}}" for cell, wide in zip(cells, widths, strict=True)]
        line = GAP.join([f"{_at(label, k):<{room}}", *figures]).rstrip()
        figures = [_mood(text, mood, colour) for text, mood in zip(figures, moods or [""] * len(cells), strict=True)]
        lines += [GAP.join([f"{_at(label, k):<{room}}", *figures]).rstrip()] if line else []
    return lines


def _mood(text: str, mood: str, colour: bool) -> str:
    """Return the text in the colour of its mood, without colouring leading blanks."""
    word = text.strip()
    return text.replace(word, _style(word, mood, colour)) if word and mood else text


def _at(lines: Sequence[str], k: int) -> str:
    return lines[k] if k < len(lines) else ""


def _blocks(
    labels: Sequence[str], shown: Sequence[Column], order: Sequence[int], width: int, colour: bool
) -> list[str]:
    lines: list[str] = []
    for i in order:
        lines += [_style(part, "head", colour) for part in _wrapped(labels[i], width)]
        for column in shown:
            if column.cells[i].main:
                lines += _wrapped(f"  {' '.join(_heading(column))}: {column.cells[i].line()}", width, "    ")
    return lines


def _heading(column: Column) -> list[str]:
    return [part for part in (column.name, column.unit) if part]


def _answers(comparison: Comparison, width: int, colour: bool) -> list[str]:
    items = [(variant.label, " ".join(note)) for variant, note in answers(comparison)]
    return _list("Answers", [f"{label}: {note}" for label, note in items], width, colour)


def _failed(comparison: Comparison, width: int, colour: bool) -> list[str]:
    items = [f"{failed.label} ({failed.directory}): {failed.state}: {failed.reason}" for failed in comparison.failed]
    return _list(missing(comparison), items, width, colour)


def _list(name: str, items: Sequence[str], width: int, colour: bool) -> list[str]:
    if not items:
        return []
    wrapped = (_wrapped(f"- {' '.join(item.split())}", width, "  ") for item in items)
    return [_style(name, "head", colour), *(line for lines in wrapped for line in lines)]


def _wrapped(line: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _style(line: str, style: str, colour: bool) -> str:
    return f"\x1b[{STYLES[style]}m{line}\x1b[0m" if colour and line else line
