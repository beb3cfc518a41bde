"""Reading metrics.jsonl: one JSON object per line, over all attempts of a run. Free of torch and numpy.

Every reader of the file is built on `parse_file` or `read_last_steps`: a line that is truncated, or whose values have
other types, is skipped and costs only itself. A step that a later attempt repeats counts as that attempt did it
(`merge_steps`).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.files.untrusted import open_regular_file

METRICS = "metrics.jsonl"
"""The file's name in a run's directory."""
METRIC_PREFIX = "hooks/"
"""The prefix of a hook's own metrics in records: hooks/NAME/METRIC."""
Record = dict[str, Any]
LINES_PER_PARSE = 1000
"""Lines that are parsed together."""
TAIL_BYTES = 1 << 16
"""How much of the end of the file is read at first for the last steps."""
MOST_TAIL_BYTES = 1 << 25
"""How much of it at most: behind that a file holds no steps, or a line that is none."""
COUNTS = {"step": 0, "attempt": 1}
"""Values that are whole numbers from 0, if there, and what they are where a line lacks them."""
NUMBERS = ("loss", "validation_loss", "tokens_per_second", "step_seconds")
"""Values that are numbers, if there, on which readers rely; null where one is not finite."""
OF_STEP = ("time", "attempt")
"""Values of the line of the training step, where a validation or a checkpoint of the step has a line too."""


def read_records(file: Path) -> list[Record]:
    """Return the records of metrics.jsonl in its order; a missing file has none."""
    records: list[Record] = []
    parse_file(file, records.extend)
    return records


def read_steps(file: Path, limits: Mapping[int, float] | None = None) -> list[Record]:
    """Return one record per step of metrics.jsonl, see `merge_steps`."""
    return merge_steps(read_records(file), limits or {})


def read_last_steps(file: Path) -> Iterator[Record]:
    """Yield the records of training steps in the last `MOST_TAIL_BYTES` of metrics.jsonl, the last one first."""
    return (record for record in _read_last_records(file) if "loss" in record and "step" in record)


def read_new_records(file: Path, start: int) -> tuple[list[Record], int]:
    """Return the records after a byte of metrics.jsonl, and the byte where the next call goes on.

    A line without its end waits for the next call. A file that is missing has no records.
    """
    records: list[Record] = []
    with contextlib.suppress(OSError, ValueError), open_regular_file(file) as content:
        content.seek(start)
        complete, newline, _ = content.read().rpartition(b"\n")
        start += len(complete) + len(newline)
        _parse_lines([line.decode(errors="replace") for line in complete.split(b"\n") if line.strip()], records.extend)
    return records, start


def ends_with_attempt(file: Path, attempt: int) -> bool:
    """Return whether the last record of metrics.jsonl is one of an attempt."""
    return next((record.get("attempt", 1) == attempt for record in _read_last_records(file)), False)


def merge_steps(records: Iterable[Record], limits: Mapping[int, float]) -> list[Record]:
    """Return one record per step, in rising order: all that was recorded since the step was last trained.

    Args:
        records: in the order of the file.
        limits: the last step of each attempt that counts; without a limit all steps of an attempt count.
    """
    steps: dict[int, Record] = {}
    for record in records:
        if "step" in record and record["step"] <= limits.get(record.get("attempt", 1), math.inf):
            steps[record["step"]] = _merge_records(steps.get(record["step"], {}), record)
    return [steps[step] for step in sorted(steps)]


def _merge_records(previous: Record, record: Record) -> Record:
    """Return what is known of a step after another record of it: a training step replaces one that it repeats."""
    if "loss" in previous and "loss" in record:
        return record
    of_step = previous if "loss" in previous else record
    return {**previous, **record, **{name: of_step[name] for name in OF_STEP if name in of_step}}


def parse_file(file: Path, take: Callable[[list[Record]], object]) -> int:
    """Parse metrics.jsonl from its beginning and hand its records to `take`, many at a time.

    Args:
        file: the run's metrics.jsonl; one that is missing or can't be read has no records.
        take: takes all of the given records or none: where it raises TypeError, ValueError, KeyError or OverflowError,
            it is called again with half of them, so that only lines that it rejects alone are left out.

    Returns:
        The number of lines that are left out.
    """
    invalid_count = 0
    try:
        with open_regular_file(file) as content:
            lines = io.TextIOWrapper(content, encoding="utf-8", errors="replace")
            while batch := list(itertools.islice(lines, LINES_PER_PARSE)):
                invalid_count += _parse_lines([line for line in batch if not line.isspace()], take)
    except (OSError, ValueError):
        pass
    return invalid_count


def _parse_lines(lines: Sequence[str], take: Callable[[list[Record]], object]) -> int:
    """Parse lines at once, which is several times as fast; where that fails, in halves. Returns the invalid lines."""
    try:
        records = json.loads(f"[{','.join(lines)}]")
        if len(records) != len(lines) or not all(map(_is_valid_record, records)):
            raise ValueError("not lines of metrics.jsonl")
        take(records)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        if len(lines) == 1:
            return 1
        half = len(lines) // 2
        return _parse_lines(lines[:half], take) + _parse_lines(lines[half:], take)
    return 0


def _is_valid_record(record: Any) -> bool:
    """Return whether the values on which readers rely have their types."""
    if type(record) is not dict:
        return False
    get = record.get
    has_counts = all(type(n := get(name, default)) is int and 0 <= n < 2**53 for name, default in COUNTS.items())
    has_numbers = _NUMBER_TYPES.issuperset(map(type, map(get, NUMBERS)))
    return has_counts and has_numbers and type(get("tokens", 0)) in (int, float)


_NUMBER_TYPES = frozenset({int, float, type(None)})


def _read_last_records(file: Path) -> Iterator[Record]:
    """Yield the records of the file, the last one first; only as much of the file is read as they take."""
    with contextlib.suppress(OSError, ValueError):
        for line in _read_lines_backwards(file):
            records: list[Record] = []
            _parse_lines([line.decode(errors="replace")], records.extend)
            yield from records


def _read_lines_backwards(file: Path) -> Iterator[bytes]:
    """Yield the last lines of the file, the last one first; each read takes twice as much, so long lines cost once."""
    with open_regular_file(file) as content:
        start, size, rest = content.seek(0, os.SEEK_END), TAIL_BYTES, b""
        first = max(0, start - MOST_TAIL_BYTES)
        while start > first:
            end, start = start, max(first, start - size)
            size *= 2
            content.seek(start)
            rest, *lines = (content.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
        if not start:
            yield rest
