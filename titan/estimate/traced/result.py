"""What a trace says about a step: memory and time of each pipeline rank. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.estimate.operations import Speeds
from titan.estimate.overhead import CONTEXT_GIB
from titan.estimate.rank_sizes import GIB
from titan.estimate.step_time import StepTime
from titan.estimate.traced import allocator, memory, replay
from titan.estimate.traced.allocator import Reserved
from titan.estimate.traced.events import Trace
from titan.estimate.traced.memory import Live
from titan.estimate.traced.replay import RankTime

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

POINTS = 400
"""Moments of a step whose memory is kept for a chart."""


@dataclass(frozen=True)
class RankResult:
    """The traced step of a rank.

    Attributes:
        rank: its number.
        events: how many were traced or composed.
        live: the moment with most bytes of live tensors.
        reserved: what CUDA's caching allocator reserves for them; None on a CPU.
        course: live tensors over the step.
        time: of its operations.
    """

    rank: int
    events: int
    live: Live
    reserved: Reserved | None
    course: tuple[Live, ...]
    time: RankTime

    @property
    def gib(self) -> float:
        """Reserved memory with the context of a GPU and its communication library in GiB; on a CPU live tensors."""
        return self.live.bytes / GIB if self.reserved is None else self.reserved.reserved / GIB + CONTEXT_GIB


@dataclass(frozen=True)
class Traced:
    """The traced step of a run.

    Attributes:
        ranks: the first rank of each pipeline rank, in order.
        step: time by cause.
        seconds: that tracing took.
    """

    ranks: tuple[RankResult, ...]
    step: StepTime
    seconds: float

    @property
    def fullest(self) -> RankResult:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.gib)


def rank_result(recipe: Recipe, layout: Layout, speeds: Speeds, trace: Trace, device: str) -> RankResult:
    """Return memory and time of a traced rank on a device, "cuda" or "cpu"."""
    return RankResult(
        rank=trace.rank,
        events=len(trace.events),
        live=memory.peak(trace.events),
        reserved=allocator.simulate(trace.events) if device != "cpu" else None,
        course=tuple(memory.course(trace.events, POINTS)),
        time=replay.rank_time(recipe, layout, speeds, trace),
    )


def result(
    recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, ranks: Sequence[RankResult], seconds: float
) -> Traced:
    """Return the traced step of a run from those of its pipeline ranks."""
    step = replay.step_time(recipe, layout, microbatches, speeds, [rank.time for rank in ranks])
    return Traced(tuple(ranks), step, seconds)
