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
    """What writes the records of this attempt, here and to trackers."""
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
    """What gives throughput and MFU from the seconds of a step."""
    known = peak_tflops(run.machine.name, run.precision.compute) if run.machine.device == "cuda" else None  # type: ignore[arg-type]
    return Speed(run.model, run.layout.devices, run.cluster.peak_tflops or known)
