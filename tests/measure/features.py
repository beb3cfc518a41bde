"""Measure what each feature of debugging costs: `python -m tests.measure suite=features [parallelism=fsdp]`.

Two sets of ranks train the same run, one of them with the feature, and take turns of a few steps: while one trains, the
other waits without using a core. So other work on the machine slows both, and each pair of turns gives one ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from titan.files.environment import divide_cores, set_variables
from titan.run.compose import compose_run
from titan.run.run import Run

if TYPE_CHECKING:
    from titan.calibration.trials import Trial
    from titan.training.trainer import Trainer

T = TypeVar("T")
OFF = ("profile.rank_times=false", "profile.on_demand=0", "debug.hang_seconds=null", "metrics.spike_window=0")
"""Settings with which no feature is on."""
PROFILED = ("profile.wait=0", "profile.warmup=0", "profile.active={steps}", "profile.every={steps}", "profile.repeat=0",
            "profile.ranks=[]")  # fmt: skip
FEATURES = {
    "off, twice": (),
    "rank times": ("profile.rank_times=true",),
    "hangs watched": ("debug.hang_seconds=60",),
    "spikes marked": ("metrics.spike_window=100",),
    "profile on demand, not asked for": ("profile.on_demand=2",),
    "all that is on by default": ("profile.rank_times=true", "debug.hang_seconds=60", "metrics.spike_window=100",
                                  "profile.on_demand=2"),
    "layers, every 10 steps": ("metrics.layers_every=10",),
    "layers, every step": ("metrics.layers_every=1",),
    "profile of every step": PROFILED,
    "profile with memory of every step": (*PROFILED, "profile.memory=true"),
}  # fmt: skip
"""Settings of each feature, behind `OFF`; a turn is one profile."""
SECONDS = 560.0
"""Time that the ranks have for one feature."""
HEADER = f"{'step time with the feature / without':<36} {'ms':>8} {'ratio':>7} (quartiles)"


@dataclass(frozen=True)
class Overhead:
    """What a feature costs: median seconds of a step without it, and the ratio with it of each pair of turns."""

    title: str
    seconds: float
    ratios: tuple[float, ...]

    def row(self) -> str:
        """Return the line of the table."""
        low, middle, high = statistics.quantiles(self.ratios, n=4) if len(self.ratios) > 1 else self.ratios * 3
        return f"{self.title:<36} {self.seconds * 1000:>8.1f} {middle:>7.3f} ({low:.3f} to {high:.3f})"


def suite(text: str, base: Sequence[str], rounds: int, steps: int) -> Iterator[Overhead]:
    """Yield the cost of each feature whose title contains a text.

    Args:
        text: part of titles; empty: all.
        base: overrides of the run.
        rounds: turns of each side.
        steps: steps of a turn.
    """
    for title, settings in FEATURES.items():
        if text in title:
            sides = [
                compose_run([*base, *OFF]),
                compose_run([*base, *OFF, *(setting.format(steps=steps) for setting in settings)]),
            ]
            yield measure_overhead(title, sides, rounds, steps)


def measure_overhead(title: str, sides: Sequence[Run], rounds: int, steps: int) -> Overhead:
    """Return the cost of the second run's settings, relative to the first run."""
    from titan.calibration.trials import prepare_trial, run_together

    with tempfile.TemporaryDirectory(prefix="titan-features-") as folder:
        trials = [prepare_trial(replace(run, directory=f"{folder}/{name}")) for name, run in enumerate(sides)]
        devices = sides[0].layout.devices
        work = partial(_run_side, trials, rounds, steps, folder, devices)
        variables = dict(os.environ)
        divide_cores(variables, devices)  # of both sides only one computes
        with set_variables(variables):
            run_together(work, 2 * devices, SECONDS)
        first, second = (json.loads(Path(folder, f"{name}.json").read_text()) for name in (0, 1))
    ratios = tuple(b / a for a, b in zip(first, second, strict=True))
    return Overhead(title, statistics.median(first) / steps, ratios)


def _run_side(
    trials: Sequence[Trial], rounds: int, steps: int, folder: str, devices: int, rank: int, ranks: int, init_method: str
) -> dict[str, float]:
    """Be a rank of one of the two sides: the first half of the ranks trains the first run."""
    from titan.calibration.trials import build_trainer, connect_rank

    side, side_rank = divmod(rank, devices)
    turns = Turns(f"{folder}/turns", ranks, side)
    world = connect_rank(trials[side][0], side_rank, devices, f"{init_method}-{side}" if devices > 1 else "")
    with _start_recording(build_trainer(trials[side], world), trials[side]) as side_trainer:
        side_trainer.run_steps(steps)
        times = [turns.take_turn(partial(_time_turn, side_trainer, steps), side_rank == 0) for _ in range(rounds)]
    if side_rank == 0:
        Path(folder, f"{side}.json").write_text(json.dumps(times))
    turns.take_turn(lambda: None, side_rank == 0)  # no process of the other side is disturbed by the end of these
    return {}


def _time_turn(trainer: Trainer, steps: int) -> float:
    """Return the seconds of some steps, without what is written between two turns."""
    trainer.reporter.step_times.steps.clear()
    trainer.run_steps(steps)
    return sum(seconds for seconds, _, _ in trainer.reporter.step_times.steps)


@contextmanager
def _start_recording(trainer: Trainer, trial: Trial) -> Iterator[Trainer]:
    """Let a trainer record, and be watched, as in a run."""
    from titan.debug.watch import Watch
    from titan.training import reporter

    run, attempt = trial
    with ExitStack() as stack:
        stack.callback(trainer.close)
        stack.enter_context(
            Watch(Path(run.directory), trainer.world.rank_info, 1, trainer.world.activity, run.debug.hang_seconds)
        )
        if trainer.world.is_rank0:
            trainer.reporter.recorder = stack.enter_context(reporter.build_recorder(run, attempt, print))
        yield trainer


class Turns:
    """Lets two sides do something in turn; who waits sleeps."""

    def __init__(self, file: str, ranks: int, side: int) -> None:
        """Meet the ranks of both sides in a file; `side` is 0 or 1."""
        import torch.distributed as dist

        self.store = dist.FileStore(file, ranks)  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=SECONDS))
        self.side, self.number = side, 0

    def take_turn(self, work: Callable[[], T], ends_turn: bool) -> T:
        """Wait for this side's next turn, and work; with `ends_turn` the turn is over then.

        The order of a pair of turns changes each time: a machine that becomes slower favours no side.
        """
        turn = 2 * self.number + (self.side if self.number % 2 else 1 - self.side)
        self.number += 1
        if turn:
            self.store.wait([str(turn - 1)])
        result = work()
        if ends_turn:
            self.store.set(str(turn), "")
        return result
