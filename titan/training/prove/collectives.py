"""The sequence of collectives of a shrunk run, and of its target, traced without values.

The target is traced with its own widths, vocabulary, experts and degrees, but with the shrunk run's blocks, pipeline
and micro-batches: what a rank exchanges repeats over these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from titan.cluster.forked_tasks import ForkedTaskError, map_in_forks
from titan.errors import RunError
from titan.estimate.traced.events import AFTER, BEFORE, NONE, Event
from titan.numerics.checks import Check
from titan.run.run import Run
from titan.run.shrink import Shrunk, widen_run
from titan.training.trace.rank import trace_rank
from titan.training.trace.ranks import make_eager

NAME = "collectives of the traced target"
TRACE_SECONDS = 600.0
"""How long tracing may take."""


@dataclass(frozen=True)
class Collective:
    """A collective of a step, without its size.

    Attributes:
        action: what the step does, as of `Region`.
        stage: the pipeline stage.
        microbatch: its number.
        part: the block's index among those of the rank, or "embedding", "head", or "".
        name: its kind.
        stream: the dimension or stream where it runs.
    """

    action: str
    stage: int
    microbatch: int
    part: str
    name: str
    stream: str

    def __str__(self) -> str:
        return f"{self.name} ({self.stream}) of {self.action}{self.microbatch} {self.part}".strip()


def check_collectives(shrunk: Shrunk) -> Check:
    """Return at how many positions the sequences of collectives differ, over all pipeline ranks."""
    runs = [shrunk.run, widen_run(shrunk)]
    pipeline = shrunk.run.layout.pipeline
    tasks = [(run, number * run.layout.devices // pipeline) for number in range(pipeline) for run in runs]
    try:
        sequences = map_in_forks(list_collectives, tasks, 2, TRACE_SECONDS)
    except ForkedTaskError as error:
        raise RunError(f"the target could not be traced ({error}); give the machine more memory.") from None
    pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
    first = next((text for pair in pairs if (text := describe_difference(*pair))), "")
    count = sum(len(pair[0]) for pair in pairs)
    return Check(NAME, float(sum(pair[0] != pair[1] for pair in pairs)), 0.0, first, count)


def list_collectives(run: Run, rank: int) -> list[Collective]:
    """Return the collectives of a traced step of one rank, in the order in which the host issues them."""
    events = trace_rank(make_eager(run), rank, "cpu").events
    found = [_describe_event(event) for event in events if event.kind == "collective"]
    if not run.layout.only_replicated:
        return found
    # how many buckets DDP fills, and when, depends on sizes
    return list(dict.fromkeys(dataclasses.replace(collective, microbatch=-1, part="") for collective in found))


def describe_difference(a: Sequence[Collective], b: Sequence[Collective]) -> str:
    """Return the first position at which two sequences differ, in words; empty where they are the same."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return f"number {index + 1}: {one}, and {other} in the target"
    return "" if len(a) == len(b) else f"{len(a)} collectives, and {len(b)} in the target"


def _describe_event(event: Event) -> Collective:
    region = event.region
    block = region.block if region.block != NONE else event.owner
    part = {BEFORE: "embedding", AFTER: "head", NONE: ""}.get(block, f"block {block}")
    return Collective(region.action, region.stage, region.microbatch, part, event.name, event.stream)
