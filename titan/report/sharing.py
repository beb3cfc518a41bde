"""Which runs shared a machine at the same time, so that their speeds are unreliable: by hosts and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from titan.report.collect import Raw, began

TOUCH = 2.0
"""Seconds that two attempts may overlap: a start is recorded in whole seconds."""


@dataclass(frozen=True, order=True)
class _Span:
    """An attempt on a machine, in seconds since 1970."""

    host: str
    start: float
    end: float
    directory: Path


def shared(runs: Sequence[Raw]) -> set[Path]:
    """Return the directories of runs with an attempt during another run's attempt on the same machine.

    Hosts are those of the first ranks, and of each run's last attempt: env.json has no others.
    """
    spans = sorted(span for raw in runs for span in _spans(raw))
    found: set[Path] = set()
    for _, of_host in groupby(spans, key=lambda span: span.host):
        found |= _overlapping(list(of_host))
    return found


def _spans(raw: Raw) -> Iterator[_Span]:
    for document in raw.documents if raw.host else ():
        start, end = began(document), raw.metrics.last.get(int(document["attempt"]))
        if start is not None and end is not None:
            yield _Span(raw.host, start, end, raw.directory)


def _overlapping(spans: Sequence[_Span]) -> set[Path]:
    """Return the overlapping attempts of one host, in order of start: each is compared with the longest one."""
    found: set[Path] = set()
    longest = spans[0]
    for span in spans[1:]:
        if span.start + TOUCH < min(longest.end, span.end):
            found |= {span.directory, longest.directory}
        longest = max(longest, span, key=lambda each: each.end)
    return found
