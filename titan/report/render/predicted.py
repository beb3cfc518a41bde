"""Predicted and measured step time and memory of a comparison as a table, for the variants that have a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from titan.console.numbers import bounds, fixed, rounded
from titan.estimate.causes import COMMUNICATION, COMPUTATION, IDLE, grouped
from titan.report import ranking
from titan.report.findings import Comparison, Interval, Predicted, RunFound, Variant
from titan.report.render.table_data import Cell, Column, Mood

TITLE = "Predicted and measured"
Runs = Sequence[tuple[RunFound, Predicted]]
"""The runs of a variant that have a prediction."""
Pair = tuple[Interval, float | None]
"""A predicted and a measured value."""


def variants(comparison: Comparison) -> list[int]:
    """Return the indices of the variants with a prediction, in the order of the main table."""
    return [i for i in ranking.order(comparison.variants) if _runs(comparison.variants[i])]


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns with a value for any of `variants`, in their order."""
    runs = [_runs(comparison.variants[i]) for i in variants(comparison)]
    made = (
        Column(name, unit, meaning, tuple(map(cell, runs)), weight) for name, unit, meaning, weight, cell in _COLUMNS
    )
    return tuple(column for column in made if any(cell.main for cell in column.cells))


def summary(comparison: Comparison) -> str:
    """Return how many runs were measured within the predicted intervals; empty where none was predicted."""
    runs = [pair for variant in comparison.variants for pair in _runs(variant)]
    judged = (("step time", _within(runs, _step)), ("memory", _within(runs, _memory)))
    parts = [f"{name} of {sum(within)} of {len(within)} runs" for name, within in judged if within]
    return f"Measured within the predicted interval: {', '.join(parts)}." if parts else ""


def _runs(variant: Variant) -> Runs:
    return [(run, run.predicted) for run in variant.runs if run.predicted is not None]


def _step(run: RunFound, predicted: Predicted) -> Pair:
    return predicted.step_seconds, run.speed.step_seconds.median if run.speed else None


def _memory(run: RunFound, predicted: Predicted) -> Pair:
    return predicted.memory_gib, run.speed.memory_gib if run.speed else None


def _within(runs: Runs, of: Callable[[RunFound, Predicted], Pair]) -> list[bool]:
    """Return for each run with a measured value whether it lies within the predicted interval."""
    pairs = [of(*run) for run in runs]
    return [(i.low or 0.0) <= measured <= (i.high or 0.0) for i, measured in pairs if measured is not None]


def _middle(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None


def _ms(seconds: float | None) -> Cell:
    return Cell() if seconds is None else Cell(rounded(1e3 * seconds))


def _gib(value: float) -> str:
    return fixed(value, 2 if value < 100 else 1)


def _predicted_step(runs: Runs) -> Cell:
    found = runs[-1][1].step_seconds
    return Cell(rounded(1e3 * found.estimate), bounds(found.low, found.high, lambda value: rounded(1e3 * value)))


def _predicted_memory(runs: Runs) -> Cell:
    found = runs[-1][1].memory_gib
    return Cell(_gib(found.estimate), bounds(found.low, found.high, _gib))


def _measured_step(runs: Runs) -> Cell:
    return _ms(_middle([_step(*run)[1] for run in runs]))


def _measured_memory(runs: Runs) -> Cell:
    middle = _middle([_memory(*run)[1] for run in runs])
    return Cell() if middle is None else Cell(_gib(middle))


def _step_error(runs: Runs) -> Cell:
    cell = _error([found.step_error for _, found in runs], _within(runs, _step))
    return Cell(cell.main, "shared machine") if cell.main and any(run.shared for run, _ in runs) else cell


def _memory_error(runs: Runs) -> Cell:
    return _error([found.memory_error for _, found in runs], _within(runs, _memory))


def _error(errors: Sequence[float | None], within: Sequence[bool]) -> Cell:
    middle = _middle(errors)
    mood: Mood = "good" if all(within) else "bad"
    return Cell() if middle is None else Cell(f"{middle:+.1%}", mood=mood)


def _group(name: str) -> Callable[[Runs], Cell]:
    """Return a cell for the predicted time of a group of causes; empty where it has none."""
    return lambda runs: _ms(grouped(runs[-1][1].step_parts)[name] or None)


def _measured(name: str) -> Callable[[Runs], Cell]:
    """Return a cell for a measured field of `Predicted`."""
    return lambda runs: _ms(_middle([getattr(found, name) for _, found in runs]))


_COLUMNS: tuple[tuple[str, str, str, int, Callable[[Runs], Cell]], ...] = (
    ("step", "ms predicted", "step time; nine in ten published runs lie in the interval", 0, _predicted_step),
    ("step", "ms measured", "median step, without the warm-up of each attempt", 0, _measured_step),
    (
        "error",
        "of the step",
        "predicted over measured, minus 1; colour: within the interval or not",
        0,
        _step_error,
    ),
    ("memory", "GiB predicted", "of rank 0; on GPUs live tensors", 4, _predicted_memory),
    ("memory", "GiB measured", "peak of rank 0", 5, _measured_memory),
    (
        "error",
        "of memory",
        "predicted over measured, minus 1; colour: within the interval or not",
        0,
        _memory_error,
    ),
    (COMPUTATION, "ms predicted", "matmuls, attention, memory-bound work, optimizer, host", 1, _group(COMPUTATION)),
    (COMMUNICATION, "ms predicted", "exposed communication of all dimensions", 1, _group(COMMUNICATION)),
    (IDLE, "ms predicted", "pipeline ranks that wait for each other", 1, _group(IDLE)),
    ("work", "ms measured", "median step without waiting for data", 1, _measured("work_seconds")),
    ("data", "ms measured", "waiting for data within a step, mean; not predicted", 2, _measured("data_seconds")),
    ("evaluation", "ms measured", "between steps, per step; not predicted", 3, _measured("evaluation_seconds")),
    ("checkpoints", "ms measured", "waiting for them, per step; not predicted", 3, _measured("checkpoint_seconds")),
)
