"""One case of `titan.bench`: titan and the bare loop on the same recipe, how fast, where the time goes, who waits.

On a CPU both are in one process and take turns, so that whatever else the machine does meets both. On a GPU each has a
process of its own, one after the other, since two may not fit into its memory together.
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

from titan.bench.suites import Case
from titan.cluster.devices import peak_tflops
from titan.errors import ConfigError
from titan.estimate.roofline import Limit, limit, rates
from titan.run import attempts, compose
from titan.run.run import Run
from titan.training.signals import StopSignals

if TYPE_CHECKING:
    from titan.bench.bare_loop import BareLoop
    from titan.training.trainer import Trainer

Side = Literal["titan", "bare"]
SIDES: tuple[Side, ...] = ("bare", "titan")
WARM = 3
"""Steps before a measurement: allocations, compilation."""
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""How torch's message begins when the host would wait for the device, and this was to be an error."""
ERROR = re.compile(r"(\[rank\d+\]: )?(titan: |[\w.]*(Error|Exception|Exit|Interrupt)\b|[\w.]+\.exc\.\w+)")
"""How a line begins that says why a process failed; warnings and advice may follow it."""
HEADER = (
    f"{'tokens/s':<34} {'bare':>10} {'titan':>10} {'ratio':>7} {'(lowest to highest)':<18} {'MFU':>7} {'of limit':>8}"
)


@dataclass(frozen=True)
class Alone:
    """What one side took: seconds of each round, and the most memory; how it ended where it failed."""

    seconds: tuple[float, ...] = ()
    memory_gib: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Speed:
    """What a case gave.

    Attributes:
        title: the case's.
        bare, titan: tokens/s, the medians; 0 for a side that failed.
        ratios: titan's share of the bare loop's speed, round by round; none where a side failed.
        mfu: titan's share of the device's peak in the type to compute in, where that is known: with products in
            float8 too it is that of bf16.
        limit: tokens/s that there could be, see `titan.estimate.roofline`.
        parts: seconds of that limit's step.
        memory_gib: the peak of each side, where they were apart.
        failure: how a side failed.
    """

    title: str
    bare: float
    titan: float
    ratios: tuple[float, ...]
    mfu: float | None
    limit: float
    parts: Mapping[str, float]
    memory_gib: Mapping[str, float | None]
    failure: str = ""

    def rows(self) -> str:
        """As lines of the table: speeds; memory, where it is known; and what the limit's step is spent on."""
        ratios = f"{'-':>7} {'':<18}"
        if self.ratios:
            low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
            ratios = f"{middle:>7.3f} ({low:.3f} to {high:.3f})"
        mfu = f"{self.mfu:7.1%}" if self.mfu else "      -"
        speeds = f"{self.bare:>10,.0f} {self.titan:>10,.0f} {ratios} {mfu} {self.titan / self.limit:>8.1%}"
        least = Limit(self.parts, 0)
        lines = [f"{self.title:<34} {speeds}", f"  limit {self.limit:,.0f}: {least.describe()}"]
        if known := [f"{side} {gib:.1f} GiB" for side, gib in self.memory_gib.items() if gib]:
            lines.append(f"  peak memory: {', '.join(known)}")
        return "\n".join([*lines, *([f"  {self.failure}"] if self.failure else [])])


def speed(case: Case, overrides: Sequence[str], ceilings: Mapping[str, float], rounds: int, steps: int) -> Speed:
    """Measure a case.

    Args:
        case: what to measure.
        overrides: what holds for all cases.
        ceilings: what the device was measured to do at most.
        rounds, steps: rounds that both sides train, and steps of each.

    Raises:
        ConfigError: where the case can't be composed here.
    """
    run = compose.composed([*overrides, *case.overrides])
    how = apart if run.machine.device == "cuda" else together
    sides = how(run, case, overrides, rounds, steps)
    tokens = steps * run.training.global_batch
    pace = {s: tokens / statistics.median(a.seconds) if a.seconds else 0.0 for s, a in sides.items()}
    peak = run.cluster.peak_tflops or peak_tflops(run.machine.name, run.precision.compute)  # type: ignore[arg-type]
    tflops = pace["titan"] * run.model.flops_per_token(run.training.seq_len) / 1e12
    least = limit(run, run.microbatches, rates(ceilings, run, run.machine.device))
    return Speed(
        title=case.title,
        **pace,
        ratios=tuple(b / t for b, t in zip(sides["bare"].seconds, sides["titan"].seconds, strict=False)),
        mfu=tflops / peak if peak else None,
        limit=least.tokens_per_second,
        parts=least.parts,
        memory_gib={side: taken.memory_gib for side, taken in sides.items()},
        failure="; ".join(f"{side}: {taken.failure}" for side, taken in sides.items() if taken.failure),
    )


def together(run: Run, case: Case, overrides: Sequence[str], rounds: int, steps: int) -> dict[Side, Alone]:
    """Both sides in this process, in turn; arguments as for `speed`."""
    import torch

    from titan.bench.bare_loop import seconds

    found: dict[Side, list[float]] = {"bare": [], "titan": []}
    with trainer(run) as (ours, bare_loop):
        bare = bare_loop(case)
        work: dict[Side, Callable[[int], None]] = {"bare": bare.steps, "titan": ours.loop}
        for side in SIDES:
            work[side](WARM)
        for number in range(rounds):
            for side in SIDES if number % 2 else SIDES[::-1]:
                found[side].append(seconds(lambda side=side: work[side](steps), ours.world.device))  # type: ignore[misc]
    torch._dynamo.reset()
    return {side: Alone(tuple(times)) for side, times in found.items()}


def apart(run: Run, case: Case, overrides: Sequence[str], rounds: int, steps: int) -> dict[Side, Alone]:
    """Each side in a process of its own; arguments as for `speed`."""
    how = ["--rounds", str(rounds), "--steps", str(steps), *(["--autocast"] if case.autocast else [])]
    other = {"bare": [f"compile={case.bare}"] if case.bare else [], "titan": []}
    return {side: Alone(**_started(side, how, [*overrides, *case.overrides, *other[side]])) for side in SIDES}


def _started(what: str, how: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """What a process of its own found, which gets `--alone` and prints JSON last; or the `failure` that ended it."""
    command = [sys.executable, "-m", "titan.bench", "--alone", what, *how, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        return {"failure": reason(done.stderr, done.returncode)}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def reason(text: str, code: int) -> str:
    """Why a process failed, in a line: the last one of its messages that tells an error, else its exit code."""
    lines = [line for line in text.splitlines() if ERROR.match(line)]
    return lines[-1][:200] if lines else f"exit code {code}"


def alone(side: Side, overrides: Sequence[str], rounds: int, steps: int, autocast: bool = False) -> int:
    """Train one side only, and print what it took, as JSON, in the last line; returns the exit code."""
    run = compose.composed(overrides)
    import torch

    from titan.bench.bare_loop import seconds
    from titan.metrics.recorder import peak_memory_gib

    device = torch.device(run.machine.device)
    with _side(side, run, device, autocast) as work:
        work(WARM)
        times = [seconds(lambda: work(steps), device) for _ in range(rounds)]
    print(json.dumps(asdict(Alone(tuple(times), peak_memory_gib(device)))))
    return 0


@contextmanager
def _side(side: Side, run: Run, device: Any, autocast: bool) -> Iterator[Callable[[int], None]]:
    """What trains so many steps of one side."""
    if side == "titan":
        with trainer(run) as (ours, _):
            yield ours.loop
        return
    from titan.bench.bare_loop import BareLoop
    from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora

    mix = build_mixture(run.dataset, run.training, open_corpora(prepare_corpora(run.dataset)))
    yield BareLoop(run, mix, device, autocast=autocast).steps


@contextmanager
def trainer(run: Run) -> Iterator[tuple[Trainer, Callable[[Case], BareLoop]]]:
    """titan's own trainer for one device, recording as always, and what makes a case's bare loop on the same data."""
    from titan.bench.bare_loop import BareLoop
    from titan.cluster.rank_info import RankInfo
    from titan.parallelism import mesh
    from titan.training import recording
    from titan.training.build import build
    from titan.training.trainer import Trainer

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        run = replace(run, directory=folder)
        attempt = attempts.begin_attempt(run)
        if isinstance(attempt, attempts.FinishedRun):
            raise ConfigError(f"{folder} holds a finished run; empty it.")
        world = mesh.connect(RankInfo(), run.layout, run.machine.device, run.cluster.timeout)
        ours = Trainer(run, attempt, world, build(run, world), StopSignals())
        with recording.recorder(run, attempt, print) as recorder, ours.loader:
            ours.recorder = recorder
            yield ours, lambda case: BareLoop(_bare(run, case), ours.mix, world.device, autocast=case.autocast)


def _bare(run: Run, case: Case) -> Run:
    """The run as the bare loop compiles it."""
    return replace(run, compile=replace(run.compile, scope=case.bare)) if case.bare else run


def profile(case: Case, overrides: Sequence[str], steps: int, rows: int = 25) -> str:
    """The operators that a case's steps take longest in, by their own time on the device, as torch.profiler's table.

    Raises:
        ConfigError: where the case can't be composed here.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run = compose.composed([*overrides, *case.overrides])
    cuda = run.machine.device == "cuda"
    with trainer(run) as (ours, _):
        ours.loop(WARM)
        with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
            ours.loop(steps)
    torch._dynamo.reset()
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    return str(seen.key_averages().table(sort_by=by, row_limit=rows, max_name_column_width=60))


@dataclass(frozen=True)
class Waits:
    """Where the host waits for a GPU within titan's own steps; empty where it does not. How looking at it failed."""

    place: str = ""
    failure: str = ""

    def describe(self) -> str:
        """In a few words."""
        if self.failure:
            return f"not looked at: {self.failure}"
        return f"the host waits for the device at {self.place}" if self.place else "the host waits nowhere in a step"


def waits(overrides: Sequence[str]) -> Waits:
    """Whether a recipe's steps wait, seen in a process of its own, which gives its memory back.

    Raises:
        ConfigError: where the recipe can't be composed here.
    """
    compose.composed(overrides)
    return Waits(**_started("waits", [], overrides))


def waits_alone(overrides: Sequence[str]) -> int:
    """Look in this process, and print what was found, as JSON, in the last line; returns the exit code."""
    print(json.dumps(asdict(Waits(waiting(compose.composed(overrides))))))
    return 0


def waiting(run: Run, steps: int = 3) -> str:
    """Where the host first waits for a GPU within titan's own steps: a file, a line and its operation, or nothing.

    torch raises at the first operation that waits (`torch.cuda.set_sync_debug_mode`). Reading a step's figures waits
    for an event, one step late, which is no such operation. Other errors are the caller's.
    """
    import torch

    with trainer(run) as (ours, _):
        ours.loop(WARM)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours.loop(steps)
        except RuntimeError as error:
            if not str(error).startswith(SYNCHRONIZING):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def environment() -> dict[str, str]:
    """This process's environment, with its own titan in reach."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
