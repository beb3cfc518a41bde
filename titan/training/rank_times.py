"""The times of all ranks in each step, and ranks that are slower than the others.

Each rank writes its times of the latest finished step into its slots of the vector that ranks sum, from which rank 0
reads those of all one or two steps later. Ranks wait for each other in every step, so that all steps take equally long:
a slow rank is known by its own time, without waiting for others, compared with the ranks of the same pipeline stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.console.numbers import format_rounded
from titan.parallelism import collectives, context_ring
from titan.parallelism.mesh import RunContext
from titan.parallelism.schema import Layout
from titan.profile.schema import Profile
from titan.profile.waits import Waits
from titan.training.train_step import TrainStep

Times = NDArray[np.float64]
FIGURES = ("step_seconds", "data_seconds", "wait_seconds")
"""Of each rank: its step, and of that waiting for data and for other ranks."""
WAIT_FUNCTIONS = tuple((module, "wait") for module in (collectives, context_ring))
"""Where tensor and context parallelism wait for a collective."""


class RankTimes:
    """Measures this rank's times, and reads those of all ranks."""

    def __init__(self, settings: Profile, world: RunContext, train_step: TrainStep, compiled: bool) -> None:
        """Take the settings, and start to measure where there are several ranks."""
        self.rank, self.world_size = world.rank_info.rank, world.rank_info.world_size
        self.is_on = settings.rank_times and self.world_size > 1
        self.num_slots = len(FIGURES) * self.world_size if self.is_on else 0
        self.slow_ranks = SlowRanks(settings, world.layout)
        self.waits = Waits(world.device, compiled)
        self.pending: dict[int, list[tuple[Any, Any]]] = {}
        self.latest: tuple[int, list[float]] | None = None
        self.sent_steps: dict[int, int] = {}
        if self.is_on:
            replicas = world.layout.only_replicated
            self.waits.install(next(train_step.parameters()) if replicas else None, WAIT_FUNCTIONS)

    def build_slots(self, step: int) -> Times:
        """Return this rank's part of the vector of a step [count]: its times in its own slots, zeros in others."""
        values = np.zeros(self.num_slots)
        if self.is_on and self.latest is not None:
            self.sent_steps[step], times = self.latest
            values[len(FIGURES) * self.rank : len(FIGURES) * (self.rank + 1)] = times
        return values

    def end_backward(self) -> None:
        """Note that gradients are complete."""
        self.waits.end_backward()

    def begin_step(self, follows: bool) -> None:
        """Note that a step begins.

        Args:
            follows: whether its time begins where that of the step before ended; otherwise the waits between belong to
                something else, such as an evaluation.
        """
        if not follows:
            self.waits.take_waits()

    def end_step(self, step: int) -> None:
        """Note that the host has issued a whole step, which may be one that is repeated."""
        if self.is_on:
            self.pending[step] = self.waits.take_waits()

    def finish_step(self, step: int, seconds: float, data_seconds: float) -> None:
        """Take the times of a step that the device has finished."""
        if self.is_on:
            self.latest = step, [seconds, data_seconds, self.waits.sum_seconds(self.pending.pop(step))]

    def read_slots(self, step: int, slots: Times) -> tuple[dict[str, Any], list[str]]:
        """Return this step's rank times for metrics.jsonl, and warnings about slow ranks; on rank 0 only.

        Args:
            slots: the sum of what the ranks wrote [count].
        """
        measured = self.sent_steps.pop(step, None)
        if measured is None or self.rank != 0:
            return {}, []
        figures = dict(zip(FIGURES, slots.reshape(-1, len(FIGURES)).T, strict=True))
        own_seconds = figures["step_seconds"] - figures["wait_seconds"]
        warnings = self.slow_ranks.add_step(own_seconds, figures["data_seconds"])
        spread = {name: _compute_spread(values) for name, values in {**figures, "own_seconds": own_seconds}.items()}
        slow = {"slow": self.slow_ranks.ranks} if self.slow_ranks.ranks else {}
        return {"ranks": {"step": measured, **spread, **slow}}, warnings

    def close(self) -> None:
        """Stop measuring."""
        self.waits.close()


def _compute_spread(values: Times) -> dict[str, float]:
    """Return the least, median and largest value, and the rank that has the largest."""
    spread = {"min": values.min(), "median": np.median(values), "max": values.max()}
    return {**{name: round(float(value), 6) for name, value in spread.items()}, "rank": int(values.argmax())}


class SlowRanks:
    """Names ranks whose own time is larger than that of the ranks with the same work: medians of the latest steps."""

    def __init__(self, settings: Profile, layout: Layout) -> None:
        self.factor, self.window, self.step_count = settings.slow_factor, settings.slow_steps, 0
        self.stages = np.arange(layout.devices) // (layout.devices // layout.pipeline)
        self.steps = np.zeros((0, 2, layout.devices))
        self.ranks: list[int] = []

    def add_step(self, own_seconds: Times, data_seconds: Times) -> list[str]:
        """Take the own time of each rank in a step, of it waiting for data, and return warnings as sentences."""
        if not self.window:
            return []
        if not len(self.steps):
            self.steps = np.zeros((self.window, *self.steps.shape[1:]))
        self.steps[self.step_count % self.window] = own_seconds, data_seconds
        self.step_count += 1
        if self.step_count < self.window:
            return []
        latest, waited = np.median(self.steps, axis=0)
        peer_medians = compute_peer_medians(latest, self.stages)
        slow, previous = np.flatnonzero(latest > self.factor * peer_medians).tolist(), set(self.ranks)
        warnings = [self._describe_rank(r, latest[r], peer_medians[r], waited[r]) for r in slow if r not in previous]
        warnings += [f"rank {rank} is no longer slow" for rank in sorted(previous.difference(slow))]
        self.ranks = slow
        return warnings

    def _describe_rank(self, rank: int, own_seconds: float, peer_median: float, data_seconds: float) -> str:
        cause = "waiting for data" if data_seconds > (own_seconds - peer_median) / 2 else "computation"
        return (
            f"rank {rank} is slow: its own time is {format_rounded(own_seconds)} s per step, "
            f"{own_seconds / peer_median:.1f} times that of the other ranks ({format_rounded(peer_median)} s), in the "
            f"median of {self.window} steps; the cause is {cause}"
        )


def compute_peer_medians(values: Times, groups: NDArray[np.int64]) -> Times:
    """Return for each value the median of the others of its group; the value itself where there are none."""
    medians = values.copy()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        members = members[np.argsort(values[members])]
        ordered, count, index = values[members], len(members), np.arange(len(members))
        if count > 1:  # without the value at `index`, those behind it move up
            low, high = (count - 2) // 2, (count - 1) // 2
            medians[members] = (ordered[low + (index <= low)] + ordered[high + (index <= high)]) / 2
    return medians
