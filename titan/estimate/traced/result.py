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
from titan.estimate.traced.allocator import ReservedMemory
from titan.estimate.traced.events import StepTrace
from titan.estimate.traced.memory import LiveMemory
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
    live: LiveMemory
    reserved: ReservedMemory | None
    course: tuple[LiveMemory, ...]
    time: RankTime

    @property
    def gib(self) -> float:
        """Reserved memory with the context of a GPU and its communication library in GiB; on a CPU live tensors."""
        return self.live.bytes / GIB if self.reserved is None else self.reserved.reserved / GIB + CONTEXT_GIB


@dataclass(frozen=True)
class TracedStep:
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


def build_rank_result(recipe: Recipe, layout: Layout, speeds: Speeds, trace: StepTrace, device: str) -> RankResult:
    """Return memory and time of a traced rank on a device, "cuda" or "cpu"."""
    return RankResult(
        rank=trace.rank,
        events=len(trace.events),
        live=memory.find_peak(trace.events),
        reserved=allocator.simulate_step(trace.events) if device != "cpu" else None,
        course=tuple(memory.sample_course(trace.events, POINTS)),
        time=replay.replay_rank(recipe, layout, speeds, trace),
    )


def build_traced_step(
    recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, ranks: Sequence[RankResult], seconds: float
) -> TracedStep:
    """Return the traced step of a run from those of its pipeline ranks."""
    step = replay.replay_step(recipe, layout, microbatches, speeds, [rank.time for rank in ranks])
    return TracedStep(tuple(ranks), step, seconds)
