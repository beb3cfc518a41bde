"""What a run writes down: `metrics.jsonl`, a line a step, and the trackers beside it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from titan.metrics.plot import read_lines
from titan.metrics.trackers import Trackers
from titan.model.schema import Llama


class Recorder:
    """Writes a record to metrics.jsonl and hands it to the trackers; a context manager."""

    def __init__(self, directory: Path, attempt: int, trackers: Trackers, warn: Callable[[str], None]) -> None:
        """Take the run's directory, the number of its attempt, the trackers, and what shows a warning."""
        self.attempt, self.trackers = attempt, trackers
        self.lines = Lines(directory / "metrics.jsonl", warn)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record; numbers that are not finite become null, as JSON has none."""
        record = {**record, "time": round(time.time(), 3), "attempt": self.attempt}
        self.lines.write(json.dumps({k: finite(v) for k, v in record.items()}) + "\n")
        self.trackers.log(record)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand the final figures to the trackers and close them."""
        self.trackers.finish(result)

    def close(self) -> None:
        """Let the trackers write what they still hold, also of a run that failed, and close the file."""
        self.trackers.finish({})
        self.lines.write("")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Lines:
    """A file that grows by lines, and outlives a full disk: what can't be written is kept, and written later."""

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file, self.warn, self.kept, self.warned = file, warn, b"", False
        with contextlib.suppress(OSError), file.open("rb") as there:
            there.seek(-1, os.SEEK_END)
            self.kept = b"" if there.read() == b"\n" else b"\n"  # a line that was cut short ends here

    def write(self, text: str) -> None:
        """Add text, in one call to the system, so that a kill cuts no line."""
        self.kept += text.encode()
        try:
            self._flush()
        except OSError as error:
            if not self.warned:
                self.warn(f"{self.file.name} can't be written ({error.strerror}): its lines are kept until it can")
            self.warned = True
        else:
            self.warned = False

    def _flush(self) -> None:
        """Write what is kept; the file is opened each time, since its directory may be another by now."""
        if not self.file.parent.is_dir():
            self.file.parent.mkdir(parents=True)
            self.warn(f"{self.file.parent} was gone: it is made again, and {self.file.name} begins anew")
        with self.file.open("ab", buffering=0) as out:
            while self.kept:
                self.kept = self.kept[out.write(self.kept) :]


class Speed:
    """Throughput, TFLOP/s and MFU from the seconds of a step.

    FLOPs per token: 6 for each weight of a matrix product and 12 * layers * heads * head_dim * seq_len for attention,
    in full (not halved for causality) and without what checkpointing computes again (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B). Where documents are kept apart, a token has its document's length for seq_len. MFU is
    their share of the device's dense peak; None where that is not known.
    """

    def __init__(self, model: Llama, devices: int, peak_tflops: float | None) -> None:
        """Take the model, over how many devices it is spread, and a device's dense peak; None: not known."""
        self.model, self.devices, self.peak = model, devices, peak_tflops

    def of(self, seconds: float, tokens: int, pairs: float) -> dict[str, float | None]:
        """The figures of a step.

        Args:
            seconds: how long it took.
            tokens: how many it had.
            pairs: of tokens that attend to each other: tokens * seq_len, or less where documents are kept apart.
        """
        rate = tokens / seconds
        tflops = rate / self.devices * self.model.flops_per_token(pairs / tokens) / 1e12
        return {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.devices,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak if self.peak else None,
        }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this rank has held so far: the allocator's on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_gib()


def peak_resident_gib() -> float:
    """The largest resident size that this process has had.

    Linux's VmHWM where there is one: `ru_maxrss` counts what a parent held when it started this process.
    """
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def first_and_last_loss(file: Path) -> tuple[float | None, float | None]:
    """The run's losses, over all its attempts, as metrics.jsonl tells them: the first that is finite, and the last."""
    losses = [record["loss"] for record in read_lines(file) if "loss" in record]
    return next((loss for loss in losses if loss is not None), None), losses[-1] if losses else None


def finite(value: Any) -> Any:
    """`value`, or None when it is a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
