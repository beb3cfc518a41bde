"""metrics.jsonl in columns: what a comparison needs of it, read once and kept small."""

from __future__ import annotations

import dataclasses
import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.files.renamed_keys import rename_keys
from titan.report.findings import Numbers

KEYS = (
    "attempt", "step", "time", "tokens", "loss", "grad_norm", "step_seconds", "data_seconds",
    "tokens_per_second_per_device", "tflops_per_device", "mfu", "memory_gib",
    "expert_load_max", "expert_entropy", "expert_dropped",
)  # fmt: skip
"""The keys of a step's line, in the order of the columns of `Steps`."""
AT_ONCE = 1000
"""Lines that are parsed together."""


@dataclass(frozen=True)
class Steps:
    """Lines of steps; [lines] each, NaN where a line lacks the value, hash 0 where it has none.

    Attributes:
        attempt, step: as in metrics.jsonl.
        hash: of the batch.
        time, tokens, loss, norm: as in metrics.jsonl; time in seconds since 1970, NaN in old lines.
        seconds, waited: of the step; of it, waiting for data.
        rate: tokens/s per device.
        tflops, mfu, memory: TFLOP/s per device and their share of its peak; GiB.
        expert_load_max, expert_entropy, expert_dropped: as in metrics.jsonl; NaN in a model without experts.
    """

    attempt: NDArray[np.int64]
    step: NDArray[np.int64]
    hash: NDArray[np.uint64]
    time: Numbers
    tokens: Numbers
    loss: Numbers
    norm: Numbers
    seconds: Numbers
    waited: Numbers
    rate: Numbers
    tflops: Numbers
    mfu: Numbers
    memory: Numbers
    expert_load_max: Numbers
    expert_entropy: Numbers
    expert_dropped: Numbers

    def __len__(self) -> int:
        return len(self.step)

    def odd(self) -> NDArray[np.bool_]:
        """Return which steps had a loss or gradient norm that is not finite, and did not update the weights; [lines].

        A gradient norm that is missing from all lines was not measured.
        """
        norms = np.isfinite(self.norm)
        return np.asarray(~np.isfinite(self.loss) | (~norms & norms.any()))

    def at(self, where: NDArray[Any]) -> Steps:
        """Return the lines selected by a mask or indices."""
        return Steps(**{f.name: getattr(self, f.name)[where] for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class Metrics:
    """The content of metrics.jsonl.

    Attributes:
        steps: the lines of steps, in the order of the file.
        validations: the lines of validations, as they are.
        stalled: seconds that training waited for checkpoints.
        last: the time of the last line of each attempt, where lines have times.
        broken: the number of lines that are corrupt or truncated, and ignored.
        marks: the lines of steps whose loss was marked as a spike.
    """

    steps: Steps
    validations: tuple[Mapping[str, Any], ...]
    stalled: float
    last: Mapping[int, float]
    broken: int = 0
    marks: tuple[Mapping[str, Any], ...] = ()


@dataclass
class _Reading:
    """The lines read so far."""

    numbers: list[Numbers] = field(default_factory=list)
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    validations: list[Mapping[str, Any]] = field(default_factory=list)
    stalled: float = 0.0
    last: dict[int, float] = field(default_factory=dict)
    broken: int = 0
    marks: list[Mapping[str, Any]] = field(default_factory=list)

    def take(self, records: Sequence[Any]) -> None:
        """Add lines, all or none: raise `TypeError` or `ValueError` where values have the wrong type."""
        records = [rename_keys(record) for record in records]
        if not all(map(_plain, records)):
            raise ValueError("not a line of metrics.jsonl")
        known = [r for r in records if "step" in r]
        steps = [r for r in known if "loss" in r]
        numbers = np.array([tuple(map(r.get, KEYS)) for r in steps], dtype=np.float64).reshape(-1, len(KEYS))
        hashes = array("Q", [int(r.get("batch_hash") or "0", 16) for r in steps])
        stalled = sum(float(r["checkpoint_stall_seconds"]) for r in known if "checkpoint_stall_seconds" in r)
        times = {int(r.get("attempt", 1)): float(r["time"]) for r in known if r.get("time") is not None}
        self.numbers.append(numbers)
        self.hashes.extend(hashes)
        self.stalled += stalled
        self.last |= times
        self.marks += [{"attempt": 1} | r for r in steps if "spike" in r]
        self.validations += [{"attempt": 1} | r for r in known if "validation_loss" in r]


def read(file: Path) -> Metrics:
    """Return the columns of metrics.jsonl; corrupt and truncated lines are ignored, a missing file has none.

    Args:
        file: the run's metrics.jsonl.
    """
    reading = _Reading()
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            while some := list(itertools.islice(lines, AT_ONCE)):
                _take(reading, [line for line in some if not line.isspace()])
    except OSError:
        pass
    marks, validations = tuple(reading.marks), tuple(reading.validations)
    return Metrics(_steps(reading), validations, reading.stalled, reading.last, reading.broken, marks)


def _plain(record: Any) -> bool:
    """Return whether step and attempt of a line are valid, and its validation loss is a number."""
    if not isinstance(record, dict):
        return False
    counts = (record.get("step", 0), record.get("attempt", 1))
    loss = record.get("validation_loss")
    return all(type(n) is int and 0 <= n < 2**53 for n in counts) and (loss is None or type(loss) in (int, float))


def _take(reading: _Reading, lines: Sequence[str]) -> None:
    """Parse many lines at once, which is several times as fast; where that fails, in halves."""
    try:
        reading.take(json.loads(f"[{','.join(lines)}]"))
    except (ValueError, TypeError, OverflowError, RecursionError):
        if len(lines) == 1:
            reading.broken += 1
        else:
            half = len(lines) // 2
            _take(reading, lines[:half])
            _take(reading, lines[half:])


def _steps(reading: _Reading) -> Steps:
    table = np.concatenate([np.zeros((0, len(KEYS))), *reading.numbers])
    attempt, step, *columns = [np.ascontiguousarray(column) for column in table.T]
    return Steps(
        np.nan_to_num(attempt, nan=1).astype(np.int64),
        step.astype(np.int64),
        np.array(reading.hashes, dtype=np.uint64),
        *columns,
    )
