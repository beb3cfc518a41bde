"""A comparison in the terminal: the table of variants, the answers in words, failures with reasons, and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from titan.report import rank
from titan.report.findings import Comparison
from titan.report.render import predicted
from titan.report.render.sentences import (
    COMMANDS_TITLE,
    format_answers,
    format_lead,
    format_missing_heading,
    format_notes,
    list_commands,
)
from titan.report.render.table_data import Cell, Column, Mood, build_columns

GAP = "  "
NARROWEST = 20
"""The fewest columns for labels of variants, if they need them."""
VALUES = 12
"""The most values listed of a setting that differs."""
STYLES: dict[str, str] = {"head": "1", "good": "32", "bad": "31", "open": "33", "faint": "2"}


def format_report(comparison: Comparison, width: int, colour: bool = False) -> str:
    """Return the whole comparison as lines of at most `width` columns, where words allow it; a command is one line.

    Args:
        width: of the terminal; at least 20 are taken.
    """
    width = max(20, width)
    parts = [
        _format_head(comparison, width, colour),
        _format_variants(comparison, width, colour),
        _format_predictions(comparison, width, colour),
        _format_answers(comparison, width, colour),
        _format_commands(comparison, width, colour),
        _format_failed(comparison, width, colour),
        _format_list("Notes", format_notes(comparison), width, colour),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _format_head(comparison: Comparison, width: int, colour: bool) -> list[str]:
    common = "; ".join(f"{name}: {value}" for name, value in comparison.common.items())
    differs = "; ".join(f"{name} ({_format_values(values)})" for name, values in comparison.differs.items())
    return [
        *(_apply_style(line, "head", colour) for line in _wrap_line(comparison.title, width)),
        *(_wrap_line(comparison.question, width) if comparison.question else []),
        *_wrap_line(" ".join(format_lead(comparison)), width),
        *([""] if common or differs else []),
        *(_wrap_line(f"Common: {common}", width, "  ") if common else []),
        *(_wrap_line(f"Differs: {differs}", width, "  ") if differs else []),
    ]


def _format_values(values: Sequence[str]) -> str:
    """Return the first values in one line, and how many more there are."""
    remainder = [f"and {len(values) - VALUES:,} more"] if len(values) > VALUES else []
    return ", ".join([*values[:VALUES], *remainder])


def _format_variants(comparison: Comparison, width: int, colour: bool) -> list[str]:
    """Return the table, the best first."""
    labels = [variant.label for variant in comparison.variants]
    return _format_table(labels, build_columns(comparison), rank.rank_variants(comparison.variants), width, colour)


def _format_predictions(comparison: Comparison, width: int, colour: bool) -> list[str]:
    """Return the table of predicted and measured values; empty where no run has a prediction."""
    indices = predicted.list_variants(comparison)
    labels = [comparison.variants[i].label for i in indices]
    table = _format_table(labels, predicted.build_columns(comparison), range(len(labels)), width, colour)
    summary = (
        _wrap_line(predicted.summarize_intervals(comparison), width)
        if predicted.summarize_intervals(comparison)
        else []
    )
    return [_apply_style(predicted.TITLE, "head", colour), *table, *summary] if table else []


def _format_table(
    labels: Sequence[str], visible_columns: Sequence[Column], order: Sequence[int], width: int, colour: bool
) -> list[str]:
    """Return a table in `order`: one line each, else intervals below, else fewer columns, else blocks."""
    if not labels:
        return []
    if _fits(labels, visible_columns, width, stacked=False):
        return _format_grid(labels, visible_columns, order, width, False, colour)
    kept_columns = _drop_heavy_columns(labels, visible_columns, width)
    if not _fits(labels, kept_columns, width, stacked=True):
        return _format_blocks(labels, visible_columns, order, width, colour)
    left_out = ", ".join(dict.fromkeys(column.name for column in visible_columns if column not in kept_columns))
    note = _wrap_line(f"Columns left out, as the terminal is too narrow: {left_out}.", width) if left_out else []
    return [*_format_grid(labels, kept_columns, order, width, True, colour), *note]


def _drop_heavy_columns(labels: Sequence[str], visible_columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns without the heaviest ones, as far as needed."""
    kept_columns = list(visible_columns)
    while not _fits(labels, kept_columns, width, stacked=True) and any(column.weight for column in kept_columns):
        kept_columns.remove(max(kept_columns, key=lambda column: column.weight))
    return tuple(kept_columns)


def _fits(labels: Sequence[str], visible_columns: Sequence[Column], width: int, stacked: bool) -> bool:
    return _compute_label_width(visible_columns, width, stacked) >= min(NARROWEST, _find_longest([*labels, "variant"]))


def _compute_label_width(visible_columns: Sequence[Column], width: int, stacked: bool) -> int:
    """Return the width left for labels."""
    return width - sum(len(GAP) + _compute_width(column, stacked) for column in visible_columns)


def _compute_width(column: Column, stacked: bool) -> int:
    return max(
        _find_longest([column.name, column.unit]), *(_find_longest(_split_cell(cell, stacked)) for cell in column.cells)
    )


def _split_cell(cell: Cell, stacked: bool) -> list[str]:
    return [cell.main, *([cell.detail] if cell.detail else [])] if stacked else [cell.format_line()]


def _find_longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _format_grid(
    labels: Sequence[str],
    visible_columns: Sequence[Column],
    order: Sequence[int],
    width: int,
    stacked: bool,
    colour: bool,
) -> list[str]:
    label_width = min(_compute_label_width(visible_columns, width, stacked), _find_longest([*labels, "variant"]))
    widths = [_compute_width(column, stacked) for column in visible_columns]
    heads = [[column.name, column.unit] for column in visible_columns]
    lines = [_apply_style(line, "head", colour) for line in _format_row(["variant"], heads, label_width, widths)]
    for i in order:
        label = labels[i]
        cells = [_split_cell(column.cells[i], stacked) for column in visible_columns]
        lines += _format_row(
            _wrap_line(label, label_width),
            cells,
            label_width,
            widths,
            [column.cells[i].mood for column in visible_columns],
            colour,
        )
    return lines


def _format_row(
    label: Sequence[str],
    cells: Sequence[Sequence[str]],
    label_width: int,
    widths: Sequence[int],
    moods: Sequence[Mood] = (),
    colour: bool = False,
) -> list[str]:
    """Return as many lines as the tallest cell needs; labels are aligned left, numbers right."""
    lines = []
    for k in range(max(len(label), *map(len, cells), 1)):
        figures = [f"{_read_line(cell, k):>{wide}}" for cell, wide in zip(cells, widths, strict=True)]
        line = GAP.join([f"{_read_line(label, k):<{label_width}}", *figures]).rstrip()
        figures = [
            _colour_mood(text, mood, colour) for text, mood in zip(figures, moods or [""] * len(cells), strict=True)
        ]
        lines += [GAP.join([f"{_read_line(label, k):<{label_width}}", *figures]).rstrip()] if line else []
    return lines


def _colour_mood(text: str, mood: str, colour: bool) -> str:
    """Return the text in the colour of its mood, without colouring leading blanks."""
    word = text.strip()
    return text.replace(word, _apply_style(word, mood, colour)) if word and mood else text


def _read_line(lines: Sequence[str], k: int) -> str:
    return lines[k] if k < len(lines) else ""


def _format_blocks(
    labels: Sequence[str], visible_columns: Sequence[Column], order: Sequence[int], width: int, colour: bool
) -> list[str]:
    lines: list[str] = []
    for i in order:
        lines += [_apply_style(part, "head", colour) for part in _wrap_line(labels[i], width)]
        for column in visible_columns:
            if column.cells[i].main:
                lines += _wrap_line(
                    f"  {' '.join(_list_heading(column))}: {column.cells[i].format_line()}", width, "    "
                )
    return lines


def _list_heading(column: Column) -> list[str]:
    return [part for part in (column.name, column.unit) if part]


def _format_answers(comparison: Comparison, width: int, colour: bool) -> list[str]:
    items = [(variant.label, " ".join(note)) for variant, note in format_answers(comparison)]
    return _format_list("Answers", [f"{label}: {note}" for label, note in items], width, colour)


def _format_commands(comparison: Comparison, width: int, colour: bool) -> list[str]:
    """Return the commands, which are not wrapped, so that they can be copied."""
    commands = list_commands(comparison)
    lines = [line for label, command in commands for line in (*_wrap_line(f"- {label}:", width, "  "), f"  {command}")]
    return [_apply_style(COMMANDS_TITLE, "head", colour), *lines] if lines else []


def _format_failed(comparison: Comparison, width: int, colour: bool) -> list[str]:
    items = [f"{failed.label} ({failed.directory}): {failed.state}: {failed.reason}" for failed in comparison.failed]
    return _format_list(format_missing_heading(comparison), items, width, colour)


def _format_list(name: str, items: Sequence[str], width: int, colour: bool) -> list[str]:
    if not items:
        return []
    wrapped = (_wrap_line(f"- {' '.join(item.split())}", width, "  ") for item in items)
    return [_apply_style(name, "head", colour), *(line for lines in wrapped for line in lines)]


def _wrap_line(line: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _apply_style(line: str, style: str, colour: bool) -> str:
    return f"\x1b[{STYLES[style]}m{line}\x1b[0m" if colour and line else line
