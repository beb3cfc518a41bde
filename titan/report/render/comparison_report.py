"""A comparison as a report: answers in words, tables, charts, failures, notes, settings and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from titan.console.numbers import format_fixed, format_plural, format_rounded
from titan.report import rank
from titan.report.findings import Comparison, RunResult
from titan.report.render.charts import Chart, draw_memory_bars, draw_pareto, draw_speed, format_marks
from titan.report.render.curves import draw_differences, draw_settings, draw_training_loss, draw_validation_loss
from titan.report.render.document import (
    Bullets,
    Column,
    Commands,
    Figures,
    Grid,
    Item,
    Items,
    Pairs,
    Report,
    Section,
    Table,
    Words,
)
from titan.report.render.sentences import (
    describe_margin,
    format_answers,
    format_lead,
    format_missing_heading,
    format_notes,
    list_commands,
)
from titan.report.render.table_data import (
    build_columns,
    build_predicted_columns,
    format_answer,
    list_predicted,
    summarize_intervals,
    tabulate_own_metrics,
    tabulate_sources,
)

PREDICTED_TITLE = "Predicted and measured"
VALUES = 12
"""The most values listed of a setting that differs."""
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


def build_report(comparison: Comparison, has_charts: bool = False) -> Report:
    """Return a comparison as a report; only a page has charts."""
    variants, differs = comparison.variants, comparison.differs.items()
    runs = [_format_run(run) for variant in variants for run in variant.runs]
    failures = [[failed.label, failed.state, failed.reason, failed.directory] for failed in comparison.failed]
    settings = [(name, f"differs: {' | '.join(values)}") for name, values in differs] + [*comparison.common.items()]
    order = rank.rank_variants(variants)
    columns = [replace(c, cells=tuple(c.cells[i] for i in order)) for c in build_columns(comparison)]
    if variants or settings:
        settings.append(("equivalence margin", describe_margin(comparison)))
    sections = [
        Section("Answers", [_list_answers(comparison)]),
        Section("Where they differ first", [Commands(list_commands(comparison))]),
        Section("Results", [_build_grid(comparison, order, columns)]),
        Section("By source", [tabulate_sources(comparison)]),
        Section("Own metrics", [tabulate_own_metrics(comparison)]),
        Section(
            PREDICTED_TITLE,
            [
                _build_grid(comparison, list_predicted(comparison), build_predicted_columns(comparison)),
                Words(summarize_intervals(comparison)),
            ],
        ),
        Section("Charts", [Figures([c for draw in CHARTS if (c := draw(comparison))] if has_charts else [])]),
        Section(
            format_missing_heading(comparison),
            [Table(failures, ["run", "state", "reason", "directory"], words=4, line="{0} ({3}): {1}: {2}")],
        ),
        Section("Notes", [Bullets(format_notes(comparison))]),
        Section("Settings", [Pairs(settings)]),
        Section("Runs", [Table(runs, RUN_HEAD, words=3, summary=format_plural(len(runs), "run"))]),
    ]
    facts = {
        "Common": "; ".join(f"{name}: {value}" for name, value in comparison.common.items()),
        "Differs": "; ".join(f"{name} ({_format_values(values)})" for name, values in differs),
    }
    return Report(comparison.title, " ".join(format_lead(comparison)), sections, comparison.question or "", facts)


def render_page(comparison: Comparison, footer: str = "") -> str:
    """Return the page of a comparison; `footer` is its last line. Needs jinja2."""
    from titan.report.render.page import format_page

    return format_page(build_report(comparison, has_charts=True), footer, ("page.css",), "page.js")


def _format_values(values: Sequence[str]) -> str:
    """Return the first values in one line, and how many more there are."""
    remainder = [f"and {len(values) - VALUES:,} more"] if len(values) > VALUES else []
    return ", ".join([*values[:VALUES], *remainder])


def _build_grid(comparison: Comparison, indices: Sequence[int], columns: Sequence[Column]) -> Grid:
    """Return some variants by columns that have a cell for each of these."""
    labels = [comparison.variants[i].label for i in indices]
    return Grid(labels, columns, [format_marks(comparison, i) for i in indices])


def _list_answers(comparison: Comparison) -> Items:
    commands = dict(list_commands(comparison))
    indices = {id(variant): i for i, variant in enumerate(comparison.variants)}
    return Items(
        [
            Item(
                variant.label,
                " ".join(sentences),
                format_answer(variant),
                commands.get(variant.label, ""),
                format_marks(comparison, indices[id(variant)]),
            )
            for variant, sentences in format_answers(comparison)
        ]
    )


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
