"""A comparison as Markdown, for issues and pull requests: answers, table, failures and notes, without charts."""

from __future__ import annotations

from collections.abc import Sequence

from titan.report import ranking
from titan.report.findings import Comparison
from titan.report.render import own, predicted
from titan.report.render.sentences import answers, lead, missing, notes, question
from titan.report.render.table_data import between, columns


def text(comparison: Comparison) -> str:
    """Return the whole comparison."""
    parts = [
        [f"# {_plain(comparison.title)}", "", _plain(question(comparison)), "", _plain(" ".join(lead(comparison)))],
        _section(
            "Answers",
            [f"- **{_plain(variant.label)}**: {_plain(' '.join(parts))}" for variant, parts in answers(comparison)],
        ),
        _section("Results", _figures(comparison)),
        _section("By source", _sources(comparison)),
        _section(own.TITLE, _own(comparison)),
        _section(predicted.TITLE, _predictions(comparison)),
        _section(missing(comparison), _failures(comparison)),
        _section("Notes", [f"- {_plain(note)}" for note in notes(comparison)]),
        _section("Settings", _settings(comparison)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _section(name: str, lines: Sequence[str]) -> list[str]:
    return [f"## {name}", "", *lines] if lines else []


def _figures(comparison: Comparison) -> list[str]:
    shown = columns(comparison)
    if not comparison.variants:
        return []
    head = ["variant", *(f"{column.name} {column.unit}".strip() for column in shown)]
    order = ranking.order(comparison.variants)
    rows = [[comparison.variants[i].label, *(column.cells[i].line() for column in shown)] for i in order]
    return _table(head, rows, figures=len(shown))


def _predictions(comparison: Comparison) -> list[str]:
    shown, indices = predicted.columns(comparison), predicted.variants(comparison)
    head = ["variant", *(f"{column.name} {column.unit}" for column in shown)]
    rows = [
        [comparison.variants[index].label, *(column.cells[place].line() for column in shown)]
        for place, index in enumerate(indices)
    ]
    return [*_table(head, rows, figures=len(shown)), "", predicted.summary(comparison)] if rows else []


def by_source(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of the differences for each source of a mixture; no rows where there are none."""
    found = [
        (variant.label, quality) for variant in comparison.variants for quality in variant.quality if quality.by_source
    ]
    sources = sorted({source for _, quality in found for source in quality.by_source})
    rows = []
    for label, quality in found:
        there = [quality.by_source.get(source) for source in sources]
        shown = ["" if i is None else f"{i.estimate:+.4f} {between(i)}".strip() for i in there]
        rows.append([label, f"{quality.measure} at {quality.at}", *shown])
    return ["variant", "difference in", *sources], rows


def _sources(comparison: Comparison) -> list[str]:
    head, rows = by_source(comparison)
    return _table(head, rows, figures=len(head) - 2) if rows else []


def _own(comparison: Comparison) -> list[str]:
    head, rows = own.table(comparison)
    return _table(head, rows, figures=len(head) - 1) if rows else []


def _failures(comparison: Comparison) -> list[str]:
    rows = [[failed.label, failed.state, failed.reason, failed.directory] for failed in comparison.failed]
    return _table(["run", "state", "reason", "directory"], rows, figures=0) if rows else []


def _settings(comparison: Comparison) -> list[str]:
    differs = [[name, " \\| ".join(map(_plain, values))] for name, values in comparison.differs.items()]
    rows = [[_plain(name), f"differs: {values}"] for name, values in differs]
    rows += [[_plain(name), _plain(value)] for name, value in comparison.common.items()]
    return [*_rule(["setting", "value"], 0), *(f"| {' | '.join(row)} |" for row in rows)] if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: int) -> list[str]:
    """Return a table; the last `figures` columns are aligned right."""
    return [*_rule(head, figures), *(f"| {' | '.join(map(_plain, row))} |" for row in rows)]


def _rule(head: Sequence[str], figures: int) -> list[str]:
    marks = ["---"] * (len(head) - figures) + ["---:"] * figures
    return [f"| {' | '.join(map(_plain, head))} |", f"| {' | '.join(marks)} |"]


def _plain(text: str) -> str:
    """Return the text in one line, with the special characters of Markdown and HTML escaped."""
    marked = "".join(f"\\{sign}" if sign in "\\`*_|#" else sign for sign in " ".join(text.split()))
    marked = marked.replace("](", "]\\(")  # a link; brackets alone are none
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
