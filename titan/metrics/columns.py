"""metrics.jsonl in columns: what a comparison needs of it, read once and kept small."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.metrics.reader import Record, parse_file

KEYS = (
    "attempt", "step", "time", "tokens", "loss", "grad_norm", "lr", "step_seconds", "data_seconds",
    "tokens_per_second_per_device", "tflops_per_device", "mfu", "memory_gib",
    "expert_load_max", "expert_entropy", "expert_dropped",
)  # fmt: skip
"""The keys of a step's line, in the order of the columns of `StepColumns`."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class StepColumns:
    """Lines of steps; [lines] each, NaN where a line lacks the value, hash 0 where it has none.

    Attributes:
        attempt: as in metrics.jsonl.
        step: as in metrics.jsonl.
        hash: of the batch.
        time: as in metrics.jsonl, in seconds since 1970.
        tokens: as in metrics.jsonl.
        loss: as in metrics.jsonl.
        norm: as in metrics.jsonl.
        lr: learning rate of the step.
        seconds: of the step.
        data_seconds: of the step, waiting for data.
        rate: tokens/s per device.
        tflops: TFLOP/s per device.
        mfu: these as a share of the device's peak.
        memory: peak memory in GiB.
        expert_load_max: as in metrics.jsonl; NaN in a model without experts.
        expert_entropy: likewise.
        expert_dropped: likewise.
    """

    attempt: NDArray[np.int64]
    step: NDArray[np.int64]
    hash: NDArray[np.uint64]
    time: Numbers
    tokens: Numbers
    loss: Numbers
    norm: Numbers
    lr: Numbers
    seconds: Numbers
    data_seconds: Numbers
    rate: Numbers
    tflops: Numbers
    mfu: Numbers
    memory: Numbers
    expert_load_max: Numbers
    expert_entropy: Numbers
    expert_dropped: Numbers

    def __len__(self) -> int:
        return len(self.step)

    def is_nonfinite(self) -> NDArray[np.bool_]:
        """Return which steps had a loss or gradient norm that is not finite, and did not update the weights; [lines].

        A gradient norm that is missing from all lines was not measured.
        """
        norms = np.isfinite(self.norm)
        return np.asarray(~np.isfinite(self.loss) | (~norms & norms.any()))

    def select_lines(self, selection: NDArray[Any]) -> StepColumns:
        """Return the lines selected by a mask or indices."""
        return StepColumns(**{f.name: getattr(self, f.name)[selection] for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class MetricsFile:
    """The content of metrics.jsonl.

    Attributes:
        steps: the lines of steps, in the order of the file.
        validations: the lines of validations, as they are.
        stall_seconds: seconds that training waited for checkpoints.
        last_times: the time of the last line of each attempt.
        corrupt_lines: the number of lines that are corrupt or truncated, and ignored.
        spike_marks: the lines of steps whose loss was marked as a spike.
    """

    steps: StepColumns
    validations: tuple[Mapping[str, Any], ...]
    stall_seconds: float
    last_times: Mapping[int, float]
    corrupt_lines: int = 0
    spike_marks: tuple[Mapping[str, Any], ...] = ()


@dataclass
class _StepLines:
    """The lines read so far."""

    numbers: list[Numbers] = field(default_factory=list)
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    validations: list[Mapping[str, Any]] = field(default_factory=list)
    stall_seconds: float = 0.0
    last_times: dict[int, float] = field(default_factory=dict)
    spike_marks: list[Mapping[str, Any]] = field(default_factory=list)

    def add_records(self, records: Sequence[Record]) -> None:
        """Add lines, all or none: raise TypeError, ValueError, KeyError or OverflowError where they are invalid."""
        step_records = [r for r in records if "step" in r]
        training_records = [r for r in step_records if "loss" in r]
        numbers = np.array([tuple(map(r.get, KEYS)) for r in training_records], dtype=np.float64).reshape(-1, len(KEYS))
        hashes = array("Q", [int(r.get("batch_hash") or "0", 16) for r in training_records])
        stall_seconds = sum(
            float(r["checkpoint_stall_seconds"]) for r in step_records if "checkpoint_stall_seconds" in r
        )
        times = {int(r["attempt"]): float(r["time"]) for r in step_records}
        self.numbers.append(numbers)
        self.hashes.extend(hashes)
        self.stall_seconds += stall_seconds
        self.last_times |= times
        self.spike_marks += [r for r in training_records if "spike" in r]
        self.validations += [r for r in step_records if "validation_loss" in r]


def read(file: Path) -> MetricsFile:
    """Return the columns of metrics.jsonl; corrupt and truncated lines are ignored, a missing file has none."""
    reader = _StepLines()
    corrupt_lines = parse_file(file, reader.add_records)
    spike_marks, validations = tuple(reader.spike_marks), tuple(reader.validations)
    return MetricsFile(
        _build_columns(reader), validations, reader.stall_seconds, reader.last_times, corrupt_lines, spike_marks
    )


def _build_columns(reader: _StepLines) -> StepColumns:
    table = np.concatenate([np.zeros((0, len(KEYS))), *reader.numbers])
    attempt, step, *columns = [np.ascontiguousarray(column) for column in table.T]
    return StepColumns(
        attempt.astype(np.int64),
        step.astype(np.int64),
        np.array(reader.hashes, dtype=np.uint64),
        *columns,
    )
