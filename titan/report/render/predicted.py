"""Predicted and measured step time and memory of a comparison as a table, for the variants that have a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from titan.console.numbers import format_fixed, format_interval, format_rounded
from titan.estimate.step_time import COMMUNICATION, COMPUTATION, IDLE, sum_groups
from titan.report import rank
from titan.report.findings import Comparison, Interval, RunPrediction, RunResult, Variant
from titan.report.render.table_data import Cell, Column, Mood, compute_median

TITLE = "Predicted and measured"
Runs = Sequence[tuple[RunResult, RunPrediction]]
"""The runs of a variant that have a prediction."""
Pair = tuple[Interval, float | None]
"""A predicted and a measured value."""


def list_variants(comparison: Comparison) -> list[int]:
    """Return the indices of the variants with a prediction, in the order of the main table."""
    return [i for i in rank.rank_variants(comparison.variants) if _list_runs(comparison.variants[i])]


def build_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns with a value for any of `list_variants`, in their order."""
    runs = [_list_runs(comparison.variants[i]) for i in list_variants(comparison)]
    all_columns = (
        Column(name, unit, meaning, tuple(map(cell, runs)), weight) for name, unit, meaning, weight, cell in _COLUMNS
    )
    return tuple(column for column in all_columns if any(cell.main for cell in column.cells))


def summarize_intervals(comparison: Comparison) -> str:
    """Return how many runs were measured within the predicted intervals; empty where none was predicted."""
    runs = [pair for variant in comparison.variants for pair in _list_runs(variant)]
    judged = (("step time", _check_intervals(runs, _pair_step)), ("memory", _check_intervals(runs, _pair_memory)))
    parts = [f"{name} of {sum(within)} of {len(within)} runs" for name, within in judged if within]
    return f"Measured within the predicted interval: {', '.join(parts)}." if parts else ""


def _list_runs(variant: Variant) -> Runs:
    return [(run, run.predicted) for run in variant.runs if run.predicted is not None]


def _pair_step(run: RunResult, predicted: RunPrediction) -> Pair:
    return predicted.step_seconds, run.speed.step_seconds.median if run.speed else None


def _pair_memory(run: RunResult, predicted: RunPrediction) -> Pair:
    return predicted.memory_gib, run.speed.memory_gib if run.speed else None


def _check_intervals(runs: Runs, pair_values: Callable[[RunResult, RunPrediction], Pair]) -> list[bool]:
    """Return for each run with a measured value whether it lies within the predicted interval."""
    pairs = [pair_values(*run) for run in runs]
    return [i.low <= x <= (i.high or 0.0) for i, x in pairs if x is not None and i.low is not None]


def _format_ms(seconds: float | None) -> Cell:
    return Cell() if seconds is None else Cell(format_rounded(1e3 * seconds))


def _format_gib(value: float) -> str:
    return format_fixed(value, 2 if value < 100 else 1)


def _format_predicted_step(runs: Runs) -> Cell:
    interval = runs[-1][1].step_seconds
    return Cell(
        format_rounded(1e3 * interval.estimate),
        format_interval(interval.low, interval.high, lambda value: format_rounded(1e3 * value)),
    )


def _format_predicted_memory(runs: Runs) -> Cell:
    interval = runs[-1][1].memory_gib
    return Cell(_format_gib(interval.estimate), format_interval(interval.low, interval.high, _format_gib))


def _format_measured_step(runs: Runs) -> Cell:
    return _format_ms(compute_median([_pair_step(*run)[1] for run in runs]))


def _format_measured_memory(runs: Runs) -> Cell:
    middle = compute_median([_pair_memory(*run)[1] for run in runs])
    return Cell() if middle is None else Cell(_format_gib(middle))


def _format_step_error(runs: Runs) -> Cell:
    cell = _format_error([prediction.step_error for _, prediction in runs], _check_intervals(runs, _pair_step))
    return Cell(cell.main, "shared machine") if cell.main and any(run.shared for run, _ in runs) else cell


def _format_memory_error(runs: Runs) -> Cell:
    return _format_error([prediction.memory_error for _, prediction in runs], _check_intervals(runs, _pair_memory))


def _format_error(errors: Sequence[float | None], within: Sequence[bool]) -> Cell:
    middle = compute_median(errors)
    mood: Mood = "good" if all(within) else "bad"
    detail = "" if mood == "good" else "outside"  # not by colour alone
    return Cell() if middle is None else Cell(f"{middle:+.1%}", detail, mood)


def _make_group_formatter(name: str) -> Callable[[Runs], Cell]:
    """Return a cell for the predicted time of a group of causes; empty where it has none."""
    return lambda runs: _format_ms(sum_groups(runs[-1][1].step_parts)[name] or None)


def _make_field_formatter(name: str) -> Callable[[Runs], Cell]:
    """Return a cell for a measured field of `RunPrediction`."""
    return lambda runs: _format_ms(compute_median([getattr(prediction, name) for _, prediction in runs]))


_COLUMNS: tuple[tuple[str, str, str, int, Callable[[Runs], Cell]], ...] = (
    ("step", "ms predicted", "step time; the interval covers 90 % of published runs", 0, _format_predicted_step),
    ("step", "ms measured", "median step, without the warm-up of each attempt", 0, _format_measured_step),
    (
        "error",
        "of the step",
        "predicted over measured, minus 1; outside: of the interval",
        0,
        _format_step_error,
    ),
    ("memory", "GiB predicted", "of rank 0; on GPUs live tensors", 4, _format_predicted_memory),
    ("memory", "GiB measured", "peak of rank 0", 5, _format_measured_memory),
    (
        "error",
        "of memory",
        "predicted over measured, minus 1; outside: of the interval",
        0,
        _format_memory_error,
    ),
    (
        COMPUTATION,
        "ms predicted",
        "matmuls, attention, memory-bound work, optimizer, host",
        1,
        _make_group_formatter(COMPUTATION),
    ),
    (COMMUNICATION, "ms predicted", "exposed communication of all dimensions", 1, _make_group_formatter(COMMUNICATION)),
    (IDLE, "ms predicted", "pipeline ranks that wait for each other", 1, _make_group_formatter(IDLE)),
    ("work", "ms measured", "median step without waiting for data", 1, _make_field_formatter("work_seconds")),
    (
        "data",
        "ms measured",
        "waiting for data within a step, mean; not predicted",
        2,
        _make_field_formatter("data_seconds"),
    ),
    (
        "evaluation",
        "ms measured",
        "between steps, per step; not predicted",
        3,
        _make_field_formatter("evaluation_seconds"),
    ),
    (
        "checkpoints",
        "ms measured",
        "waiting for them, per step; not predicted",
        3,
        _make_field_formatter("checkpoint_seconds"),
    ),
)
