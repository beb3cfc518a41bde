"""What a run records: metrics.jsonl, trackers, and speed from seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from titan.cluster.known_devices import look_up_peak_tflops
from titan.config.kinds import get_kind
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.metrics.reader import METRICS, read_last_steps
from titan.metrics.recorder import Recorder, StepSpeed
from titan.metrics.spikes import SpikeDetector
from titan.metrics.tracker_run import RunDescription, hide_secrets
from titan.metrics.trackers import open_trackers
from titan.run import evaluated, identity
from titan.run.attempts import Attempt
from titan.run.axes import PLUGGABLE
from titan.run.directory import find_parent_sweep, read_attempts
from titan.run.run import Run, as_config
from titan.schedule.schema import Factors


def build_recorder(run: Run, attempt: Attempt, warn: Callable[[str], None], mix: RowMixture | None = None) -> Recorder:
    """Return what writes this attempt's records to metrics.jsonl and to the trackers; they name the data of `mix`."""
    directory = Path(run.directory)
    description = RunDescription(run_id="", group_id="", name=run.name, config={})
    if run.metrics.tensorboard or run.metrics.wandb or run.metrics.trackers:
        description = describe_run(run, attempt, mix)
    trackers = open_trackers(run.metrics, directory=directory, description=description, warn=warn)
    changed = evaluated.find_changed(attempt.evaluated, read_attempts(directory))
    return Recorder(directory, attempt.number, trackers, warn, partial(evaluated.rename_figures, changed=changed))


def describe_run(run: Run, attempt: Attempt, mix: RowMixture | None) -> RunDescription:
    """Return what trackers show of a run beside its records."""
    code, sweep = identity.describe_code(), find_parent_sweep(run)
    facts = {
        "choices": dict(run.choices),
        "kinds": {axis: get_kind(type(getattr(run, axis))) for axis in PLUGGABLE},
        "ids": asdict(attempt.ids),
        "attempt": attempt.number,
        "commit": code["commit"],
        "diff": code["diff"],
        "data": corpora.compute_data_digest(mix) if mix else None,
        "parameters": run.model.parameters(),
        "layout": run.layout.degrees(),
        "sweep": sweep.name if sweep else None,
        "variant": sweep.variant if sweep else None,
    }
    return RunDescription(
        run_id=attempt.run_id,
        group_id=next(iter(read_attempts(Path(run.directory))), {"ids": asdict(attempt.ids)})["ids"]["group"],
        name=hide_secrets(run.name),
        config=as_config(run),
        facts=facts,
        sweep=hide_secrets(sweep.name) if sweep else None,
        labels=(*(o for o in run.overrides if o.startswith("recipe=")), str(run.layout)),
    )


def build_weight_decay_record(run: Run, factors: Callable[[int], Factors], step: int) -> dict[str, float]:
    """Return what the record of a step says of the weight decay: that of `optimizer`, where the schedule changes it.

    Args:
        factors: the built schedule.
    """
    if not run.schedule.sets_weight_decay or not run.optimizer.weight_decay:
        return {}
    return {"weight_decay": run.optimizer.weight_decay * factors(step).weight_decay}


def build_spike_detector(run: Run, attempt: Attempt, records: bool) -> SpikeDetector:
    """Return what marks loss spikes; on the rank that records, its window begins with the losses before the attempt."""
    last_steps = read_last_steps(Path(run.directory) / METRICS) if records else ()
    previous_losses = (line["loss"] for line in last_steps if line["step"] <= attempt.step)
    window_losses = list(islice(previous_losses, run.metrics.spike_window))
    return SpikeDetector(run.metrics.spike_window, run.metrics.spike_deviations, reversed(window_losses))


def build_step_speed(run: Run) -> StepSpeed:
    """Return what turns the seconds of a step into throughput and MFU."""
    device_peak = look_up_peak_tflops(run.machine.name, run.precision.compute) if run.machine.device == "cuda" else None  # type: ignore[arg-type]
    return StepSpeed(run.model, run.layout.devices, run.cluster.peak_tflops or device_peak)
