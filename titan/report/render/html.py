"""A comparison as one HTML file that loads nothing: styles, charts and a few lines of script are inside.

`page.html.jinja` lays the page out: the question and the answers in words, the table, the charts, failures, notes,
settings and runs. This module fills it. The template escapes all text; the charts are SVG that escapes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from titan.console.numbers import fixed, rounded
from titan.report import ranking
from titan.report.findings import Comparison, RunFound
from titan.report.render import own, predicted
from titan.report.render.bars import memory_bars, throughput
from titan.report.render.charts import Chart, marks
from titan.report.render.curves import differences, training, validation
from titan.report.render.markdown import by_source
from titan.report.render.pareto import pareto
from titan.report.render.sentences import answers, lead, missing, notes, question
from titan.report.render.table_data import Cell, Column, answer, columns
from titan.report.render.template import POLICY, content, template
from titan.report.render.varied import settings

MANY = 12
"""More answers than these scroll in a box."""
CHARTS: tuple[Callable[[Comparison], Chart | None], ...] = (
    settings,
    training,
    validation,
    differences,
    throughput,
    memory_bars,
    pareto,
)
"""In the order of the page; each returns None where there is nothing to draw."""
RUN_HEAD = ("run", "directory", "state", "steps", "seed", "devices", "loss", "validation", "step ms", "by attempt",
            "device-hours", "goodput", "attempts", "science", "execution", "code")  # fmt: skip


@dataclass(frozen=True)
class Item:
    """The answer for a variant: attributes of its element, its label, the answer, and the sentences."""

    marks: Markup
    label: str
    cell: Cell
    text: str


@dataclass(frozen=True)
class Row:
    """A variant's row of the table: attributes of its element, its label, and each column with its cell."""

    marks: Markup
    label: str
    cells: list[tuple[Column, Cell]]


def page(comparison: Comparison, made: str = "") -> str:
    """Return the whole page.

    Args:
        comparison: the results.
        made: date and command, for the last line.
    """
    return template("page.html.jinja").render(
        policy=Markup(POLICY),
        css=Markup(content("page.css")),
        script=Markup(content("page.js")),
        title=comparison.title,
        question=question(comparison),
        lead=" ".join(lead(comparison)),
        many=MANY,
        answers=_answers(comparison),
        columns=columns(comparison),
        results=_results(comparison),
        sources=by_source(comparison),
        own_title=own.TITLE,
        own=own.table(comparison),
        predicted_title=predicted.TITLE,
        predicted_columns=predicted.columns(comparison),
        predictions=_predictions(comparison),
        predicted_summary=predicted.summary(comparison),
        charts=[chart for chart in (make(comparison) for make in CHARTS) if chart is not None],
        missing=missing(comparison),
        failures=[[failed.label, failed.reason, failed.state, failed.directory] for failed in comparison.failed],
        notes=notes(comparison),
        settings=_settings(comparison),
        run_head=RUN_HEAD,
        runs=[_run(run) for variant in comparison.variants for run in variant.runs],
        made=made,
    )


def _answers(comparison: Comparison) -> list[Item]:
    indices = {id(variant): i for i, variant in enumerate(comparison.variants)}
    return [
        Item(Markup(marks(comparison, indices[id(variant)])), variant.label, answer(variant), " ".join(sentences))
        for variant, sentences in answers(comparison)
    ]


def _results(comparison: Comparison) -> list[Row]:
    shown = columns(comparison)
    return [
        Row(Markup(marks(comparison, i)), comparison.variants[i].label, [(column, column.cells[i]) for column in shown])
        for i in ranking.order(comparison.variants)
    ]


def _predictions(comparison: Comparison) -> list[Row]:
    shown = predicted.columns(comparison)
    return [
        Row(Markup(marks(comparison, i)), comparison.variants[i].label, [(column, column.cells[k]) for column in shown])
        for k, i in enumerate(predicted.variants(comparison))
    ]


def _settings(comparison: Comparison) -> list[tuple[str, str]]:
    pairs = [(name, f"differs: {', '.join(values)}") for name, values in comparison.differs.items()]
    pairs += comparison.common.items()
    return [*pairs, ("equivalence margin", f"{comparison.margin:g} nats")] if comparison.variants or pairs else []


def _run(run: RunFound) -> list[str]:
    times = [rounded(1e3 * speed.step_seconds.median) for speed in run.speed_by_attempt]
    return [
        run.label,
        run.directory,
        f"{run.state}: {run.reason}" if run.reason else run.state,
        f"{run.step:,} of {run.steps:,}",
        str(run.seed),
        f"{run.devices} {run.hardware}".strip(),
        "" if run.loss is None else fixed(run.loss),
        "" if run.validation is None else fixed(run.validation),
        "" if run.speed is None else rounded(1e3 * run.speed.step_seconds.median),
        ", ".join(times) if len(times) > 1 else "",
        rounded(run.cost.device_hours),
        "" if run.cost.goodput is None else f"{run.cost.goodput:.1%}",
        str(run.cost.attempts),
        run.science_id,
        run.execution_id,
        run.code_id,
    ]
