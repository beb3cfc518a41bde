"""What a run records: metrics.jsonl, trackers, and speed from seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from titan.cluster.known_devices import peak_tflops
from titan.metrics.recorder import Recorder, Speed
from titan.metrics.trackers import open_trackers
from titan.run.attempts import Attempt
from titan.run.run import Run, as_config


def recorder(run: Run, attempt: Attempt, warn: Callable[[str], None]) -> Recorder:
    """Return what writes this attempt's records to metrics.jsonl and to the trackers."""
    directory = Path(run.directory)
    trackers = open_trackers(
        run.metrics,
        directory=directory,
        run_id=attempt.run_id,
        group_id=attempt.ids.group,
        name=run.name,
        config=as_config(run),
        warn=warn,
    )
    return Recorder(directory, attempt.number, trackers, warn)


def speed(run: Run) -> Speed:
    """Return what turns the seconds of a step into throughput and MFU."""
    known = peak_tflops(run.machine.name, run.precision.compute) if run.machine.device == "cuda" else None  # type: ignore[arg-type]
    return Speed(run.model, run.layout.devices, run.cluster.peak_tflops or known)
