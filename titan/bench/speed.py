"""Measure the training speed of one case: titan against the bare loop; also profiles and host-device synchronisations.

On a CPU both sides run in one process in alternating rounds, so that other work on the machine slows both. On a GPU
they run one after the other in separate processes, because the two may not fit into its memory together: first the bare
loop, titan twice, then the bare loop, so that a device that becomes warmer, and slower, slows both.

Modules that import torch are imported inside functions: `--help` and the parent of GPU measurements do without it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan.bench.suites import SpeedCase
from titan.cluster.known_devices import look_up_peak_tflops
from titan.errors import ConfigError
from titan.estimate.roofline import Roofline, compute_roofline, select_rates
from titan.run import attempts, compose
from titan.run.prepared_data import prepare_data
from titan.run.run import Run
from titan.training.signals import StopSignals

if TYPE_CHECKING:
    from titan.bench.bare_loop import BareLoop
    from titan.training.trainer import Trainer

Side = Literal["titan", "bare"]
SIDES: tuple[Side, ...] = ("bare", "titan")
WARM = 3
"""Warm-up steps before a measurement: allocations, compilation."""
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""How torch's error message begins when an operation synchronises under `set_sync_debug_mode("error")`."""
ERROR = re.compile(r"(\[rank\d+\]: )?(titan: |[\w.]*(Error|Exception|Exit|Interrupt)\b|[\w.]+\.exc\.\w+)")
"""How the line with the error of a failed process begins; warnings and advice may follow it."""
HEADER = (
    f"{'tokens/s':<34} {'bare':>10} {'titan':>10} {'ratio':>7} {'(lowest to highest)':<18} {'MFU':>7} {'roofline':>8}"
)


@dataclass(frozen=True)
class SideResult:
    """The measurement of one side: seconds of each round and peak memory, or the error message if it failed."""

    seconds: tuple[float, ...] = ()
    memory_gib: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class CaseSpeed:
    """The measurement of a case.

    Attributes:
        title: the case's title.
        bare: the bare loop's median tokens/s; 0 if it failed.
        titan: titan's median tokens/s; 0 if it failed.
        ratios: titan's speed as a fraction of the bare loop's, one per round; empty if a side failed.
        mfu: model FLOPs utilisation of titan, relative to the device's peak in the compute type (bf16 for float8
            matmuls too); None where the peak is unknown.
        roofline: tokens/s of the roofline, see `titan.estimate.roofline`.
        parts: seconds of the roofline's step by kind of operation.
        memory_gib: peak memory of each side, where they ran in separate processes.
        failure: the error messages of sides that failed.
    """

    title: str
    bare: float
    titan: float
    ratios: tuple[float, ...]
    mfu: float | None
    roofline: float
    parts: Mapping[str, float]
    memory_gib: Mapping[str, float | None]
    failure: str = ""

    def format_rows(self) -> str:
        """Return the lines of the table: speeds, the roofline's parts, and memory where it is known."""
        ratios = f"{'-':>7} {'':<18}"
        if self.ratios:
            low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
            ratios = f"{middle:>7.3f} ({low:.3f} to {high:.3f})"
        mfu = f"{self.mfu:7.1%}" if self.mfu else "      -"
        speeds = f"{self.bare:>10,.0f} {self.titan:>10,.0f} {ratios} {mfu} {self.titan / self.roofline:>8.1%}"
        parts = Roofline(self.parts, 0).describe()
        lines = [f"{self.title:<34} {speeds}", f"  roofline {self.roofline:,.0f} tokens/s: {parts}"]
        if memories := [f"{side} {gib:.1f} GiB" for side, gib in self.memory_gib.items() if gib]:
            lines.append(f"  peak memory: {', '.join(memories)}")
        return "\n".join([*lines, *([f"  {self.failure}"] if self.failure else [])])


def measure_case(
    case: SpeedCase, overrides: Sequence[str], ceilings: Mapping[str, float], rounds: int, steps: int
) -> CaseSpeed:
    """Measure the training speed of titan and of the bare loop in one case.

    Args:
        overrides: overrides common to all cases.
        ceilings: measured speeds of the device.
        steps: steps per round of each side.

    Raises:
        ConfigError: if the case can't be composed on this machine.
    """
    run = compose.compose_run([*overrides, *case.overrides])
    measure_sides = measure_separately if run.machine.device == "cuda" else measure_alternating
    sides = measure_sides(run, case, overrides, rounds, steps)
    tokens = steps * run.training.global_batch
    rate = {side: tokens / statistics.median(r.seconds) if r.seconds else 0.0 for side, r in sides.items()}
    peak = run.cluster.peak_tflops or look_up_peak_tflops(run.machine.name, run.precision.compute)  # type: ignore[arg-type]
    tflops = rate["titan"] * run.model.flops_per_token(run.training.seq_len) / 1e12
    roofline = compute_roofline(run, run.microbatches, select_rates(ceilings, run, run.machine.device))
    return CaseSpeed(
        title=case.title,
        **rate,
        ratios=tuple(b / t for b, t in zip(sides["bare"].seconds, sides["titan"].seconds, strict=False)),
        mfu=tflops / peak if peak else None,
        roofline=roofline.tokens_per_second,
        parts=roofline.parts,
        memory_gib={side: result.memory_gib for side, result in sides.items()},
        failure="; ".join(f"{side}: {result.failure}" for side, result in sides.items() if result.failure),
    )


def measure_alternating(
    run: Run, case: SpeedCase, overrides: Sequence[str], rounds: int, steps: int
) -> dict[Side, SideResult]:
    """Measure both sides in this process in alternating rounds; arguments as for `measure_case`."""
    import torch

    from titan.bench.bare_loop import time_work

    side_times: dict[Side, list[float]] = {"bare": [], "titan": []}
    with open_trainer(run) as (trainer, bare_loop):
        bare = bare_loop(case)
        work: dict[Side, Callable[[int], None]] = {"bare": bare.train_steps, "titan": trainer.run_steps}
        for side in SIDES:
            work[side](WARM)
        for number in range(rounds):
            for side in SIDES if number % 2 else SIDES[::-1]:
                side_times[side].append(time_work(lambda side=side: work[side](steps), trainer.world.device))  # type: ignore[misc]
    torch._dynamo.reset()
    return {side: SideResult(tuple(times)) for side, times in side_times.items()}


def measure_separately(
    run: Run, case: SpeedCase, overrides: Sequence[str], rounds: int, steps: int
) -> dict[Side, SideResult]:
    """Measure each side in two separate processes of half the rounds; arguments as for `measure_case`."""
    options = [f"rounds={-(-rounds // 2)}", f"steps={steps}", *(["autocast=true"] if case.autocast else [])]
    overrides, bare = [*overrides, *case.overrides], [f"compile={case.bare}"] if case.bare else []
    results: dict[Side, list[SideResult]] = {side: [] for side in SIDES}
    for side in (*SIDES, *reversed(SIDES)):
        results[side].append(SideResult(**_run_process(side, options, [*overrides, *(bare if side == "bare" else [])])))
    return {side: _join_results(*halves) for side, halves in results.items()}


def _join_results(first: SideResult, second: SideResult) -> SideResult:
    memory_gib = max(filter(None, (first.memory_gib, second.memory_gib)), default=None)
    return SideResult((*first.seconds, *second.seconds), memory_gib, first.failure or second.failure)


def _run_process(task: str, options: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that `titan.bench only=TASK` prints in its last line, or its error message as `failure`."""
    command = [sys.executable, "-m", "titan.bench", f"only={task}", *options, *overrides]
    completed = subprocess.run(command, capture_output=True, text=True, env=build_environment())
    if completed.returncode:
        return {"failure": find_error_line(completed.stderr, completed.returncode)}
    result: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return result


def find_error_line(text: str, code: int) -> str:
    """Return the last line of a failed process's messages that is an error, else its exit code."""
    lines = [line for line in text.splitlines() if ERROR.match(line)]
    return lines[-1][:200] if lines else f"exit code {code}"


def measure_side(side: Side, overrides: Sequence[str], rounds: int, steps: int, autocast: bool = False) -> int:
    """Measure one side in this process, print the `SideResult` as JSON in the last line, return the exit code."""
    run = compose.compose_run(overrides)
    import torch

    from titan.bench.bare_loop import time_work
    from titan.metrics.recorder import peak_memory_gib

    device = torch.device(run.machine.device)
    with _open_side(side, run, device, autocast) as work:
        work(WARM)
        times = [time_work(lambda: work(steps), device) for _ in range(rounds)]
    print(json.dumps(asdict(SideResult(tuple(times), peak_memory_gib(device)))))
    return 0


@contextmanager
def _open_side(side: Side, run: Run, device: Any, autocast: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that trains a number of steps of one side."""
    if side == "titan":
        with open_trainer(run) as (trainer, _):
            yield trainer.run_steps
        return
    from titan.bench.bare_loop import BareLoop
    from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora

    mix = build_mixture(run.dataset, run.training, open_corpora(prepare_corpora(run.dataset)))
    yield BareLoop(run, mix, device, autocast=autocast).train_steps


@contextmanager
def open_trainer(run: Run) -> Iterator[tuple[Trainer, Callable[[SpeedCase], BareLoop]]]:
    """Yield titan's trainer for one device, which records as usual, and a factory of bare loops on the same data."""
    from titan.bench.bare_loop import BareLoop
    from titan.cluster.rank_info import RankInfo
    from titan.parallelism import mesh
    from titan.training import reporter
    from titan.training.build import build_train_step
    from titan.training.trainer import Trainer

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        run = replace(run, directory=folder)
        attempt = attempts.begin_attempt(run, prepare_data(run))
        if isinstance(attempt, attempts.FinishedRun):
            raise ConfigError(f"{folder} contains a finished run; empty it.")
        world = mesh.connect_world(RankInfo(), run.layout, run.machine.device, run.cluster.timeout)
        trainer = Trainer(run, attempt, world, build_train_step(run, world), StopSignals())
        with reporter.build_recorder(run, attempt, print) as recorder, trainer.loader:
            trainer.reporter.recorder = recorder
            yield (
                trainer,
                lambda case: BareLoop(_set_bare_scope(run, case), trainer.mix, world.device, autocast=case.autocast),
            )


def _set_bare_scope(run: Run, case: SpeedCase) -> Run:
    """Return the run with the bare loop's scope of compilation."""
    return replace(run, compile=replace(run.compile, scope=case.bare)) if case.bare else run


def profile_case(case: SpeedCase, overrides: Sequence[str], steps: int, rows: int = 25) -> str:
    """Return torch.profiler's table of the operators with the largest self time on the device in a case's steps.

    Raises:
        ConfigError: if the case can't be composed on this machine.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run = compose.compose_run([*overrides, *case.overrides])
    cuda = run.machine.device == "cuda"
    with open_trainer(run) as (trainer, _):
        trainer.run_steps(WARM)
        with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
            trainer.run_steps(steps)
    torch._dynamo.reset()
    sort_key = "self_device_time_total" if cuda else "self_cpu_time_total"
    return str(profiled.key_averages().table(sort_by=sort_key, row_limit=rows, max_name_column_width=60))


@dataclass(frozen=True)
class HostSync:
    """The first operation within titan's steps that makes the host wait for the GPU (empty: none), or the error."""

    location: str = ""
    failure: str = ""

    def describe(self) -> str:
        """Return one clause for the output."""
        if self.failure:
            return f"not checked: {self.failure}"
        return f"the host synchronises at {self.location}" if self.location else "no host synchronisation in a step"


def find_host_sync(overrides: Sequence[str]) -> HostSync:
    """Search a recipe's steps for a host synchronisation, in a separate process so that its GPU memory is freed.

    Raises:
        ConfigError: if the recipe can't be composed on this machine.
    """
    compose.compose_run(overrides)
    return HostSync(**_run_process("sync", [], overrides))


def print_host_sync(overrides: Sequence[str]) -> int:
    """Search in this process, print the `HostSync` as JSON in the last line, return the exit code."""
    print(json.dumps(asdict(HostSync(locate_host_sync(compose.compose_run(overrides))))))
    return 0


def locate_host_sync(run: Run, steps: int = 3) -> str:
    """Return file, line and source of the first operation in a step that makes the host wait for the GPU; else "".

    torch raises at the first synchronising operation (`torch.cuda.set_sync_debug_mode`). Reading the metrics of the
    step before waits for an event, which does not count. Other errors pass through.
    """
    import torch

    with open_trainer(run) as (trainer, _):
        trainer.run_steps(WARM)
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.run_steps(steps)
        except RuntimeError as error:
            if not str(error).startswith(SYNCHRONIZING):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def build_environment() -> dict[str, str]:
    """Return this process's environment with its titan on PYTHONPATH."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
