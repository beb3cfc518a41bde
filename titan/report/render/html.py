"""A comparison as one HTML file that loads nothing: styles, charts and a few lines of script are inside.

`page.html.jinja` lays the page out: the question and the answers in words, the table, the charts, failures,
notes, settings and runs. This module fills it. The template escapes all text; the charts are SVG that escapes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from titan.console.numbers import format_fixed, format_rounded
from titan.report import rank
from titan.report.findings import Comparison, RunResult
from titan.report.render import predicted
from titan.report.render.charts import Chart, draw_memory_bars, draw_speed, format_marks
from titan.report.render.curves import draw_differences, draw_training_loss, draw_validation_loss
from titan.report.render.pareto import draw_pareto
from titan.report.render.sentences import (
    describe_margin,
    format_answers,
    format_lead,
    format_missing_heading,
    format_notes,
    list_commands,
)
from titan.report.render.sweep_chart import draw_settings
from titan.report.render.table_data import (
    OWN_METRICS,
    Cell,
    Column,
    build_columns,
    format_answer,
    tabulate_own_metrics,
    tabulate_sources,
)
from titan.report.render.template import allow_script, content, load_template

MANY = 12
"""More answers than these scroll in a box."""
CHARTS: tuple[Callable[[Comparison], Chart | None], ...] = (
    draw_settings,
    draw_training_loss,
    draw_validation_loss,
    draw_differences,
    draw_speed,
    draw_memory_bars,
    draw_pareto,
)
"""In the order of the page; each returns None where there is nothing to draw."""
RUN_HEAD = ("run", "directory", "state", "steps", "seed", "devices", "loss", "validation", "step ms", "by attempt",
            "device-hours", "goodput", "attempts", "science", "execution", "code")  # fmt: skip


@dataclass(frozen=True)
class AnswerItem:
    """The answer for a variant: attributes of its element, its label, the answer, the sentences, and a command."""

    marks: Markup
    label: str
    cell: Cell
    text: str
    command: str


@dataclass(frozen=True)
class VariantRow:
    """A variant's row of the table: attributes of its element, its label, and each column with its cell."""

    marks: Markup
    label: str
    cells: list[tuple[Column, Cell]]


def render_page(comparison: Comparison, footer: str = "") -> str:
    """Return the whole page.

    Args:
        footer: date and command, for the last line.
    """
    script = content("page.js")
    return load_template("page.html.jinja").render(
        policy=Markup(allow_script(script)),
        css=Markup(content("page.css")),
        script=Markup(script),
        title=comparison.title,
        question=comparison.question,
        lead=" ".join(format_lead(comparison)),
        many=MANY,
        answers=_build_answers(comparison),
        columns=build_columns(comparison),
        results=_build_results(comparison),
        sources=tabulate_sources(comparison),
        own_title=OWN_METRICS,
        own=tabulate_own_metrics(comparison),
        predicted_title=predicted.TITLE,
        predicted_columns=predicted.build_columns(comparison),
        predictions=_build_predictions(comparison),
        predicted_summary=predicted.summarize_intervals(comparison),
        charts=[chart for chart in (make(comparison) for make in CHARTS) if chart is not None],
        missing=format_missing_heading(comparison),
        failures=[[failed.label, failed.reason, failed.state, failed.directory] for failed in comparison.failed],
        notes=format_notes(comparison),
        settings=_list_settings(comparison),
        run_head=RUN_HEAD,
        runs=[_format_run(run) for variant in comparison.variants for run in variant.runs],
        made=footer,
    )


def _build_answers(comparison: Comparison) -> list[AnswerItem]:
    indices = {id(variant): i for i, variant in enumerate(comparison.variants)}
    commands = dict(list_commands(comparison))
    return [
        AnswerItem(
            Markup(format_marks(comparison, indices[id(variant)])),
            variant.label,
            format_answer(variant),
            " ".join(sentences),
            commands.get(variant.label, ""),
        )
        for variant, sentences in format_answers(comparison)
    ]


def _build_results(comparison: Comparison) -> list[VariantRow]:
    visible_columns = build_columns(comparison)
    return [
        VariantRow(
            Markup(format_marks(comparison, i)),
            comparison.variants[i].label,
            [(column, column.cells[i]) for column in visible_columns],
        )
        for i in rank.rank_variants(comparison.variants)
    ]


def _build_predictions(comparison: Comparison) -> list[VariantRow]:
    visible_columns = predicted.build_columns(comparison)
    return [
        VariantRow(
            Markup(format_marks(comparison, i)),
            comparison.variants[i].label,
            [(column, column.cells[k]) for column in visible_columns],
        )
        for k, i in enumerate(predicted.list_variants(comparison))
    ]


def _list_settings(comparison: Comparison) -> list[tuple[str, str]]:
    pairs = [(name, f"differs: {', '.join(values)}") for name, values in comparison.differs.items()]
    pairs += comparison.common.items()
    return [*pairs, ("equivalence margin", describe_margin(comparison))] if comparison.variants or pairs else []


def _format_run(run: RunResult) -> list[str]:
    times = [format_rounded(1e3 * speed.step_seconds.median) for speed in run.speed_by_attempt]
    return [
        run.label,
        run.directory,
        f"{run.state}: {run.reason}" if run.reason else run.state,
        f"{run.step:,} of {run.steps:,}",
        str(run.seed),
        f"{run.devices} {run.hardware}".strip(),
        "" if run.loss is None else format_fixed(run.loss),
        "" if run.validation is None else format_fixed(run.validation),
        "" if run.speed is None else format_rounded(1e3 * run.speed.step_seconds.median),
        ", ".join(times) if len(times) > 1 else "",
        format_rounded(run.cost.device_hours),
        "" if run.cost.goodput is None else f"{run.cost.goodput:.1%}",
        str(run.cost.attempts),
        run.science_id,
        run.execution_id,
        run.code_id,
    ]
