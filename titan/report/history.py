"""A run over its attempts: the lines that count, their cost and curves; divergence and spikes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.metrics.columns import StepColumns
from titan.metrics.spikes import MIN_RISE
from titan.report.collect import RawRun, count_devices
from titan.report.findings import Curves, Numbers, RunCost, Spike
from titan.report.run_end import parse_start_time

HOUR = 3600.0
SILENT_REASONS = ("it ended without an error message", "it ended after step")
"""How the reason begins for a run that ended without an error message."""
SPIKE_DEVIATIONS = 10.0
"""A spike is so many times the median absolute deviation away: 6.7 standard deviations of normal noise."""
LAST_NONFINITE = 10
"""Steps at the end, none of which is finite, of a run that diverged and had no validation."""
SPIKE_BLOCK = 50
"""Steps whose median is the usual loss for as many steps after them."""


@dataclass(frozen=True)
class AttemptSpan:
    """An attempt in time.

    Attributes:
        number: of the attempt.
        devices: that it had.
        start: seconds from its beginning to its first step; 0 where it has none.
        lead: likewise, with what its first step takes longer than the others, such as compilation.
        seconds: from its beginning to its last line.
        ends: seconds from its beginning to the end of each of its lines of steps.
    """

    number: int
    devices: int
    start: float
    lead: float
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
        validations = self._select_last(self.raw.metrics.validations)
        self.validations = tuple(validations[step] for step in sorted(validations))
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
            return AttemptSpan(number, count_devices(document), 0.0, 0.0, 0.0, np.empty(0))
        first_time = float(lines.time[0] - lines.step_seconds[0]) if len(lines) else last_time
        start = parse_start_time(document)
        start = first_time if start is None else min(start, first_time)
        lead = start_seconds = first_time - start if len(lines) else 0.0
        if len(lines):  # the first step may take longer than usual
            lead += max(0.0, float(lines.step_seconds[0] - np.nanmedian(lines.step_seconds)))
        seconds = max(0.0, last_time - start)
        return AttemptSpan(number, count_devices(document), start_seconds, lead, seconds, lines.time - start)

    @cached_property
    def device_hours(self) -> Numbers:
        """Return the device-hours up to the end of each step that counts, without start-up; [steps]."""
        hours_spent, line_hours = 0.0, np.zeros(len(self._lines))
        for span in self.spans:
            line_hours[self._lines.attempt == span.number] = hours_spent + span.devices * (span.ends - span.lead) / HOUR
            hours_spent += span.devices * (span.seconds - span.lead) / HOUR
        return np.maximum.accumulate(line_hours[self._counted_lines])

    @property
    def final_validation(self) -> Mapping[str, Any]:
        """Return the final validation of a finished run, from metrics.jsonl or else result.json; else empty."""
        if self.raw.state != "finished":
            return {}
        last = self.validations[-1] if self.validations else {}
        return last if last.get("step") == self.raw.planned_steps else self.raw.result

    def compute_cost(self) -> RunCost:
        """Return the cost of the run."""
        total = sum(span.seconds for span in self.spans)
        useful = float(np.nansum(self.steps.step_seconds))
        return RunCost(
            device_hours=sum(span.devices * span.seconds for span in self.spans) / HOUR,
            goodput=min(1.0, useful / total) if total else None,
            attempts=len(self.spans),
            training_hours=sum(span.devices * (span.seconds - span.lead) for span in self.spans) / HOUR,
            start_seconds=sum(span.start for span in self.spans),
            checkpoint_seconds=self.raw.metrics.stall_seconds,
            data_seconds=float(np.nansum(self._lines.data_seconds)),
            steps_again=len(self._lines) - len(self._counted_lines),
        )

    def build_curves(self) -> Curves:
        """Return the curves of the run."""
        records = self.validations

        def build_column(key: str) -> Numbers:
            values = [record.get(key) for record in records]
            return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

        return Curves(
            steps=self.steps.step,
            tokens=self.steps.tokens,
            losses=self.steps.loss,
            device_hours=self.device_hours,
            validation_steps=np.array([v["step"] for v in records], dtype=np.int64),
            validation_tokens=build_column("tokens"),
            validation=build_column("validation_loss"),
            bits_per_byte=build_column("bits_per_byte"),
        )

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
    attempts, positions = np.unique(lines.attempt, return_inverse=True)
    last_steps = np.array([limits.get(int(attempt), math.inf) for attempt in attempts])
    indices = np.flatnonzero(lines.step <= last_steps[positions])[::-1]
    _, first_indices = np.unique(lines.step[indices], return_index=True)
    return indices[first_indices]


def has_diverged(history: History) -> bool:
    """Return whether a run has no finite result because of its recipe."""
    raw = history.raw
    finite = np.flatnonzero(~history.steps.is_nonfinite())
    nonfinite = len(history.steps) - (int(finite[-1]) + 1 if len(finite) else 0)  # steps at the end
    if raw.state == "finished":
        value = history.final_validation.get("validation_loss", 0.0 if nonfinite < LAST_NONFINITE else None)
        return value is None or not np.isfinite(value) or nonfinite >= SPIKE_BLOCK
    if raw.state not in ("failed", "stopped"):
        return False
    bad_steps = int(raw.config["training"].get("bad_steps") or 3)  # the last one of them has no line
    is_silent = (raw.reason or "").startswith(SILENT_REASONS)
    return raw.gave_up or (is_silent and nonfinite >= max(1, bad_steps - 1))


def find_spikes(history: History) -> tuple[Spike, ...]:
    """Return the loss spikes: those that the run marked, and those far above the median of the block before."""
    steps, losses = history.steps.step, history.steps.loss
    usual = _compute_usual_losses(losses)
    is_high = np.isin(steps, list(history.spike_marks)) | np.isfinite(usual)
    high = np.flatnonzero(is_high & np.isfinite(losses))  # another note counts the others
    groups = np.split(high, np.flatnonzero(np.diff(high) > SPIKE_BLOCK) + 1) if len(high) else []
    tops = [int(group[np.argmax(losses[group])]) for group in groups]
    spikes = (_build_spike(int(steps[i]), float(losses[i]), float(usual[i]), history) for i in tops)
    return tuple(spike for spike in spikes if np.isfinite(spike.usual))  # a damaged mark has no median


def _build_spike(step: int, loss: float, usual: float, history: History) -> Spike:
    mark = history.spike_marks.get(step, {})
    rows = mark.get("rows")
    has_rows = isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows)
    median = mark.get("spike_median")
    usual = float(median) if isinstance(median, (int, float)) else usual
    return Spike(step, loss, usual, (rows[0], rows[1]) if rows and has_rows else None)


def _compute_usual_losses(losses: Numbers) -> Numbers:
    """Return the median of the block before each loss that is far above it; NaN for other losses."""
    blocks, usual_losses = len(losses) // SPIKE_BLOCK, np.full(len(losses), np.nan)
    if blocks < 2:
        return usual_losses
    whole = losses[: blocks * SPIKE_BLOCK].reshape(blocks, SPIKE_BLOCK)
    finite = np.where(np.isfinite(whole), whole, np.inf)  # a step that is not finite is not low
    usual = np.median(finite, axis=1)
    deviations = np.median(np.abs(finite - np.where(np.isfinite(usual), usual, 0.0)[:, None]), axis=1)
    limit = usual + np.maximum(SPIKE_DEVIATIONS * deviations, MIN_RISE)  # infinite where no step is finite
    block = np.arange(len(losses)) // SPIKE_BLOCK
    high = np.flatnonzero((block > 0) & (losses > limit[np.maximum(block, 1) - 1]))
    usual_losses[high] = usual[block[high] - 1]
    return usual_losses
