"""metrics.jsonl in columns: what a comparison needs of it, read once and kept small."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.report.findings import Numbers

KEYS = (
    "life", "step", "time", "tokens", "loss", "grad_norm", "step_seconds", "data_seconds",
    "tokens_per_second_per_device", "tflops_per_device", "mfu", "memory_gib",
)  # fmt: skip
"""The keys of a step's line, in the order of the columns of `Steps`."""


@dataclass(frozen=True)
class Steps:
    """Lines that tell of a step; [lines] each, NaN where a line does not say, hash 0 where it has none.

    Attributes:
        life, step: as in metrics.jsonl.
        hash: of the batch.
        time, tokens, loss, norm: as in metrics.jsonl; time in seconds since 1970, NaN in old lines.
        seconds, waited: of the step; of it, waiting for data.
        rate: tokens a second a device.
        tflops, mfu, memory: a device's TFLOP/s and their share of its peak; GiB.
    """

    life: NDArray[np.int64]
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

    def __len__(self) -> int:
        return len(self.step)

    def at(self, where: NDArray[Any]) -> Steps:
        """The lines that a mask or indices choose."""
        return Steps(**{f.name: getattr(self, f.name)[where] for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class Metrics:
    """What metrics.jsonl says.

    Attributes:
        steps: the lines of steps, in the order of the file.
        validations: the lines of validations, as they are.
        stalled: seconds that training stood still for checkpoints.
        last: the time of the last line of each life, where lines have times.
    """

    steps: Steps
    validations: tuple[Mapping[str, Any], ...]
    stalled: float
    last: Mapping[int, float]


@dataclass
class _Reading:
    """What has been read so far."""

    numbers: array[float] = field(default_factory=lambda: array("d"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    validations: list[Mapping[str, Any]] = field(default_factory=list)
    stalled: float = 0.0
    last: dict[int, float] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a line; `TypeError` or `ValueError` where its values are of the wrong kind."""
        if "loss" in record:
            numbers = array("d", [math.nan if v is None else v for v in map(record.get, KEYS)])
            self.hashes.append(int(record.get("batch_hash") or "0", 16))
            self.numbers.extend(numbers)
        elif "validation_loss" in record:
            self.validations.append({"life": 1} | dict(record))
        self.stalled += record.get("checkpoint_stall_seconds") or 0.0
        if (time := record.get("time")) is not None:
            self.last[int(record.get("life", 1))] = float(time)


def read(file: Path) -> Metrics:
    """The columns of metrics.jsonl; lines that were cut short or make no sense are left out, a missing file has none.

    Args:
        file: the run's metrics.jsonl.
    """
    reading = _Reading()
    try:
        with file.open("rb") as lines:
            for line in lines:
                _take(reading, line)
    except OSError:
        pass
    return Metrics(_steps(reading), tuple(reading.validations), reading.stalled, reading.last)


def _take(reading: _Reading, line: bytes) -> None:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            reading.take(record)
    except (ValueError, TypeError, OverflowError):
        return


def _steps(reading: _Reading) -> Steps:
    table = np.array(reading.numbers, dtype=np.float64).reshape(-1, len(KEYS))
    life, step, *columns = [np.ascontiguousarray(column) for column in table.T]
    return Steps(
        np.nan_to_num(life, nan=1).astype(np.int64),
        step.astype(np.int64),
        np.array(reading.hashes, dtype=np.uint64),
        *columns,
    )
