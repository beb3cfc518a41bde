"""A comparison as Markdown, for issues and pull requests: answers, table, failures and notes, without charts."""

from __future__ import annotations

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
from titan.report.render.table_data import (
    OWN_METRICS,
    build_columns,
    tabulate_own_metrics,
    tabulate_sources,
)


def format_markdown(comparison: Comparison) -> str:
    """Return the whole comparison."""
    parts = [
        [
            f"# {_escape_text(comparison.title)}",
            "",
            *([_escape_text(comparison.question), ""] if comparison.question else []),
            _escape_text(" ".join(format_lead(comparison))),
        ],
        _format_section(
            "Answers",
            [
                f"- **{_escape_text(variant.label)}**: {_escape_text(' '.join(parts))}"
                for variant, parts in format_answers(comparison)
            ],
        ),
        _format_section(COMMANDS_TITLE, _format_commands(comparison)),
        _format_section("Results", _format_results(comparison)),
        _format_section("By source", _format_sources(comparison)),
        _format_section(OWN_METRICS, _format_hook_metrics(comparison)),
        _format_section(predicted.TITLE, _format_predictions(comparison)),
        _format_section(format_missing_heading(comparison), _format_failures(comparison)),
        _format_section("Notes", [f"- {_escape_text(note)}" for note in format_notes(comparison)]),
        _format_section("Settings", _format_settings(comparison)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _format_section(name: str, lines: Sequence[str]) -> list[str]:
    return [f"## {name}", "", *lines] if lines else []


def _format_results(comparison: Comparison) -> list[str]:
    visible_columns = build_columns(comparison)
    if not comparison.variants:
        return []
    head = ["variant", *(f"{column.name} {column.unit}".strip() for column in visible_columns)]
    order = rank.rank_variants(comparison.variants)
    rows = [
        [comparison.variants[i].label, *(column.cells[i].format_line() for column in visible_columns)] for i in order
    ]
    return _format_table(head, rows, figures=len(visible_columns))


def _format_predictions(comparison: Comparison) -> list[str]:
    visible_columns, indices = predicted.build_columns(comparison), predicted.list_variants(comparison)
    head = ["variant", *(f"{column.name} {column.unit}" for column in visible_columns)]
    rows = [
        [comparison.variants[index].label, *(column.cells[position].format_line() for column in visible_columns)]
        for position, index in enumerate(indices)
    ]
    return (
        [*_format_table(head, rows, figures=len(visible_columns)), "", predicted.summarize_intervals(comparison)]
        if rows
        else []
    )


def _format_sources(comparison: Comparison) -> list[str]:
    head, rows = tabulate_sources(comparison)
    return _format_table(head, rows, figures=len(head) - 2) if rows else []


def _format_hook_metrics(comparison: Comparison) -> list[str]:
    head, rows = tabulate_own_metrics(comparison)
    return _format_table(head, rows, figures=len(head) - 1) if rows else []


def _format_commands(comparison: Comparison) -> list[str]:
    blocks = [[f"{_escape_text(label)}:", "", f"    {command}", ""] for label, command in list_commands(comparison)]
    return [line for block in blocks for line in block][:-1]


def _format_failures(comparison: Comparison) -> list[str]:
    rows = [[failed.label, failed.state, failed.reason, failed.directory] for failed in comparison.failed]
    return _format_table(["run", "state", "reason", "directory"], rows, figures=0) if rows else []


def _format_settings(comparison: Comparison) -> list[str]:
    differs = [[name, " \\| ".join(map(_escape_text, values))] for name, values in comparison.differs.items()]
    rows = [[_escape_text(name), f"differs: {values}"] for name, values in differs]
    rows += [[_escape_text(name), _escape_text(value)] for name, value in comparison.common.items()]
    return [*_format_head(["setting", "value"], 0), *(f"| {' | '.join(row)} |" for row in rows)] if rows else []


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: int) -> list[str]:
    """Return a table; the last `figures` columns are aligned right."""
    return [*_format_head(head, figures), *(f"| {' | '.join(map(_escape_text, row))} |" for row in rows)]


def _format_head(head: Sequence[str], figures: int) -> list[str]:
    marks = ["---"] * (len(head) - figures) + ["---:"] * figures
    return [f"| {' | '.join(map(_escape_text, head))} |", f"| {' | '.join(marks)} |"]


def _escape_text(text: str) -> str:
    """Return the text in one line, with the special characters of Markdown and HTML escaped."""
    marked = "".join(f"\\{sign}" if sign in "\\`*_|#" else sign for sign in " ".join(text.split()))
    marked = marked.replace("](", "]\\(")  # a link; brackets alone are none
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
