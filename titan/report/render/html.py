"""A comparison as one HTML file that needs nothing else: styles, charts and its few lines of script are inside.

It begins with the question and the answers in words; then the table, the charts, what failed and why, and the notes.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from html import escape

from titan.report import ranking
from titan.report.findings import Comparison, RunFound, Variant
from titan.report.render.bars import memory_bars, throughput
from titan.report.render.charts import Chart, marks
from titan.report.render.curves import differences, training, validation
from titan.report.render.markdown import by_source
from titan.report.render.pareto import pareto
from titan.report.render.sentences import answers, lead, missing, notes, question
from titan.report.render.table_data import Cell, Column, answer, columns, few, number
from titan.report.render.varied import settings

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The page may load nothing from anywhere."""
MANY = 12
"""Answers beyond so many scroll in a box of their own."""
CHARTS: tuple[Callable[[Comparison], Chart | None], ...] = (
    settings,
    training,
    validation,
    differences,
    throughput,
    memory_bars,
    pareto,
)
"""In their order on the page; each gives None where there is nothing to draw."""


def page(comparison: Comparison, made: str = "") -> str:
    """The whole page.

    Args:
        comparison: what was found.
        made: when, to be told at the end.
    """
    title = escape(comparison.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{_body(comparison)}
<p class="faint">{escape(made)}</p>
</main>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return importlib.resources.files("titan.report.render").joinpath(name).read_text(encoding="utf-8")


def _body(comparison: Comparison) -> str:
    parts = [
        f'<p class="question">{escape(question(comparison))}</p>',
        f'<p class="lead">{escape(" ".join(lead(comparison)))}</p>',
        _answers(comparison),
        _section("Results", _figures(comparison)),
        _section("By source", _sources(comparison)),
        _section("Charts", _charts(comparison)),
        _section(missing(comparison), _failures(comparison)),
        _section("Notes", "".join(f"<li>{escape(note)}</li>" for note in notes(comparison)), "ul"),
        _section("Settings", _settings(comparison)),
        _section("Runs", _runs(comparison)),
    ]
    return "\n".join(part for part in parts if part)


def _section(name: str, body: str, tag: str = "div") -> str:
    return f"<h2>{name}</h2>\n<{tag}>{body}</{tag}>" if body else ""


def _answers(comparison: Comparison) -> str:
    told = answers(comparison)
    if not told:
        return ""
    indices = {id(variant): i for i, variant in enumerate(comparison.variants)}
    items = "".join(_answer(comparison, variant, indices[id(variant)], said) for variant, said in told)
    return f'<h2>Answers</h2>\n<ul class="answers{" many" * (len(told) > MANY)}">{items}</ul>'


def _answer(comparison: Comparison, variant: Variant, index: int, said: Sequence[str]) -> str:
    name, cell = f'<span class="key"></span><strong>{escape(variant.label)}</strong>', answer(variant)
    detail = f" ({escape(cell.detail)})" if cell.detail else ""
    return f"<li {marks(comparison, index)}>{name} {_pill(cell)}{detail} {escape(' '.join(said))}</li>"


def _pill(cell: Cell) -> str:
    return f'<span class="pill {cell.mood}">{escape(cell.main)}</span>'


def _figures(comparison: Comparison) -> str:
    if not comparison.variants:
        return ""
    told = columns(comparison)
    head = "<th>variant</th>" + "".join(_heading(column) for column in told)
    rows = "".join(_figure_row(comparison, i, told) for i in ranking.order(comparison.variants))
    return _scroll(head, rows)


def _scroll(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _heading(column: Column) -> str:
    unit = f"<small>{escape(column.unit)}</small>" if column.unit else ""
    return f'<th title="{escape(column.meaning)}">{escape(column.name)}{unit}</th>'


def _figure_row(comparison: Comparison, index: int, told: Sequence[Column]) -> str:
    label = escape(comparison.variants[index].label)
    cells = "".join(_cell(column, column.cells[index]) for column in told)
    return f'<tr {marks(comparison, index)}><th scope="row"><span class="key"></span>{label}</th>{cells}</tr>'


def _cell(column: Column, cell: Cell) -> str:
    main = _pill(cell) if column.name == "answer" else escape(cell.main)
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    return f"<td>{main}{detail}</td>"


def _sources(comparison: Comparison) -> str:
    head, rows = by_source(comparison)
    return _plain_table(head, rows, words=2) if rows else ""


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table of texts, the first `words` columns of which are words and wrap."""
    named = "".join(
        f'<th class="{"words" if i < words else "figure"}">{escape(name)}</th>' for i, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(_text_cell(text, i < words) for i, text in enumerate(row))}</tr>" for row in rows)
    return _scroll(named, body)


def _text_cell(text: str, words: bool) -> str:
    return f'<td class="words">{escape(text)}</td>' if words else f"<td>{escape(text)}</td>"


def _charts(comparison: Comparison) -> str:
    made = [chart for chart in (make(comparison) for make in CHARTS) if chart is not None]
    return f'<div class="charts">{"".join(map(_chart, made))}</div>' if made else ""


def _chart(chart: Chart) -> str:
    caption = f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p></figcaption>"
    wide = ' class="wide"' if chart.wide else ""
    return f'<figure{wide}>{caption}<div class="plot">{chart.html}</div></figure>\n'


def _failures(comparison: Comparison) -> str:
    rows = [[failed.label, failed.reason, failed.state, failed.directory] for failed in comparison.failed]
    return _plain_table(["run", "reason", "state", "directory"], rows, words=4) if rows else ""


def _settings(comparison: Comparison) -> str:
    pairs = [(name, f"differs: {', '.join(values)}") for name, values in comparison.differs.items()]
    pairs += comparison.common.items()
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    margin = f"<dt>equivalence margin</dt><dd>{comparison.margin:g} nats</dd>"
    return f"<dl>{items}{margin}</dl>" if comparison.variants or items else ""


def _runs(comparison: Comparison) -> str:
    rows = [_run(run) for variant in comparison.variants for run in variant.runs]
    head = ["run", "directory", "state", "steps", "seed", "devices", "loss", "validation", "step ms", "by attempt",
            "device-hours", "goodput", "attempts", "science", "execution", "code"]  # fmt: skip
    named = f"{len(rows)} run{'s' * (len(rows) > 1)}"
    return f"<details><summary>{named}</summary>{_plain_table(head, rows, words=3)}</details>" if rows else ""


def _run(run: RunFound) -> list[str]:
    times = [few(1e3 * speed.step_seconds.median) for speed in run.speed_by_attempt]
    return [
        run.label,
        run.directory,
        f"{run.state}: {run.reason}" if run.reason else run.state,
        f"{run.step:,} of {run.steps:,}",
        str(run.seed),
        f"{run.devices} {run.hardware}".strip(),
        "" if run.loss is None else number(run.loss),
        "" if run.validation is None else number(run.validation),
        "" if run.speed is None else few(1e3 * run.speed.step_seconds.median),
        ", ".join(times) if len(times) > 1 else "",
        few(run.cost.device_hours),
        "" if run.cost.goodput is None else f"{run.cost.goodput:.1%}",
        str(run.cost.attempts),
        run.science_id,
        run.execution_id,
        run.code_id,
    ]
