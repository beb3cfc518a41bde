"""Profiles steps of a run as its profile axis says, and on demand; hooks and patches exist in recorded steps only.

    begin_step ── a profile starts ── warm-up ── recorded steps with ranges ── the trace is written and summarised

The file `profile/now` in the run's directory asks for a profile: rank 0 looks for it once a second, and sends it to the
other ranks in the vector that they sum in each step, so that all begin with the same step.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titan.dataset.loader import Loader
from titan.estimate.traced.events import ACTIONS, AFTER, BEFORE, NONE, OUTSIDE, Region
from titan.parallelism.mesh import RunContext
from titan.profile import summary, trace
from titan.profile.breakdown import DATA_RANGE, compute_breakdowns
from titan.run.run import Run
from titan.training.trace.regions import Patch, change_functions, follow_regions
from titan.training.train_step import TrainStep

log = logging.getLogger("titan")
POLL_SECONDS = 1.0
"""Seconds between two looks for the file that asks for a profile."""

Owners = Mapping[str, Mapping[int, int]]
"""The bytes of each storage by its address, by category."""


class StepRanges:
    """Nested ranges of torch's profiler, which follow a step whenever its region is set (`training.trace.regions`)."""

    region = OUTSIDE
    recomputing = False

    def __init__(self, stages: int) -> None:
        """Take the number of stages of the pipeline."""
        self.stages = stages
        self.open: list[tuple[str, Any]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("region", "recomputing"):
            self._set_path(_build_path(self.region, self.stages) + ["recomputation"] * self.recomputing)

    def _set_path(self, path: Sequence[str]) -> None:
        """Leave the open ranges that are not in `path`, and enter the others."""
        shared = 0
        while shared < min(len(path), len(self.open)) and self.open[shared][0] == path[shared]:
            shared += 1
        while len(self.open) > shared:
            self.open.pop()[1].__exit__(None, None, None)
        for name in path[shared:]:
            entered: Any = torch.autograd.profiler.record_function(name)
            entered.__enter__()
            self.open.append((name, entered))

    def close(self) -> None:
        """Leave all ranges."""
        self._set_path([])


def _build_path(region: Region, stages: int) -> list[str]:
    """Return the names of the nested ranges of a region."""
    if region == OUTSIDE:
        return []
    blocks = {BEFORE: "embedding", AFTER: "head"}
    path = [f"stage {region.stage}"] * (stages > 1) + [f"micro-batch {region.microbatch}", ACTIONS[region.action]]
    return path if region.block == NONE else [*path, blocks.get(region.block, f"layer {region.block}")]


def _run_in_range(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.profiler.record_function(name):
        return function(*args, **kwargs)


class RunProfiler:
    """Starts and ends profiles on one rank."""

    def __init__(
        self,
        run: Run,
        world: RunContext,
        train_step: TrainStep,
        predicted: Mapping[str, float],
        show: Callable[[str], None],
        tasks: Mapping[str, tuple[Any, str]],
    ) -> None:
        """Take what is profiled; the folder is made, so that the file can be touched.

        Args:
            predicted: seconds of a step by cause.
            show: writes a line to the terminal, on rank 0.
            tasks: further ranges: object and method by name.
        """
        self.settings, self.staging, self.world, self.train_step = run.profile, run.staging, world, train_step
        self.predicted, self.show, self.tasks = predicted, show, tasks
        self.has_threads = run.parallelism.exchange.uses_threads
        self.folder = Path(run.directory) / "profile"
        self.is_included = self.settings.includes(world.rank_info.rank)
        self.polled_at = 0.0
        self.step_index, self.is_requested = -1, False
        self.profile: Any = None
        self.last_step = self.recorded_steps = 0
        self.hooks = ExitStack()
        self.owners: Mapping[str, Mapping[int, int]] = {}
        self.debug_folder = Path(run.directory) / "debug"
        if world.device.type == "cuda":
            watch_out_of_memory(self.debug_folder, world.rank_info.rank, self._find_owners, show)
        if self.settings.on_demand and world.is_rank0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def _find_owners(self) -> dict[str, dict[int, int]]:
        """Return the storages of weights, of the gradients that exist, and of the optimizer's state."""
        weights, states = list(self.train_step.parameters()), self.train_step.optimizer.state.values()
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return {
            trace.WEIGHTS: _map_storages(weights),
            trace.GRADIENTS: _map_storages(p.grad for p in weights if p.grad is not None),
            trace.OPTIMIZER: _map_storages(tensors),
        }

    def take_request(self) -> bool:
        """Return whether the user asks for a profile, on rank 0; the file that asks is removed."""
        if not (self.settings.on_demand and self.world.is_rank0) or time.monotonic() - self.polled_at < POLL_SECONDS:
            return False
        self.polled_at = time.monotonic()
        try:
            os.unlink(self.folder / "now")
        except OSError:
            return False
        return True

    def begin_step(self, step: int) -> bool:
        """Do what is due before a step: start a profile, go on with one, or end it.

        Returns:
            Whether a trace was written, so that the time since the last step is no step's.
        """
        self.step_index += 1
        ended = self.profile is not None and step > self.last_step
        if ended:
            self._end_profile()
        if self.profile is not None:
            self.hooks.close()
            self.profile.step()
        elif self.is_requested or self.settings.starts(self.step_index):
            self._start_profile(step)
        if self.profile is not None and step > self.last_step - self.recorded_steps:
            self._set_step_ranges()
        return ended

    def _start_profile(self, step: int) -> None:
        """Start a profile; a rank that is not profiled does nothing."""
        settings = self.settings
        self.recorded_steps = settings.on_demand if self.is_requested else settings.active
        self.is_requested, self.last_step = False, step + settings.warmup + self.recorded_steps - 1
        if not self.is_included:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notes on the terminal
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.world.device.type == "cuda")
        self.profile = profile(
            activities=activities,
            schedule=self._choose_action,
            profile_memory=settings.memory,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            experimental_config=_ExperimentalConfig(profile_all_threads=self.has_threads),
        )
        self.profile.step_num = step  # so that ranges of steps have the run's numbers
        self.profile.current_action = self._choose_action(step)
        self.profile.start()
        if settings.memory and self.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=10**6)

    def _choose_action(self, step: int) -> ProfilerAction:
        if step <= self.last_step - self.recorded_steps:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if step < self.last_step else ProfilerAction.RECORD_AND_SAVE

    def _set_step_ranges(self) -> None:
        numbers = self.staging.list_stages(self.world.get_coordinate("pipeline"))
        stages = dict(zip(numbers, self.train_step.stages, strict=True))
        step_ranges = StepRanges(self.staging.count)
        self.hooks.callback(step_ranges.close)
        self.hooks.enter_context(follow_regions(step_ranges, stages, self.staging.splits_backward))
        tasks = {**self.tasks, DATA_RANGE: (Loader, "__next__")}
        if self.settings.memory:
            hook = self.train_step.optimizer.register_step_pre_hook(self._note_owners)
            self.hooks.callback(hook.remove)
        patches: list[Patch] = [(*method, partial(_run_in_range, name)) for name, method in tasks.items()]
        self.hooks.enter_context(change_functions(patches))

    def _note_owners(self, *_: Any) -> None:
        """Keep where tensors lie when the optimizer begins in the first recorded step."""
        self.owners = self.owners or self._find_owners()

    def _end_profile(self) -> None:
        profiler, self.profile = self.profile, None
        self.hooks.close()
        has_recorded = profiler.current_action != ProfilerAction.WARMUP
        profiler.stop()
        if self.settings.memory and self.world.device.type == "cuda":
            write_snapshot(
                self.debug_folder, f"step-{self.last_step}-rank-{self.world.rank_info.rank}", self._find_owners()
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        if not has_recorded:
            return
        first, rank = self.last_step - self.recorded_steps + 1, self.world.rank_info.rank
        file = summary.build_trace_path(self.folder, first, rank)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
            self._write_summary(file, rank)
        except OSError as error:  # a full disk must not end the run
            log.warning("the profile of step %d is not written: %s", first, error)

    def _write_summary(self, file: Path, rank: int) -> None:
        content = trace.read(file)
        steps = compute_breakdowns(content)
        if not steps:
            log.warning("%s: the trace has no step", file)
            return
        average = summary.average_steps(rank, steps, self.predicted)
        rank_summary = replace(average, slow_factor=self.settings.slow_factor)
        if self.settings.memory:
            owners, self.owners = dict(self.owners), {}
            gradients = owners.pop(trace.GRADIENTS, {})
            state_bytes = {name: float(sum(sizes.values())) for name, sizes in owners.items()}
            if peak := trace.find_peak(content, steps[0].step, state_bytes, gradients):
                rank_summary = replace(rank_summary, memory=peak.parts, memory_sentence=peak.sentence)
        summary.write(self.folder, rank_summary)
        for line in [*summary.format_table(rank_summary), f"trace: {file}"]:
            log.info(line)
            self.show(line)

    def close(self) -> None:
        """End a profile whose steps are not all done; nothing is written where none was recorded."""
        if self.profile is not None:
            self._end_profile()


def _map_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = ((t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def describe_snapshot(segments: Sequence[Mapping[str, Any]], owners: Owners) -> str:
    """Return what is alive in the segments of a snapshot of CUDA's allocator."""
    parts: dict[str, float] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                category = next(
                    (name for name, storages in owners.items() if address in storages), "activations and temporary"
                )
                parts[category] = parts.get(category, 0.0) + block["size"]
            address += block["size"]
    return trace.describe_peak(parts, "") if parts else "nothing was allocated"


def write_snapshot(folder: Path, name: str, owners: Owners) -> str:
    """Write a snapshot of CUDA's allocator for https://pytorch.org/memory_viz, and return what was alive."""
    snapshot = torch.cuda.memory._snapshot()
    text = describe_snapshot(snapshot["segments"], owners)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(snapshot))
    (folder / f"{name}.txt").write_text(text + "\n")
    return text


def watch_out_of_memory(
    folder: Path, rank: int, read_owners: Callable[[], Owners], show: Callable[[str], None]
) -> None:
    """Write a snapshot when CUDA's memory runs out, while what filled it is still there; before, nothing is recorded.

    Args:
        show: writes a line to the terminal, on rank 0.
    """

    def observer(device: int, requested: int, total: int, free: int) -> None:
        try:
            text = write_snapshot(folder, f"out-of-memory-rank-{rank}", read_owners())
        except Exception as error:  # the run ends with the original error
            text = f"no snapshot: {error}"
        log.error("out of memory: %s", text)
        show(f"out of memory on rank {rank}: {text}")

    library: Any = torch._C
    library._cuda_attach_out_of_memory_observer(observer)
