"""A run over its attempts: the lines that count, their cost, and the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.metrics.columns import StepColumns
from titan.report.collect import RawRun, count_devices, parse_start_time
from titan.report.findings import Curves, Numbers, RunCost

HOUR = 3600.0


@dataclass(frozen=True)
class AttemptSpan:
    """An attempt in time.

    Attributes:
        number: of the attempt.
        devices: that it had.
        start: seconds from its beginning to its first step; 0 where it has none.
        seconds: from its beginning to its last line.
        ends: seconds from its beginning to the end of each of its lines of steps.
    """

    number: int
    devices: int
    start: float
    seconds: float
    ends: Numbers


class History:
    """The lines of a run that count."""

    def __init__(self, raw: RawRun) -> None:
        self.raw = raw
        self._lines = raw.metrics.steps
        self._limits = find_step_limits(raw.documents)
        self._counted_lines = _find_last_lines(self._lines, self._limits)
        self.steps = self._lines.select_lines(self._counted_lines)
        self.validations = self._select_validations()
        self.spike_marks = self._select_last(self.raw.metrics.spike_marks)

    @cached_property
    def spans(self) -> tuple[AttemptSpan, ...]:
        """Return the attempts in time."""
        return tuple(self._build_span(document) for document in self.raw.documents)

    def _build_span(self, document: Mapping[str, Any]) -> AttemptSpan:
        number = int(document["attempt"])
        lines = self._lines.select_lines(self._lines.attempt == number)
        last_time = self.raw.metrics.last_times.get(number)
        if last_time is None:  # it wrote no line
            return AttemptSpan(number, count_devices(document), 0.0, 0.0, np.empty(0))
        first_time = float(lines.time[0] - lines.seconds[0]) if len(lines) else last_time
        start = parse_start_time(document)
        start = first_time if start is None else min(start, first_time)
        ends = lines.time - start
        return AttemptSpan(
            number,
            count_devices(document),
            first_time - start if len(lines) else 0.0,
            max(0.0, last_time - start),
            ends,
        )

    @cached_property
    def device_hours(self) -> Numbers:
        """Return the device-hours up to the end of each step that counts; [steps]."""
        hours_spent, line_hours = 0.0, np.zeros(len(self._lines))
        for span in self.spans:
            line_hours[self._lines.attempt == span.number] = hours_spent + span.devices * span.ends / HOUR
            hours_spent += span.devices * span.seconds / HOUR
        return (
            np.maximum.accumulate(line_hours[self._counted_lines])
            if len(self._counted_lines)
            else line_hours[self._counted_lines]
        )

    @property
    def last_validation(self) -> float:
        """Return the loss of the last validation; infinite where it is not finite, 0 without validations."""
        if not self.validations:
            return 0.0
        value = self.validations[-1].get("validation_loss")
        return float(value) if value is not None and math.isfinite(value) else math.inf

    def compute_cost(self) -> RunCost:
        """Return the cost of the run."""
        total = sum(span.seconds for span in self.spans)
        useful = float(np.nansum(self.steps.seconds))
        return RunCost(
            device_hours=sum(span.devices * span.seconds for span in self.spans) / HOUR,
            goodput=min(1.0, useful / total) if total else None,
            attempts=len(self.spans),
            start_seconds=sum(span.start for span in self.spans),
            checkpoint_seconds=self.raw.metrics.stall_seconds,
            data_seconds=float(np.nansum(self._lines.data_seconds)),
            steps_again=len(self._lines) - len(self._counted_lines),
        )

    def build_curves(self) -> Curves:
        """Return the curves of the run."""
        records = self.validations
        return Curves(
            steps=self.steps.step,
            tokens=self.steps.tokens,
            losses=self.steps.loss,
            device_hours=self.device_hours,
            validation_steps=np.array([v["step"] for v in records], dtype=np.int64),
            validation_tokens=_build_column(records, "tokens"),
            validation=_build_column(records, "validation_loss"),
            bits_per_byte=_build_column(records, "bits_per_byte"),
        )

    def _select_validations(self) -> tuple[Mapping[str, Any], ...]:
        """Return the last validation of each step that counts."""
        last_validations = self._select_last(self.raw.metrics.validations)
        return tuple(last_validations[step] for step in sorted(last_validations))

    def _select_last(self, records: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Return the last of these records of each step that counts, by step."""
        return {int(r["step"]): r for r in records if r["step"] <= self._limits.get(int(r["attempt"]), math.inf)}


def find_step_limits(documents: tuple[Mapping[str, Any], ...]) -> dict[int, float]:
    """Return the last step of each attempt that counts: later attempts repeat the steps after it."""
    step_limits, limit = {}, math.inf
    for document in reversed(documents):
        step_limits[int(document["attempt"])] = limit
        limit = min(limit, float(document.get("from_step") or 0))
    return step_limits


def _find_last_lines(lines: StepColumns, limits: Mapping[int, float]) -> NDArray[np.int64]:
    """Return the indices of the last line of each step that counts, in rising order of steps."""
    last_steps = np.array([limits.get(int(attempt), math.inf) for attempt in np.unique(lines.attempt)])
    is_counted = (
        lines.step <= last_steps[np.searchsorted(np.unique(lines.attempt), lines.attempt)]
        if len(lines)
        else np.zeros(0, bool)
    )
    indices = np.flatnonzero(is_counted)[::-1]
    _, first_indices = np.unique(lines.step[indices], return_index=True)
    return indices[first_indices]


def _build_column(records: tuple[Mapping[str, Any], ...], key: str) -> Numbers:
    values = [record.get(key) for record in records]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
