"""A report as data, with one writer for each format: terminal, Markdown, HTML, and CSV and JSON for other programs.

A report has a title, sentences, and sections of parts: tables, items, charts. A writer leaves out the parts that its
format has no place for: a terminal shows no charts, and of lists of settings and runs only what a part says in a line.
HTML is one file that loads nothing; `page.html.jinja` lays the parts out and escapes all text, the charts are SVG that
escapes its own. It needs jinja2 (the extra `compare`).
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import importlib.resources
import io
import json
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from titan.config.output_files import write_output_file
from titan.console.text import escape
from titan.errors import RunError

Mood = Literal["", "good", "bad", "open"]
MOODS: dict[str, Mood] = {"": "", "fits": "good", "fits closely": "open", "does not fit": "bad"}
"""The mood of each verdict on memory."""
GAP = "  "
NARROWEST = 20
"""The fewest columns of a terminal for labels of rows, if they need them."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A page may load nothing, and run no script but its own, whose digest is added."""
MANY = 12
"""More items than these scroll in a box."""
NARROW_STYLES = ("page.css", "plan.css")
"""Of pages without wide tables."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?%?", re.IGNORECASE | re.ASCII)
STYLES: dict[str, str] = {"head": "1", "good": "32", "bad": "31", "open": "33"}


@dataclass(frozen=True)
class Cell:
    """A value as text, a detail such as its interval, whether it is good or bad, and a verdict on it."""

    main: str = ""
    detail: str = ""
    mood: Mood = ""
    verdict: str = ""

    def format_line(self) -> str:
        """Return value and detail in one line."""
        return f"{self.main} {self.detail}".strip()


class FigureText(NamedTuple):
    """A figure as text: its name, its value, the unit, its interval, what it is compared with, and whether it fits."""

    name: str
    value: str
    unit: str = ""
    interval: str = ""
    note: str = ""
    verdict: str = ""

    @property
    def mood(self) -> Mood:
        """Whether the verdict is good or bad."""
        return MOODS[self.verdict]

    @property
    def cell(self) -> Cell:
        """The figure in a table."""
        return Cell(" ".join(filter(None, (self.value, self.unit, self.note))), self.interval, self.mood, self.verdict)

    def format_line(self) -> str:
        """Return the figure in one line, without its name."""
        interval = f"({self.interval})" if self.interval else ""
        verdict = f", {self.verdict}" if self.mood in ("open", "bad") else ""
        return " ".join(filter(None, (self.value, self.unit, interval, self.note))) + verdict


@dataclass(frozen=True)
class Chart:
    """A chart with its heading and caption, as HTML that is escaped.

    Attributes:
        title: its heading.
        caption: the sentences below it.
        html: the chart.
        wide: whether it takes the whole width of the page.
        narrow_html: the chart for phones; empty where `html` fits all screens.
    """

    title: str
    caption: str
    html: str
    wide: bool = True
    narrow_html: str = ""


@dataclass(frozen=True)
class Column:
    """One value of all rows.

    Attributes:
        name: its heading.
        unit: the unit in the heading.
        meaning: what it is, in a few words.
        cells: of each row, in their order.
        weight: the heaviest are left out first where room is short; those of weight 0 stay.
    """

    name: str
    unit: str
    meaning: str
    cells: tuple[Cell, ...]
    weight: int = 0


class Part:
    """A part of a section; one whose first attribute is empty is not shown."""

    def __bool__(self) -> bool:
        return bool(next(iter(vars(self).values())))


@dataclass(frozen=True)
class Grid(Part):
    """Rows with a label, such as variants, by columns.

    Attributes:
        labels: of the rows.
        columns: with a cell for each row.
        marks: attributes of each row's element, as HTML, which colour and highlight it; empty: none.
        name: the heading of the labels.
        has_commands: whether labels are words of a command line.
    """

    labels: Sequence[str]
    columns: Sequence[Column]
    marks: Sequence[str] = ()
    name: str = "variant"
    has_commands: bool = False


@dataclass(frozen=True)
class Table(Part):
    """Rows under a head.

    Attributes:
        rows: text, or cells.
        head: of the columns.
        words: so many first columns are words and wrap; the others are numbers.
        line: how a terminal shows a row, with its texts by number; empty: not at all.
        summary: of a table that a reader unfolds; empty for others.
        has_commands: whether the last text of a row is a command line, below the others.
    """

    rows: Sequence[Sequence[str | Cell]]
    head: Sequence[str]
    words: int = 1
    line: str = ""
    summary: str = ""
    has_commands: bool = False


@dataclass(frozen=True)
class Item:
    """What is said of something, such as a variant: its label, the answer, sentences, and a command."""

    label: str
    text: str
    cell: Cell = Cell()
    command: str = ""
    marks: str = ""


@dataclass(frozen=True)
class Items(Part):
    """Items in a list; many scroll."""

    items: Sequence[Item]


@dataclass(frozen=True)
class Commands(Part):
    """Labels with a command each, which is not wrapped, so that it can be copied."""

    commands: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Bullets(Part):
    """Sentences in a list."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Words(Part):
    """A paragraph; `style` is that of the page: faint, code, or a command line."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Pairs(Part):
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figures(Part):
    """Charts."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Cards(Part):
    """The most important figures; `note` explains a verdict that is open."""

    cards: Sequence[FigureText]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Parts under a heading, which is shown with any of them; without a heading they continue the section before."""

    title: str
    parts: Sequence[Part]
    level: int = 2


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        title: its heading.
        lead: the result in a few sentences.
        sections: in the order of the page and of Markdown.
        question: what it answers; empty without one.
        facts: lines below the lead in a terminal, by their first word.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    question: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


# ---- terminal ----


def format_text(report: Report, width: int, colour: bool = False) -> str:
    """Return a report as lines of at most `width` columns, where words allow it; a command is one line.

    Tables come first, and the first one needs no heading.

    Args:
        width: of the terminal; at least 20 are taken.
    """
    width = max(20, width)
    head = [_apply_style(line, "head", colour) for line in _wrap_line(report.title, width)]
    head += [line for text in (report.question, report.lead) if text for line in _wrap_line(text, width)]
    facts = [_wrap_line(f"{name}: {value}", width, "  ") for name, value in report.facts.items() if value]
    blocks = [[*head, *([""] if facts else []), *(line for lines in facts for line in lines)]]
    order = sorted(report.sections, key=lambda section: not any(isinstance(part, Grid) for part in section.parts))
    for number, section in enumerate(order):
        lines = [line for part in section.parts if part for line in _format_part(part, width, colour)]
        needs_title = number > 0 or not any(isinstance(part, Grid) for part in section.parts)
        title = [_apply_style(section.title, "head", colour)] if needs_title else []
        blocks += [[*title, *lines]] if lines else []
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _format_part(part: Part, width: int, colour: bool) -> list[str]:
    """Return the lines of a part; none where a terminal does not show it."""
    match part:
        case Grid():
            return _format_grid(part, width, colour)
        case Commands():
            lines = [(*_wrap_line(f"- {label}:", width, "  "), f"  {command}") for label, command in part.commands]
            return [line for command_lines in lines for line in command_lines]
        case Words():
            return _wrap_line(part.text, width)
        case Items():
            items = [f"{item.label}: {item.text}" for item in part.items]
        case Bullets():
            items = list(part.sentences)
        case Table():
            items = [part.line.format(*row) for row in part.rows] if part.line else []
        case _:
            items = []
    return [line for item in items for line in _wrap_line(f"- {' '.join(item.split())}", width, "  ")]


def _format_grid(grid: Grid, width: int, colour: bool) -> list[str]:
    """Return a table: one line a row, else intervals below, else fewer columns, else blocks."""
    labels, kept = grid.labels, list(grid.columns)

    def fits(stacked: bool) -> bool:
        room = width - sum(len(GAP) + _compute_width(column, stacked) for column in kept)
        return room >= min(NARROWEST, _find_longest([*labels, grid.name]))

    if fits(stacked=False):
        return _format_rows(grid, kept, width, False, colour)
    while not fits(stacked=True) and any(column.weight for column in kept):
        kept.remove(max(kept, key=lambda column: column.weight))
    if not fits(stacked=True):
        return _format_blocks(grid, width, colour)
    left_out = ", ".join(dict.fromkeys(column.name for column in grid.columns if column not in kept))
    note = _wrap_line(f"Columns left out, as the terminal is too narrow: {left_out}.", width) if left_out else []
    return [*_format_rows(grid, kept, width, True, colour), *note]


def _compute_width(column: Column, stacked: bool) -> int:
    return max(map(len, (column.name, column.unit, *(line for c in column.cells for line in _split_cell(c, stacked)))))


def _split_cell(cell: Cell, stacked: bool) -> list[str]:
    return [cell.main, *([cell.detail] if cell.detail else [])] if stacked else [cell.format_line()]


def _find_longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _format_rows(grid: Grid, columns: Sequence[Column], width: int, stacked: bool, colour: bool) -> list[str]:
    """Return a head and the rows, each with as many lines as its tallest cell; labels are aligned left."""
    widths = [_compute_width(column, stacked) for column in columns]
    label_width = min(width - sum(len(GAP) + wide for wide in widths), _find_longest([*grid.labels, grid.name]))
    heads = [[column.name, column.unit] for column in columns]
    rows: list[tuple[list[str], list[list[str]], list[str]]] = [([grid.name], heads, [""] * len(columns))]
    for i, label in enumerate(grid.labels):
        cells = [column.cells[i] for column in columns]
        texts = [_split_cell(cell, stacked) for cell in cells]
        rows.append((_wrap_line(label, label_width), texts, [cell.mood for cell in cells]))
    lines = []
    for number, (words, texts, moods) in enumerate(rows):
        for k in range(max(len(words), *map(len, texts), 1)):
            figures = [f"{text[k] if k < len(text) else '':>{wide}}" for text, wide in zip(texts, widths, strict=True)]
            word = words[k] if k < len(words) else ""
            if not word and not any(map(str.strip, figures)):
                continue
            figures = [_colour_mood(text, mood, colour) for text, mood in zip(figures, moods, strict=True)]
            line = GAP.join([f"{word:<{label_width}}", *figures]).rstrip()
            lines.append(line if number else _apply_style(line, "head", colour))
    return lines


def _colour_mood(text: str, mood: str, colour: bool) -> str:
    """Return the text in the colour of its mood, without colouring leading blanks."""
    word = text.strip()
    return text.replace(word, _apply_style(word, mood, colour)) if word and mood else text


def _format_blocks(grid: Grid, width: int, colour: bool) -> list[str]:
    lines: list[str] = []
    for i, label in enumerate(grid.labels):
        lines += [_apply_style(part, "head", colour) for part in _wrap_line(label, width)]
        for column in grid.columns:
            if column.cells[i].main:
                heading = f"{column.name} {column.unit}".strip()
                lines += _wrap_line(f"  {heading}: {column.cells[i].format_line()}", width, "    ")
    return lines


def _wrap_line(line: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _apply_style(line: str, style: str, colour: bool) -> str:
    return f"\x1b[{STYLES[style]}m{line}\x1b[0m" if colour and line else line


# ---- Markdown ----


def format_markdown(report: Report) -> str:
    """Return a report as Markdown, for issues and pull requests: without charts and unfolded tables."""
    blocks = [[f"# {_escape_text(report.title)}"]]
    blocks += [[_escape_text(text)] for text in (report.question, report.lead) if text]
    for section in report.sections:
        parts = [lines for part in section.parts if part and (lines := _format_markdown_part(part))]
        blocks += [[f"## {section.title}"], *parts] if parts else []
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _format_markdown_part(part: Part) -> list[str]:
    """Return the lines of a part; none where Markdown does not show it."""
    match part:
        case Items():
            return [f"- **{_escape_text(item.label)}**: {_escape_text(item.text)}" for item in part.items]
        case Commands():
            blocks = [[f"{_escape_text(label)}:", "", f"    {command}", ""] for label, command in part.commands]
            return [line for block in blocks for line in block][:-1]
        case Bullets():
            return [f"- {_escape_text(sentence)}" for sentence in part.sentences]
        case Words():
            return [_escape_text(part.text)]
        case Grid():
            head = [part.name, *(f"{column.name} {column.unit}".strip() for column in part.columns)]
            rows = [[label, *(c.cells[i].format_line() for c in part.columns)] for i, label in enumerate(part.labels)]
            return _format_markdown_table(head, rows, 1)
        case Table() if not part.summary:
            return _format_markdown_table(part.head, [list(map(str, row)) for row in part.rows], part.words)
        case Pairs():
            return _format_markdown_table(["setting", "value"], part.pairs, 2)
    return []


def _format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Return a table whose columns after the first `words` are aligned right."""
    marks = ["---"] * words + ["---:"] * (len(head) - words)
    lines = [list(map(_escape_text, head)), marks, *(list(map(_escape_text, row)) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _escape_text(text: str) -> str:
    """Return the text in one line, with the special characters of Markdown and HTML escaped."""
    marked = "".join(f"\\{sign}" if sign in "\\`*_|#" else sign for sign in " ".join(text.split()))
    marked = marked.replace("](", "]\\(")  # a link; brackets alone are none
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# ---- HTML ----


def format_page(report: Report, footer: str = "", styles: tuple[str, ...] = NARROW_STYLES, script: str = "") -> str:
    """Return the page of a report.

    Args:
        footer: date and command, for the last line.
        styles: files of this package.
        script: a file of this package; empty: none.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    code = read_file(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    environment = Environment(
        loader=FunctionLoader(read_file),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("page.html.jinja").render(
        report=report,
        sections=[s for s in report.sections if any(part and not isinstance(part, Commands) for part in s.parts)],
        policy=f"{POLICY}; script-src 'sha256-{digest}'" if code else POLICY,
        css="".join(map(read_file, styles)),
        script=code,
        footer=footer,
        many=MANY,
    )


def read_file(name: str) -> str:
    """Return a file of this package."""
    return importlib.resources.files("titan.report.render").joinpath(name).read_text(encoding="utf-8")


# ---- CSV, JSON and files ----


def format_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a heading and one row per mapping as CSV; what a row lacks, or is unknown, is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_format_field, columns))
    writer.writerows([_format_field(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _format_field(value: Any) -> Any:
    """Return a CSV field: true and false as in JSON, empty where not finite, and no formula of a spreadsheet."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return (
            escape(f"'{value}") if value.startswith(tuple("=+-@")) and not _NUMBER.fullmatch(value) else escape(value)
        )
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def format_data(version: int, content: Any) -> str:
    """Return results, a mapping or a dataclass, in full precision as strict JSON: not finite is null.

    Args:
        version: of the format.
    """
    return json.dumps({"format": version, **_convert_to_plain(content)}, indent=1, allow_nan=False) + "\n"


def _convert_to_plain(value: Any) -> Any:
    """Return results as JSON values, without the fields that `repr` leaves out too, such as long curves."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _convert_to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
    if isinstance(value, Mapping):
        return {str(name): _convert_to_plain(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(element) for element in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def write_files(
    files: Sequence[Path] | None, page: Path, build: Callable[[str, str], str], words: Sequence[str], advice: str = ""
) -> None:
    """Write a report into files; None: its page, which may fail, as without permission.

    Args:
        page: the default file.
        build: returns the report in the format of an ending, such as ".html", with date and command.
        words: of the command line, behind `python -m`.
        advice: what helps beside another file where jinja2 is missing, which is an error without it.
    """
    made = f"{datetime.now():%Y-%m-%d %H:%M}: {shlex.join(['python', '-m', *words])}"
    print()
    for file in [page] if files is None else files:
        try:
            write_output_file(file, build(file.suffix, made), replaces_own=files is None)
            print(f"written: {file}")
        except RunError as error:
            if files is not None:
                raise
            print(f"{str(error).removeprefix('to=').rstrip('.')}; give another file with to=FILE{advice}.")
        except ImportError:
            if not advice:
                raise
            print(f"no page: needs jinja2; give another file with to=FILE{advice}.")
