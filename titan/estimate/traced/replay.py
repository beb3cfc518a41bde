"""The time of a traced step, and its result: each operation has its price, and streams wait for each other as recorded.

On a GPU the host issues operations one after another and takes a launch for each; an operation starts when the host has
issued it, its stream is free, and what the stream waits for is done. Collectives run on separate streams and slow
the computation beside them a little. On a CPU everything takes its turn. In a pipeline each action's time on its rank
goes into the schedule's timetable. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titan.estimate import operations
from titan.estimate.block_time import LAUNCHES, SecondsByCause
from titan.estimate.operations import Speeds
from titan.estimate.overhead import CONTEXT_GIB
from titan.estimate.rank_sizes import GIB
from titan.estimate.step_time import CONTENTION, StepModel, StepTime, scale_to_nodes
from titan.estimate.traced import memory
from titan.estimate.traced.events import COMPUTE, Event, StepTrace
from titan.estimate.traced.memory import LiveMemory, ReservedMemory
from titan.parallelism.pipeline.schedules import Action
from titan.parallelism.pipeline.timing import ActionSpan, link_schedule

if TYPE_CHECKING:
    from titan.parallelism.schema import Layout
    from titan.run.schema import Recipe

STREAMS = {
    "tensor": "tensor parallelism", "context": "context parallelism", "pipeline": "pipeline transfers",
    "expert": "expert parallelism",
}  # fmt: skip
"""What a wait for a stream's collective goes to; all others are weights and gradients."""
OUTSIDE = "US"
"""Actions that are not compiled."""
COPIES = ("all_gather_copy_in", "_foreach_copy_", "split_with_sizes_copy", "chunk_cat")
"""Copies of FSDP, which the compiler does not fuse with anything."""
ROW_COPIES = ("index",)
"""Copies of rows to experts and back, which no graph has where the rows travel between ranks."""
MATMUL = 3
"""Sizes in the shape of a matmul; that of attention has four."""


@dataclass
class Replay:
    """The state of a rank's streams, in seconds.

    Attributes:
        pricing: the time of operations.
        clocks: when each stream is free.
        host: when the host has issued what it has issued so far.
        parts: time of the computation's stream by cause, waits included.
        actions: time of each action (stage, kind, micro-batch).
        markers: when each was reached, and its stream.
    """

    pricing: Pricing
    clocks: dict[str, float] = field(default_factory=dict)
    host: float = 0.0
    parts: SecondsByCause = field(default_factory=SecondsByCause)
    actions: dict[tuple[int, str, int], float] = field(default_factory=dict)
    markers: dict[int, tuple[float, str]] = field(default_factory=dict)

    def run(self, events: Sequence[Event]) -> None:
        """Replay events."""
        for event in events:
            if self.pricing.synchronous:
                self._replay_synchronous(event)
            elif event.kind == "op":
                self._replay_operation(event)
            elif event.kind == "collective":
                self._replay_collective(event)
            elif event.kind == "record":
                self.markers[event.key] = (self.clocks.get(event.stream, 0.0), event.stream)
            elif event.kind == "wait":
                self._replay_wait(event)

    def _replay_synchronous(self, event: Event) -> None:
        """Spend the time of an event on a CPU, which launches, computes and communicates on the same cores in turn."""
        if event.kind == "op":
            self._spend_time(event, "host", self.pricing.launch)
            self._spend_time(event, self.pricing.find_cause(event), self.pricing.price_operation(event))
        elif event.kind == "collective":
            self._spend_time(
                event, STREAMS.get(event.stream, "weights and gradients"), self.pricing.price_collective(event)
            )

    def _replay_operation(self, event: Event) -> None:
        self.host += self.pricing.launch
        start = self.clocks.get(event.stream, 0.0)
        seconds = self.pricing.price_operation(event)
        if event.stream == COMPUTE:
            self._spend_time(event, "host", max(0.0, self.host - start))
            self._spend_time(event, self.pricing.find_cause(event), seconds)
        self.clocks[event.stream] = max(start, self.host) + seconds

    def _replay_collective(self, event: Event) -> None:
        seconds = self.pricing.price_collective(event)
        self.host += self.pricing.launch
        self.clocks[event.stream] = max(self.clocks.get(event.stream, 0.0), self.host) + seconds
        if event.stream not in STREAMS:
            contention = CONTENTION * seconds
            self._spend_time(event, "weights and gradients", contention)
            self.clocks[COMPUTE] = self.clocks.get(COMPUTE, 0.0) + contention

    def _replay_wait(self, event: Event) -> None:
        ready, stream = self.markers.get(event.key, (0.0, event.stream))
        current = self.clocks.get(event.stream, 0.0)
        if ready > current:
            if event.stream == COMPUTE:
                self._spend_time(event, STREAMS.get(stream, "weights and gradients"), ready - current)
            self.clocks[event.stream] = ready

    def _spend_time(self, event: Event, cause: str, seconds: float) -> None:
        self.parts[cause] += seconds
        region = event.region
        if region.microbatch >= 0:
            key = (region.stage, region.action, region.microbatch)
            self.actions[key] = self.actions.get(key, 0.0) + seconds


class Pricing:
    """The time of single operations and collectives."""

    def __init__(self, recipe: Recipe, layout: Layout, speeds: Speeds) -> None:
        self.recipe, self.speeds = recipe, speeds
        self.synchronous = speeds.synchronous
        self.compiled = recipe.compile.fuses
        self.launch = speeds.launch * (LAUNCHES[True] / LAUNCHES[False] if self.compiled else 1.0)
        self.fused = speeds.eager if self.compiled else 1.0
        self.unfused = (*COPIES, *ROW_COPIES) if layout.expert > 1 else COPIES
        self.exposed = speeds.overlapped if recipe.parallelism.async_tensor else 1.0
        self.eight_bit = _list_eight_bit_sizes(recipe, layout)
        self.prices: dict[tuple[str, tuple[int, ...]], float] = {}

    def price_operation(self, event: Event) -> float:
        """Return the seconds of an operation."""
        if not event.shape:
            fused = 1.0 if event.region.action in OUTSIDE or event.name in self.unfused else self.fused
            return event.size / fused / self.speeds.memory
        key = (event.name, event.shape)
        if key not in self.prices:
            self.prices[key] = self._price_computation(event)
        return self.prices[key]

    def _price_computation(self, event: Event) -> float:
        if len(event.shape) == MATMUL:
            eight_bit = any(sides <= set(event.shape) for sides in self.eight_bit)
            m, n, k = event.shape
            seconds = operations.estimate_matmul(m, n, k, self.speeds, eight_bit=eight_bit)
            seconds *= operations.GROUPED if "grouped" in event.name else 1.0
            if eight_bit:
                seconds *= operations.ROWWISE if self.recipe.precision.rowwise else 1.0
                factor = 1.0 if self.compiled else self.speeds.eager
                seconds += operations.estimate_cast(m, n, k, self.recipe.precision.bytes, factor, self.speeds)
            return seconds
        queries, keys, heads, size = event.shape
        queries *= 1 if self.recipe.model.is_causal else 2
        forward, backward = operations.estimate_attention(queries, keys, heads, size, self.speeds)
        return backward if "backward" in event.name else forward

    def price_collective(self, event: Event) -> float:
        """Return the seconds of a collective; a pipeline's messages are part of its timetable."""
        if event.name == "send":
            return 0.0
        ranks, stride = event.shape
        kind: Any = event.name
        seconds = operations.estimate_collective(kind, event.size, ranks, stride, self.speeds)
        return seconds * (self.exposed if event.stream == "tensor" else 1.0)

    def find_cause(self, event: Event) -> str:
        """Return what the time of an operation goes to."""
        if event.region.action == "U":
            return "optimizer"
        if event.recomputed:
            return "recomputation"
        if not event.shape:
            return "memory-bound"
        if "grouped" in event.name:
            return "experts"
        return "matmuls" if len(event.shape) == MATMUL else "attention"


def _list_eight_bit_sizes(recipe: Recipe, layout: Layout) -> list[set[int]]:
    """Return inputs and outputs of each linear layer whose matmuls are in eight bits, on one tensor rank."""
    layers = recipe.model.linear_layers()
    parts = (
        layers[name].split(layout.tensor) for name in recipe.precision.select_layers(layers, layout.tensor).quantized
    )
    return [{int(part.inputs), int(part.outputs)} for part in parts]


@dataclass(frozen=True)
class RankTime:
    """The seconds of a rank's step by cause, if it never waits for other stages of a pipeline, and of each action.

    An action is a stage, a kind and a micro-batch; `stages` are those of the rank.
    """

    parts: SecondsByCause
    actions: Mapping[tuple[int, str, int], float]
    stages: tuple[int, ...]

    @property
    def busy(self) -> float:
        """Seconds of all actions."""
        return sum(self.actions.values())


POINTS = 400
"""Moments of a step whose memory is kept for a chart."""


@dataclass(frozen=True)
class RankResult:
    """The traced step of a rank: the moment with most live tensors, their course, what CUDA's allocator reserves, time.

    `events` is how many were traced or composed; on a CPU nothing is reserved.
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
    """The traced step of a run: of the first rank of each pipeline rank, its time by cause; and the seconds it took."""

    ranks: tuple[RankResult, ...]
    step: StepTime
    seconds: float

    @property
    def fullest(self) -> RankResult:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.gib)


def build_rank_result(recipe: Recipe, layout: Layout, speeds: Speeds, trace: StepTrace, device: str) -> RankResult:
    """Return memory and time of a traced rank on a device, "cuda" or "cpu"."""
    events, replay = trace.events, Replay(Pricing(recipe, layout, speeds))
    replay.run(events)
    return RankResult(
        rank=trace.rank,
        events=len(events),
        live=memory.find_peak(events),
        reserved=memory.simulate_step(events) if device != "cpu" else None,
        course=tuple(memory.sample_course(events, POINTS)),
        time=RankTime(replay.parts, dict(replay.actions), tuple(trace.blocks)),
    )


def build_traced_step(
    recipe: Recipe, layout: Layout, microbatches: int, speeds: Speeds, ranks: Sequence[RankResult], seconds: float
) -> TracedStep:
    """Return the traced step of a run from that of one rank of each pipeline rank, in order."""
    times, spans = [rank.time for rank in ranks], list[ActionSpan]()
    parts = times[0].parts
    if len(ranks) > 1:
        owner = {stage: rank for rank in times for stage in rank.stages}

        def find_seconds(action: Action) -> float:
            return owner[action.stage].actions.get((action.stage, action.kind, action.microbatch), 0.0)

        model = StepModel(recipe, layout, microbatches, speeds)
        spans = link_schedule(*model.get_schedule()).compute_timetable(find_seconds, model.estimate_send())
        longest = max(times, key=lambda time: sum(time.parts.values()) - time.busy)
        parts = SecondsByCause(longest.parts)
        parts["pipeline idle"] += max(span.end for span in spans) - longest.busy
    return TracedStep(tuple(ranks), scale_to_nodes(parts, recipe, layout, speeds, tuple(spans)), seconds)
