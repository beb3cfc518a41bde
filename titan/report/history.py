"""A run over its attempts: the lines that count, their cost, and the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.report.collect import Raw, began, devices
from titan.report.columns import Steps
from titan.report.findings import Cost, Curves, Numbers

HOUR = 3600.0


@dataclass(frozen=True)
class Span:
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

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self._lines = raw.metrics.steps
        self._limits = limits(raw.documents)
        self._kept = _last_of_each(self._lines, self._limits)
        self.steps = self._lines.at(self._kept)
        self.validations = self._validations()
        self.marks = self._last(self.raw.metrics.marks)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the attempts in time."""
        return tuple(self._span(document) for document in self.raw.documents)

    def _span(self, document: Mapping[str, Any]) -> Span:
        number = int(document["attempt"])
        lines = self._lines.at(self._lines.attempt == number)
        last = self.raw.metrics.last.get(number)
        if last is None or not np.isfinite(lines.time).all():  # lines of older versions have no time
            ends = np.cumsum(np.nan_to_num(lines.seconds))
            return Span(number, devices(document), 0.0, float(ends[-1]) if len(ends) else 0.0, ends)
        first = float(lines.time[0] - lines.seconds[0]) if len(lines) else last
        start = began(document)
        start = first if start is None else min(start, first)
        ends = lines.time - start
        return Span(number, devices(document), first - start if len(lines) else 0.0, max(0.0, last - start), ends)

    @cached_property
    def device_hours(self) -> Numbers:
        """Return the device-hours up to the end of each step that counts; [steps]."""
        spent, of_line = 0.0, np.zeros(len(self._lines))
        for span in self.spans:
            of_line[self._lines.attempt == span.number] = spent + span.devices * span.ends / HOUR
            spent += span.devices * span.seconds / HOUR
        return np.maximum.accumulate(of_line[self._kept]) if len(self._kept) else of_line[self._kept]

    @property
    def last_validation(self) -> float:
        """Return the loss of the last validation; infinite where it is not finite, 0 without validations."""
        if not self.validations:
            return 0.0
        value = self.validations[-1].get("validation_loss")
        return float(value) if value is not None and math.isfinite(value) else math.inf

    def cost(self) -> Cost:
        """Return the cost of the run."""
        total = sum(span.seconds for span in self.spans)
        useful = float(np.nansum(self.steps.seconds))
        return Cost(
            device_hours=sum(span.devices * span.seconds for span in self.spans) / HOUR,
            goodput=min(1.0, useful / total) if total else None,
            attempts=len(self.spans),
            start_seconds=sum(span.start for span in self.spans),
            checkpoint_seconds=self.raw.metrics.stalled,
            data_seconds=float(np.nansum(self._lines.waited)),
            steps_again=len(self._lines) - len(self._kept),
        )

    def curves(self) -> Curves:
        """Return the curves of the run."""
        records = self.validations
        return Curves(
            steps=self.steps.step,
            tokens=self.steps.tokens,
            losses=self.steps.loss,
            device_hours=self.device_hours,
            validation_steps=np.array([v["step"] for v in records], dtype=np.int64),
            validation_tokens=_column(records, "tokens"),
            validation=_column(records, "validation_loss"),
            bits_per_byte=_column(records, "bits_per_byte"),
        )

    def _validations(self) -> tuple[Mapping[str, Any], ...]:
        """Return the last validation of each step that counts."""
        last = self._last(self.raw.metrics.validations)
        return tuple(last[step] for step in sorted(last))

    def _last(self, records: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Return the last of these records of each step that counts, by step."""
        return {int(r["step"]): r for r in records if r["step"] <= self._limits.get(int(r["attempt"]), math.inf)}


def limits(documents: tuple[Mapping[str, Any], ...]) -> dict[int, float]:
    """Return the last step of each attempt that counts: later attempts repeat the steps after it."""
    out, limit = {}, math.inf
    for document in reversed(documents):
        out[int(document["attempt"])] = limit
        limit = min(limit, float(document.get("from_step") or 0))
    return out


def _last_of_each(lines: Steps, limits: Mapping[int, float]) -> NDArray[np.int64]:
    """Return the indices of the last line of each step that counts, in rising order of steps."""
    most = np.array([limits.get(int(attempt), math.inf) for attempt in np.unique(lines.attempt)])
    counts = (
        lines.step <= most[np.searchsorted(np.unique(lines.attempt), lines.attempt)]
        if len(lines)
        else np.zeros(0, bool)
    )
    where = np.flatnonzero(counts)[::-1]
    _, first = np.unique(lines.step[where], return_index=True)
    return where[first]


def _column(records: tuple[Mapping[str, Any], ...], key: str) -> Numbers:
    values = [record.get(key) for record in records]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
