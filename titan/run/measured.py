"""The measured time of a step: of finished runs in a folder that compute on the same devices as a run does.

Settings that change no step's time (seed, steps, rates, data, evaluation, checkpoints) may differ; any other setting
that differs excludes a run. Free of torch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, median, quantiles, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.console.numbers import format_plural, format_rounded
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.run_directory import RUN
from titan.metrics.reader import METRICS, read_records
from titan.metrics.schema import WARM
from titan.run.axes import complete_config, read_degrees
from titan.run.directory import ENVIRONMENT, RESULT, is_finished, read_attempts
from titan.run.run import as_config, flatten_config

if TYPE_CHECKING:
    from titan.run.run import Run


BLOCKS, BLOCK = 10, 5
"""The most blocks of a series, and the fewest values of a block."""
LEAST_RUNS = 3
"""From so many runs on, an interval is from the medians of the runs: a t-interval of two is too wide to be useful. Of
fewer, it is from blocks of their steps."""
LEAST_TIMED = 2 * BLOCK
"""Timed steps of a run without which there is no interval."""
WIDEST = 0.05
"""The width of an interval, relative to the median, above which a budget by it is doubtful."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% quantiles of Student's t distribution with one degree of freedom to nine."""


class RunSteps(NamedTuple):
    """The timed steps of a run: their number, their 10%, 50% and 90% percentiles in seconds, and medians of blocks."""

    steps: int
    p10: float
    median: float
    p90: float
    blocks: tuple[float, ...]


class StepSpread(NamedTuple):
    """The time of a step over several runs."""

    seconds: float  # the median of the runs' medians
    p10: float  # the median of their 10% percentiles, in seconds
    p90: float  # likewise of their 90% percentiles
    steps: int  # how many all runs have timed
    fewest: int  # steps of the run with the fewest
    # the 95% interval of the median, in seconds; None where there are too few steps
    interval: tuple[float, float] | None
    runs: int = 1  # how many were measured

    def describe(self) -> str:
        """Return the spread and the number of steps."""
        spread = f"{format_rounded(self.p10)}-{format_rounded(self.p90)}"
        return f"p10-p90 {spread} s over {format_plural(self.steps, 'timed step')}"

    def find_doubt(self) -> str:
        """Return what makes the measured time doubtful, and the way out; empty where nothing does."""
        if self.fewest < LEAST_TIMED or self.interval is None:
            return (
                f"the time of a step is the median of {format_plural(self.fewest, 'timed step')} of a run, too few for "
                f"an interval; measure runs of training.steps={LEAST_TIMED + WARM} or more"
            )
        low, high = self.interval
        if high - low <= WIDEST * self.seconds:
            return ""
        more = "runs" if self.runs >= LEAST_RUNS else "steps"
        return (
            f"the 95% interval of the median time of a step is {format_rounded(low)}-{format_rounded(high)} s, "
            f"{(high - low) / self.seconds:.0%} of it; measure more {more}, with nothing else on the machine"
        )


def summarize_steps(seconds: Sequence[float]) -> RunSteps:
    """Return the spread of a run's step times, of which there are at least two, all positive."""
    deciles = quantiles(seconds, n=10, method="inclusive")
    return RunSteps(len(seconds), deciles[0], median(seconds), deciles[8], compute_block_medians(seconds))


def compute_block_medians(values: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of consecutive blocks of a series; none where it is too short for two blocks.

    Successive steps are correlated and blocks far less so, so an interval from blocks is not too narrow (the method of
    batch means, Conway 1963). Medians, because the speeds shown are medians.
    """
    count = min(BLOCKS, len(values) // BLOCK)
    if count < 2:
        return ()
    size, longer = divmod(len(values), count)
    bounds = [index * size + min(index, longer) for index in range(count + 1)]
    return tuple(median(values[low:high]) for low, high in pairwise(bounds))


def combine_runs(runs: Sequence[RunSteps]) -> StepSpread:
    """Return the time of a step over several runs, with an interval as that of a speed in titan.compare."""
    center = median(run.median for run in runs)
    medians = [run.median for run in runs]
    samples = medians if len(runs) >= LEAST_RUNS else [value for run in runs for value in run.blocks]
    interval = None
    if all(run.blocks for run in runs):  # by Student's t distribution of the logarithms of at least two samples
        logs = [math.log(value) for value in samples]
        half = compute_t(len(logs) - 1) * stdev(logs, fmean(logs)) / math.sqrt(len(logs))
        interval = center * math.exp(-half), center * math.exp(half)
    p10, p90 = (median(getattr(run, name) for run in runs) for name in ("p10", "p90"))
    counts = [run.steps for run in runs]
    return StepSpread(center, p10, p90, sum(counts), min(counts), interval, len(runs))


def compute_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: a table, and the Cornish-Fisher expansion beyond it."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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


Measurement = tuple[str, Mapping[str, str], RunSteps]
"""A finished run: its folder's name, what decides the time of a step, as text by name, and the steps of its last
attempt, without the warm-up."""


def measure_step(run: Run) -> StepSpread:
    """Return the time of a step in the runs that `training.measured` names: the median over those that fit."""
    source = str(run.training.measured)
    measurements = _read_measurements(source)
    machine = {"device": run.machine.device, "name": run.machine.name, "cores": run.machine.cores}
    layout = run.layout.degrees() | {"expert": run.layout.expert}
    classes = {axis: get_kind(type(getattr(run, axis))) for axis in CLASSES}
    settings = _build_settings(as_config(run), layout, run.microbatches, machine, classes)
    if fitting := [steps for _, other, steps in measurements if other == settings]:
        return combine_runs(fitting)
    differing = [
        (sorted(k for k in other.keys() | settings.keys() if other.get(k) != settings.get(k)), name, other)
        for name, other, _ in measurements
    ]
    names, nearest, other = min(differing, key=lambda found: len(found[0]))
    differences = ", ".join(
        f"{name} is {other.get(name, 'its default')} there and {settings.get(name, 'its default')} here"
        for name in names[:3]
    )
    raise ConfigError(
        f"training.measured={source}: none of its {format_plural(len(measurements), 'finished run')} computes as this "
        f"run does ({sanitize_line(f'{nearest}: {differences}')}); measure this one with a short run, or leave "
        "training.measured out, for predicted times."
    )


def _build_settings(
    config: Mapping[str, Any],
    layout: Mapping[str, int],
    count: int,
    machine: Mapping[str, Any],
    classes: dict[str, str],
) -> dict[str, str]:
    """Return what decides the time of a run's step, as text by name."""
    config = complete_config(config, layout)
    values = {name: value for name, value in flatten_config(config).items() if not UNTIMED.fullmatch(name)}
    values |= {f"layout.{name}": degree for name, degree in layout.items()}
    values |= {"micro-batches": count, **{f"{axis}.class": name for axis, name in classes.items()}}
    keys = DEVICE if machine.get("device") == "cpu" else DEVICE[:2]
    values |= {f"machine.{key}": machine.get(key) for key in keys}
    return {name: format_value(value) for name, value in values.items()}


def _read_measurements(source: str) -> list[Measurement]:
    folder = Path(source).expanduser().resolve()
    timed = []
    for directory in (
        [folder] if (folder / RUN).is_file() else [file.parent for file in sorted(folder.glob(f"*/{RUN}"))]
    ):
        files = [directory / name for name in (RUN, METRICS, RESULT)]
        changed = [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]
        if (measurement := _read_measurement(directory, *changed)) is not None:
            timed.append(measurement)
    if not timed:
        raise ConfigError(
            f"training.measured={source}: holds no finished run of at least {LEAST_STEPS + WARM} steps; give the "
            "directory of a run or of a sweep that has ended, or leave it out, for predicted times."
        )
    return timed


@functools.lru_cache(maxsize=2**14)
def _read_measurement(directory: Path, *changed: int) -> Measurement | None:
    """Return the measurement of a run, read again when its files have changed.

    None where it is not finished, or timed too few steps.
    """
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
    return directory.name, settings, summarize_steps(seconds)


def _read_step_seconds(directory: Path, document: Mapping[str, Any]) -> list[float]:
    """Return the seconds of the steps of an attempt, without its first ones."""
    number, first = int(document["attempt"]), int(document.get("from_step") or 0) + WARM
    records = [r for r in read_records(directory / METRICS) if r.get("attempt", 1) == number and "loss" in r]
    seconds = [float(r.get("step_seconds") or 0.0) for r in records if r.get("step", 0) > first]
    return [value for value in seconds if math.isfinite(value) and value > 0]
