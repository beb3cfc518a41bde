"""What a run records: metrics.jsonl, trackers, and speed from seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from titan.cluster.known_devices import peak_tflops
from titan.metrics.recorder import Recorder, Speed
from titan.metrics.spikes import SpikeDetector
from titan.metrics.trackers import open_trackers
from titan.run.attempts import Attempt
from titan.run.directory import read_last_steps
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


def spikes(run: Run, attempt: Attempt, records: bool) -> SpikeDetector:
    """Return what marks loss spikes; on the rank that records, its window begins with the losses before the attempt."""
    last = read_last_steps(Path(run.directory)) if records else ()
    before = (line["loss"] for line in last if line["step"] <= attempt.step)
    latest = list(islice(before, run.metrics.spike_window))
    return SpikeDetector(run.metrics.spike_window, run.metrics.spike_deviations, reversed(latest))


def speed(run: Run) -> Speed:
    """Return what turns the seconds of a step into throughput and MFU."""
    known = peak_tflops(run.machine.name, run.precision.compute) if run.machine.device == "cuda" else None  # type: ignore[arg-type]
    return Speed(run.model, run.layout.devices, run.cluster.peak_tflops or known)
