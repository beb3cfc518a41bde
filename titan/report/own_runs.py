"""A user's own finished runs, which refine the cost model: their recipes, planned again, and what they measured."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan.cluster.devices import Machine
from titan.cluster.schema import Hardware
from titan.config.modules import list_trusted_packages
from titan.config.settings import build
from titan.errors import ConfigError
from titan.estimate import refine
from titan.estimate.plan import build_plan, resolve_hardware
from titan.estimate.rank_sizes import GIB
from titan.estimate.refine import MeasuredRun, Refinement
from titan.parallelism.schema import Layout
from titan.report.align import find_shared_runs
from titan.report.collect import RawRun, collect_runs
from titan.report.estimate import measure_run
from titan.run.axes import read_degrees
from titan.run.prediction import sum_measured_bytes
from titan.run.run import Run
from titan.run.schema import Recipe

LEAST_STEPS = 3
"""Timed steps that a run needs."""
SYNTHETIC = "titan.dataset.schema.Synthetic"
"""The kind of data that stands for any other: a step's time depends on its rows alone."""
CLASSES = ("model", "optimizer")
"""Axes whose class run.yaml names among the science settings, unless it is the default one."""


@dataclass(frozen=True)
class OwnRuns:
    """Runs on the device and in the compute type of a plan, in a folder as typed; each other run with the reason."""

    source: str
    samples: tuple[MeasuredRun, ...]
    unused: tuple[tuple[str, str], ...]

    def fit_refinement(self) -> Refinement:
        """Return what the runs ask for."""
        if self.samples:
            return refine.fit_factors(self.samples)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unused[:3])
        remainder = f"; and {len(self.unused) - 3} more" if len(self.unused) > 3 else ""
        raise ConfigError(
            f"plan.fit={self.source}: no run can be used ({reasons}{remainder}); give a folder with finished runs on "
            "the same device in the same compute type, or leave it out."
        )


def read(source: str, run: Run) -> OwnRuns:
    """Return the runs in a folder that are of the kind of a planned run.

    Raises:
        ConfigError: when the folder holds no run, or a figure of the plan's hardware is missing.
    """
    collected = collect_runs([Path(source).expanduser()], label=f"plan.fit={source}")
    hardware, shared = resolve_hardware(run.cluster, run.machine), find_shared_runs(collected.runs)
    samples = list[MeasuredRun]()
    unused = [(_format_directory(failed.directory, source), failed.reason) for failed in collected.failed]
    for raw in collected.runs:
        try:
            if raw.directory in shared:
                raise _UnusableRunError("another run used its machine at the same time")
            samples.append(_build_sample(raw, run, hardware))
        except _UnusableRunError as error:
            unused.append((_format_directory(raw.directory, source), str(error)))
    return OwnRuns(source, tuple(samples), tuple(unused))


def _format_directory(directory: Path | str, source: str) -> str:
    """Return a run's directory as seen from the folder that was given."""
    name = os.path.relpath(directory, Path(source).expanduser().resolve())
    return Path(directory).name if name == "." else name


class _UnusableRunError(Exception):
    """A run does not count; the message says why."""


def _build_sample(raw: RawRun, run: Run, hardware: Hardware) -> MeasuredRun:
    _check_kind(raw, run)
    measured = measure_run(raw)
    if measured is None or measured.steps < LEAST_STEPS:
        raise _UnusableRunError(f"has fewer than {LEAST_STEPS} timed steps")
    names = {field.name for field in dataclasses.fields(Machine)}
    described: dict[str, Any] = {name: value for name, value in raw.device.items() if name in names}
    machine = replace(run.machine, **described)  # as env.json describes it
    try:
        recipe = rebuild_recipe(raw, hardware, run.cluster.peak_tflops)
        layout = Layout(**read_degrees(raw.last_document))
        planned = build_plan(recipe, layout, int(raw.last_document["microbatches"]), machine)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise _UnusableRunError(f"can't be planned: {error}") from error
    if len(recipe.training.phases) > 1:
        raise _UnusableRunError("its batch grows, so its steps differ")
    memory = sum_measured_bytes(planned.memory[0], machine.device) / GIB
    return refine.build_measured_run(planned, memory, measured.step_seconds.median, measured.memory_gib)


def _check_kind(raw: RawRun, run: Run) -> None:
    """Raise _UnusableRunError for a run that is not finished, or on another device or in another compute type."""
    if raw.state != "finished":
        raise _UnusableRunError(f"is not finished ({raw.state})")
    if raw.hardware != run.machine.name:
        raise _UnusableRunError(f"ran on {raw.hardware or 'an unknown device'}, not {run.machine.name}")
    compute = raw.config.get("precision", {}).get("compute")
    if compute != run.precision.compute:
        raise _UnusableRunError(f"computed in {compute}, not {run.precision.compute}")


def rebuild_recipe(raw: RawRun, hardware: Hardware, peak_tflops: float | None = None) -> Recipe:
    """Return the recipe of a run's last attempt, on hardware as now described.

    Raises:
        ConfigError: when another version of titan wrote it, or its classes can't be loaded.
    """
    science, config = raw.last_document["science"], raw.config
    content = {axis: value for axis, value in config.items() if axis != "modules"}
    for axis in CLASSES:
        if axis in science:
            content[axis] = {**config[axis], "_target_": science[axis]}
    masked = bool(config["dataset"].get("mask_documents"))
    content["dataset"] = {"_target_": SYNTHETIC, "mask_documents": masked}
    content["schedule"] = {}  # a step's time does not depend on it
    recipe: Recipe = build(Recipe, content, allowed=list_trusted_packages(()))  # not what a run's own file would import
    return replace(recipe, cluster=replace(recipe.cluster, hardware=hardware, peak_tflops=peak_tflops))


def format_fit(runs: OwnRuns, refinement: Refinement) -> str:
    """Return what was fitted on how many runs, the errors before and after, and the runs that were not used."""
    factors, count = refinement.factors, len(runs.samples)
    lines = [
        f"fit          {count} of {count + len(runs.unused)} runs in {runs.source}: computation x"
        f"{factors.computation:.3g}, communication x{factors.communication:.3g}, memory x{factors.memory:.3g}"
    ]
    parts = [("step time", refinement.time), *([("memory", refinement.memory)] if refinement.memory else [])]
    method = ", each run left out" if refinement.time.left_out else ""
    errors = (f"{name} {each.before:.1%} before, {each.after:.1%} after (median)" for name, each in parts)
    lines.append(f"  error      {'; '.join(errors)}{method}")
    lines += [f"  not used   {name}: {reason}" for name, reason in runs.unused]
    return "\n".join(lines) + "\n"
