"""What a run records: `metrics.jsonl`, one line per step, and the trackers beside it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from titan.files import platform
from titan.metrics.reader import METRICS
from titan.metrics.trackers import Trackers


class Recorder:
    """Writes records to metrics.jsonl and passes them to the trackers; a context manager."""

    def __init__(
        self,
        directory: Path,
        attempt: int,
        trackers: Trackers,
        warn: Callable[[str], None],
        rename: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        """Take the run's directory, the attempt's number, the trackers, and what shows a warning and renames records.

        metrics.jsonl has a record as it is, the trackers what `rename` returns.
        """
        self.attempt, self.trackers, self.rename = attempt, trackers, rename
        self.writer = LineWriter(directory / METRICS, warn)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record; numbers that are not finite become null, as JSON has none."""
        record = {**record, "time": round(time.time(), 3), "attempt": self.attempt}
        self.writer.write(json.dumps({k: replace_non_finite(v) for k, v in record.items()}) + "\n")
        self.trackers.log(self.rename(record))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Pass the final result to the trackers and close them; a run that was stopped does not wait for uploads."""
        self.trackers.finish(self.rename(result), hurry=not result.get("finished", False))

    def close(self) -> None:
        """Let the trackers flush, also those of a run that failed, and write the lines that are still buffered."""
        self.trackers.finish({}, hurry=True)
        self.writer.write("")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LineWriter:
    """A file to which lines are appended, also across a full disk: what can't be written is buffered and retried."""

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file, self.warn, self.buffer, self.warned = file, warn, b"", False
        with contextlib.suppress(OSError), file.open("rb") as lines_file:
            lines_file.seek(-1, os.SEEK_END)
            self.buffer = b"" if lines_file.read() == b"\n" else b"\n"  # ends a truncated line

    def write(self, text: str) -> None:
        """Append text in one system call, so that a kill leaves no partial line."""
        self.buffer += text.encode()
        try:
            self._flush_buffer()
        except OSError as error:
            if not self.warned:
                self.warn(f"{self.file.name} can't be written ({error.strerror}); its lines are kept and retried")
            self.warned = True
        else:
            self.warned = False

    def _flush_buffer(self) -> None:
        """Write the buffer; the file is opened each time, since its directory may have been replaced."""
        if not self.file.parent.is_dir():
            self.file.parent.mkdir(parents=True)
            self.warn(f"{self.file.parent} was removed; it is created again, and {self.file.name} starts empty")
        with self.file.open("ab", buffering=0) as lines_file:
            while self.buffer:
                self.buffer = self.buffer[lines_file.write(self.buffer) :]


class StepSpeed:
    """Throughput, TFLOP/s and MFU from the seconds of a step.

    FLOPs per token: 6 for each weight of a matmul and 12 * layers * heads * head_dim * seq_len for attention,
    in full (not halved for causality) and without recomputation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    With document masks, seq_len is the length of a token's document. MFU is their share of the device's dense peak;
    None where that is not known.
    """

    def __init__(self, flops_per_token: Callable[[float], float], devices: int, peak_tflops: float | None) -> None:
        """Take FLOPs per token at a length, the devices, and a device's dense peak in TFLOP/s; None: not known."""
        self.flops_per_token, self.devices, self.peak_tflops = flops_per_token, devices, peak_tflops

    def compute(self, seconds: float, tokens: int, pairs: float) -> dict[str, float | None]:
        """Return the speed of a step.

        Args:
            tokens: of all ranks.
            pairs: pairs of tokens that attend to each other: tokens * seq_len, or less with document masks.
        """
        tokens_per_second = tokens / seconds
        tflops = tokens_per_second / self.devices * self.flops_per_token(pairs / tokens) / 1e12
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.devices,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }


def peak_memory_gib(device: torch.device) -> float:
    """Return this rank's peak memory: the allocator's on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_gib()


def peak_resident_gib() -> float:
    """Return the peak resident size of this process."""
    return platform.read_peak_resident_bytes() / 2**30


def replace_non_finite(value: Any) -> Any:
    """Return `value`, or None when it is a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
