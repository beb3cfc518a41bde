"""A comparison as a report, from answers in words to tables of all runs, and as CSV and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from titan.console.numbers import format_fixed, format_plural, format_rounded
from titan.report import rank
from titan.report.findings import Comparison, RunPrediction, RunResult, Variant
from titan.report.render.charts import draw_memory_bars, draw_pareto, draw_speed, format_marks
from titan.report.render.curves import draw_differences, draw_settings, draw_training_loss, draw_validation_loss
from titan.report.render.document import (
    Bullets,
    Chart,
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
    format_data,
    format_page,
    format_table,
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

FORMAT = 2
"""Version of the JSON; rises when a key changes its meaning or is removed."""

COLUMNS = (
    "variant", "baseline", "same_science", "run", "directory", "state", "reason", "seed", "science_id", "group_id",
    "execution_id", "code_id", "devices", "hardware", "step", "steps", "tokens", "decayed", "loss", "validation_loss",
    "bits_per_byte", "step_seconds", "step_seconds_p10", "step_seconds_p90", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "mfu_causal", "memory_gib", "steps_timed", "device_hours", "goodput", "attempts",
    "start_seconds", "checkpoint_seconds", "data_seconds", "steps_again", "diverged", "outlier",
)  # fmt: skip
"""Columns of every CSV, in this order; `setting/NAME`, `bits_per_byte/SOURCE`, keys of metrics.jsonl of tasks,
`hooks/NAME/METRIC` and `predicted/NAME` follow."""

_RUN_FIELDS = ("directory", "state", "reason", "seed", "science_id", "group_id", "execution_id", "code_id", "devices",
         "hardware", "step", "steps", "tokens", "decayed", "loss")  # fmt: skip
"""Columns that are fields of `RunResult` under the same name."""
_SPEED_FIELDS = ("tokens_per_second_per_device", "tflops_per_device", "mfu", "mfu_causal", "memory_gib")
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
    varied = []
    for name, values in differs:
        remainder = [f"and {len(values) - VALUES:,} more"] if len(values) > VALUES else []
        varied.append(f"{name} ({', '.join([*values[:VALUES], *remainder])})")
    common = "; ".join(f"{name}: {value}" for name, value in comparison.common.items())
    facts = {"Common": common, "Differs": "; ".join(varied)}
    return Report(comparison.title, " ".join(format_lead(comparison)), sections, comparison.question or "", facts)


def render_page(comparison: Comparison, footer: str = "") -> str:
    """Return the page of a comparison; `footer` is its last line. Needs jinja2."""
    return format_page(build_report(comparison, has_charts=True), footer, ("page.css",), "page.js")


def _build_grid(comparison: Comparison, indices: Sequence[int], columns: Sequence[Column]) -> Grid:
    """Return some variants by columns that have a cell for each of these."""
    labels = [comparison.variants[i].label for i in indices]
    return Grid(labels, columns, [format_marks(comparison, i) for i in indices])


def _list_answers(comparison: Comparison) -> Items:
    commands, items = dict(list_commands(comparison)), []
    indices = {id(variant): i for i, variant in enumerate(comparison.variants)}
    for variant, sentences in format_answers(comparison):
        marks, command = format_marks(comparison, indices[id(variant)]), commands.get(variant.label, "")
        items.append(Item(variant.label, " ".join(sentences), format_answer(variant), command, marks))
    return Items(items)


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


# ---- for other programs ----


def format_csv(comparison: Comparison) -> str:
    """Return a heading and one row per run, also for those that failed without metrics; unknown values are empty."""
    rows = [_build_row(variant, run) for variant in comparison.variants for run in variant.runs]
    directories = {row["directory"] for row in rows}
    rows += [
        {"run": failed.label, "directory": failed.directory, "state": failed.state, "reason": failed.reason}
        for failed in comparison.failed
        if failed.directory not in directories
    ]
    extra_columns = sorted({name for row in rows for name in row} - set(COLUMNS))
    return format_table([*COLUMNS, *extra_columns], rows)


def format_json(comparison: Comparison) -> str:
    """Return all results in full precision; keys are the fields of `titan.report.findings`, not finite is null."""
    return format_data(FORMAT, comparison)


def _build_row(variant: Variant, run: RunResult) -> dict[str, Any]:
    speed: dict[str, Any] = {}
    if run.speed is not None:
        times = run.speed.step_seconds
        speed = {name: getattr(run.speed, name) for name in _SPEED_FIELDS} | {"steps_timed": run.speed.steps}
        speed |= {"step_seconds": times.median, "step_seconds_p10": times.p10, "step_seconds_p90": times.p90}
    return {
        "variant": variant.label,
        "baseline": variant.baseline,
        "same_science": variant.same_science,
        "run": run.label,
        **{name: getattr(run, name) for name in _RUN_FIELDS},
        "validation_loss": run.validation,
        "bits_per_byte": run.bits,
        **speed,
        "diverged": run.diverged,
        "outlier": run.outlier,
        **dataclasses.asdict(run.cost),
        **{f"setting/{name}": value for name, value in variant.settings.items()},
        **{f"bits_per_byte/{source}": value for source, value in run.bits_by_source.items()},
        **run.figures,
        **run.experts,
        **run.own,
        **_build_prediction_columns(run.predicted),
    }


def _build_prediction_columns(prediction: RunPrediction | None) -> dict[str, Any]:
    """Return the columns of a prediction, which a file has only if any run has one."""
    if prediction is None:
        return {}
    values: dict[str, Any] = {"constants": prediction.constants}
    for name, interval in (("step_seconds", prediction.step_seconds), ("memory_gib", prediction.memory_gib)):
        values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    for name in ("step_error", "memory_error", "work_seconds", "evaluation_seconds"):
        values[name] = getattr(prediction, name)
    return {f"predicted/{name}": value for name, value in (values | dict(prediction.step_parts)).items()}
