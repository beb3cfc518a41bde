"""Which runs shared a machine at the same time, so that their speeds are unreliable: by hosts and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from titan.report.collect import RawRun, parse_start_time

ALLOWED_OVERLAP = 2.0
"""Seconds that two attempts may overlap: a start is recorded in whole seconds."""


@dataclass(frozen=True, order=True)
class _HostSpan:
    """An attempt on a machine, in seconds since 1970."""

    host: str
    start: float
    end: float
    directory: Path


def find_shared_runs(runs: Sequence[RawRun]) -> set[Path]:
    """Return the directories of runs with an attempt during another run's attempt on the same machine.

    Hosts are those of the first ranks, and of each run's last attempt: env.json has no others.
    """
    spans = sorted(span for raw in runs for span in _list_spans(raw))
    directories: set[Path] = set()
    for _, host_spans in groupby(spans, key=lambda span: span.host):
        directories |= _find_overlaps(list(host_spans))
    return directories


def _list_spans(raw: RawRun) -> Iterator[_HostSpan]:
    for document in raw.documents if raw.host else ():
        start, end = parse_start_time(document), raw.metrics.last_times.get(int(document["attempt"]))
        if start is not None and end is not None:
            yield _HostSpan(raw.host, start, end, raw.directory)


def _find_overlaps(spans: Sequence[_HostSpan]) -> set[Path]:
    """Return the overlapping attempts of one host, in order of start: each is compared with the longest one."""
    directories: set[Path] = set()
    longest = spans[0]
    for span in spans[1:]:
        if span.start + ALLOWED_OVERLAP < min(longest.end, span.end):
            directories |= {span.directory, longest.directory}
        longest = max(longest, span, key=lambda candidate: candidate.end)
    return directories
