"""The measured time of a step: of finished runs in a folder that compute on the same devices as a run does.

Settings that change no step's time (seed, steps, rates, data, evaluation, checkpoints) may differ; any other setting
that differs excludes a run. Free of torch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.run_directory import RUN
from titan.metrics.reader import METRICS, read_records
from titan.metrics.schema import WARM
from titan.run.directory import ENVIRONMENT, RESULT, is_finished, read_attempts
from titan.run.recorded_config import complete_config, read_degrees
from titan.run.run import as_config, flatten_config
from titan.run.step_interval import RunSteps, StepSpread, combine_runs, summarize_steps

if TYPE_CHECKING:
    from titan.run.run import Run

LEAST_STEPS = 3
"""Timed steps that a run needs."""
UNTIMED = re.compile(
    r"name|modules|(schedule|evaluation|checkpoint|profile)(\..*)?|cluster(?!\.nodes)(\..*)?"
    r"|training\.(steps|seed|repeat|bad_steps|gc_every|tokens|hours|step_seconds|measured)"
    r"|optimizer\.(lr|weight_decay|betas|eps|momentum)"
    r"|metrics\.(?!layers_every).*"
    r"|dataset(?!\.mask_documents)(\..*)?"
    r"|parallelism\.(replicate|shard|context|tensor|pipeline|expert|microbatches|idle)"  # the layout stands for them
)
"""Settings that do not change the time of a step."""
DEVICE = ("device", "name", "cores")
"""What of a machine decides the time of a step, by the keys of env.json; the cores count on a CPU."""

CLASSES = {"model": "titan.model.schema.Llama", "optimizer": ""}
"""Axes whose class decides the time of a step, with the class that science settings do not name."""


class StepMeasurement(NamedTuple):
    """The time of a step in a finished run.

    Attributes:
        directory: of the run.
        settings: what decides the time of a step, as text by name.
        steps: those of its last attempt, without the warm-up.
    """

    directory: str
    settings: Mapping[str, str]
    steps: RunSteps


def measure_step(run: Run) -> StepSpread:
    """Return the time of a step in the runs that `training.measured` names: the median over those that fit.

    Raises:
        ConfigError: where no finished run computes as this one does.
    """
    source = str(run.training.measured)
    measurements = _read_measurements(source)
    settings = _collect_settings(as_config(run), run)
    fitting = [m.steps for m in measurements if m.settings == settings]
    if not fitting:
        raise _build_mismatch_error(source, measurements, settings)
    return combine_runs(fitting)


def _build_mismatch_error(
    source: str, measurements: Sequence[StepMeasurement], settings: Mapping[str, str]
) -> ConfigError:
    """Return the error that names what differs in the run that differs least."""
    nearest = min(measurements, key=lambda m: len(_find_differing(m.settings, settings)))
    differences = ", ".join(
        f"{name} is {nearest.settings.get(name, 'its default')} there and {settings.get(name, 'its default')} here"
        for name in _find_differing(nearest.settings, settings)[:3]
    )
    return ConfigError(
        f"training.measured={source}: none of its {format_plural(len(measurements), 'finished run')} computes as this "
        f"run does ({sanitize_line(f'{Path(nearest.directory).name}: {differences}')}); measure this one with a short "
        "run, or leave training.measured out, for predicted times."
    )


def _find_differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _collect_settings(config: Mapping[str, Any], run: Run) -> dict[str, str]:
    """Return what decides the time of a run's step."""
    machine = {"device": run.machine.device, "name": run.machine.name, "cores": run.machine.cores}
    classes = {axis: get_kind(type(getattr(run, axis))) for axis in CLASSES}
    return _build_settings(
        config, run.layout.degrees() | {"expert": run.layout.expert}, run.microbatches, machine, classes
    )


def _build_settings(
    config: Mapping[str, Any],
    layout: Mapping[str, int],
    microbatches: int,
    machine: Mapping[str, Any],
    classes: Mapping[str, str],
) -> dict[str, str]:
    config = complete_config(config, layout)
    values = {name: value for name, value in flatten_config(config).items() if not UNTIMED.fullmatch(name)}
    values |= {f"layout.{name}": degree for name, degree in layout.items()}
    values |= {"micro-batches": microbatches, **{f"{axis}.class": name for axis, name in classes.items()}}
    keys = DEVICE if machine.get("device") == "cpu" else DEVICE[:2]
    values |= {f"machine.{key}": machine.get(key) for key in keys}
    return {name: format_value(value) for name, value in values.items()}


def _read_measurements(source: str) -> list[StepMeasurement]:
    """Return the measurements of the finished runs in a folder.

    Raises:
        ConfigError: where there are none.
    """
    folder = Path(source).expanduser().resolve()
    files = [folder / RUN] if (folder / RUN).is_file() else sorted(folder.glob(f"*/{RUN}"))
    measurements = [_read_measurement(file.parent, *_read_times(file.parent)) for file in files]
    timed = [measurement for measurement in measurements if measurement is not None]
    if not timed:
        raise ConfigError(
            f"training.measured={source}: holds no finished run of at least {LEAST_STEPS + WARM} steps; give the "
            "directory of a run or of a sweep that has ended, or leave it out, for predicted times."
        )
    return timed


def _read_times(directory: Path) -> tuple[int, ...]:
    """Return when the files of a run changed last, in nanoseconds; 0 for a missing one."""
    files = [directory / name for name in (RUN, METRICS, RESULT)]
    return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)


@functools.lru_cache(maxsize=2**14)
def _read_measurement(directory: Path, *changed: int) -> StepMeasurement | None:
    """Return the measurement of a run; None where it is not finished, or timed too few steps."""
    try:
        documents = read_attempts(directory)
        environment = untrusted.parse_object(untrusted.read_regular_file(directory / ENVIRONMENT))
    except (ConfigError, OSError, ValueError):
        return None
    if not documents or not is_finished(directory, int(documents[-1]["config"]["training"]["steps"])):
        return None
    document, machine = documents[-1], environment.get("device")
    seconds = _read_step_seconds(directory, document)
    if len(seconds) < LEAST_STEPS or not isinstance(machine, dict):
        return None
    classes = {axis: str(document["science"].get(axis, default)) for axis, default in CLASSES.items()}
    settings = _build_settings(
        document["config"], read_degrees(document), int(document.get("microbatches") or 1), machine, classes
    )
    return StepMeasurement(str(directory), settings, summarize_steps(seconds))


def _read_step_seconds(directory: Path, document: Mapping[str, Any]) -> list[float]:
    """Return the seconds of the steps of an attempt, without its first ones."""
    number, first = int(document["attempt"]), int(document.get("from_step") or 0) + WARM
    records = [r for r in read_records(directory / METRICS) if r.get("attempt", 1) == number and "loss" in r]
    seconds = [float(r.get("step_seconds") or 0.0) for r in records if r.get("step", 0) > first]
    return [value for value in seconds if math.isfinite(value) and value > 0]
