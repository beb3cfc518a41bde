"""How long a pipeline's step takes: its makespan, when each action runs, and how long ranks wait. Free of torch.

Which result an action waits for does not depend on how long actions take: `link_order` finds it once for all layouts
with the same schedule, and a `LinkedOrder` is replayed with the times of one of them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from titan.parallelism.pipeline.schedules import Action, Cell, find_schedule, format_cell, order_actions

StageKind = tuple[int, str]
"""A stage and a kind of action."""
Result = tuple[str, int, int]
"""What an action computes: a kind, a stage and a micro-batch; a full backward pass counts as that of inputs."""
MOST_GATHERED = 3
"""The stages of a rank that torch's schedules gather at a time."""
UNITS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""The time of each kind of action where backward takes twice as long as forward, half of it for weights."""


@dataclass(frozen=True)
class ActionSpan:
    """When a rank executes an action, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class LinkedOrder:
    """An order's actions, each after those that it waits for.

    Attributes:
        keys: the kinds of action of each stage.
        ranks: of each action.
        kinds: of each action, as an index of `keys`.
        microbatches: of each action.
        sources: the action of another rank that each waits for, as an index; -1: none. What it waits for on its own
            rank is done when the rank reaches it.
    """

    keys: tuple[StageKind, ...]
    ranks: array[int]
    kinds: array[int]
    microbatches: array[int]
    sources: array[int]

    @cached_property
    def counts(self) -> dict[StageKind, int]:
        """Actions of each kind in each stage."""
        return {self.keys[kind]: count for kind, count in Counter(self.kinds).items()}

    @cached_property
    def gathers(self) -> tuple[Counter[int], ...]:
        """How often each rank gathers the weights of each of its stages, where FSDP shards them."""
        stages: dict[int, list[int]] = {rank: [] for rank in sorted(set(self.ranks))}
        for rank, kind in zip(self.ranks, self.kinds, strict=True):
            stages[rank].append(self.keys[kind][0])
        return tuple(map(_count_gathers, stages.values()))

    def compute_makespan(self, seconds: Mapping[StageKind, float], hop: float = 0.0) -> float:
        """Return the time from the first action's start to the last one's end.

        Args:
            hop: seconds to send a result to a stage on another rank.
        """
        costs = [seconds[key] for key in self.keys]
        return max(self._compute_ends([costs[kind] for kind in self.kinds], hop), default=0.0)

    def _compute_ends(self, costs: Sequence[float], hop: float) -> list[float]:
        clocks, ends = [0.0] * (1 + max(self.ranks, default=0)), list[float]()
        for rank, cost, source in zip(self.ranks, costs, self.sources, strict=True):
            time = clocks[rank]
            if source >= 0 and (arrival := ends[source] + hop) > time:
                time = arrival
            clocks[rank] = time = time + cost
            ends.append(time)
        return ends

    def compute_timetable(self, cost: Callable[[Action], float], hop: float = 0.0) -> list[ActionSpan]:
        """Return when each rank executes each of its actions; `cost` gives the seconds of one."""
        actions = [Action(*self.keys[kind], m) for kind, m in zip(self.kinds, self.microbatches, strict=True)]
        ends = self._compute_ends(list(map(cost, actions)), hop)
        clocks, spans = dict[int, float](), list[ActionSpan]()
        for rank, action, source, end in zip(self.ranks, actions, self.sources, ends, strict=True):
            start = max(clocks.get(rank, 0.0), ends[source] + hop if source >= 0 else 0.0)
            spans.append(ActionSpan(rank, action, start, end))
            clocks[rank] = end
        return spans


def _count_gathers(stages: Sequence[int]) -> Counter[int]:
    """Return how often a rank gathers each of its stages, given those of its actions in order.

    torch's schedules gather at most three of a rank's stages at a time: those whose actions come next. A rank with more
    stages frees the weights of one and gathers those of another as its actions go on. Source: _add_unshard_reshard in
    torch/distributed/pipelining/schedules.py.
    """
    if len(set(stages)) <= MOST_GATHERED:
        return Counter(set(stages))
    following, windows = list[int](), list[set[int]]()
    for stage in reversed(stages):  # the next stages from each action on
        following = [stage, *(other for other in following if other != stage)][:MOST_GATHERED]
        windows.append(set(following))
    windows.reverse()
    return Counter(chain(windows[0], *(after - before for before, after in pairwise(windows))))


def link_order(rows: Sequence[Sequence[Cell]]) -> LinkedOrder:
    """Return an order with the action of another rank that each action waits for.

    Forward of a stage needs the forward of the previous stage, backward (also of inputs alone) the stage's own forward
    and the backward of the next stage, backward of weights that of inputs, of the same micro-batch. The results of an
    overlap are there after all of it.

    Raises:
        ValueError: when the order deadlocks.
    """
    owners = {a.stage: rank for rank, row in enumerate(rows) for cell in row for a in cell}
    last_stage = max(owners, default=0)
    next_cells, ready = [0] * len(rows), list(range(len(rows)))
    done: dict[Result, int] = {}
    waiting: dict[Result, int] = {}  # the rank that waits for each
    numbers: dict[StageKind, int] = {}
    ranks, kinds, microbatches, sources = (array("i") for _ in range(4))
    while ready:
        rank = ready.pop()
        while next_cells[rank] < len(rows[rank]):
            actions = rows[rank][next_cells[rank]]
            needs = [_list_needs(action, last_stage) for action in actions]
            missing = next((need for need in chain(*needs) if need not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            next_cells[rank] += 1
            last = len(ranks) + len(actions) - 1
            for (stage, kind, microbatch), own_needs in zip(actions, needs, strict=True):
                ranks.append(rank)
                kinds.append(numbers.setdefault((stage, kind), len(numbers)))
                microbatches.append(microbatch)
                sources.append(next((done[need] for need in own_needs if owners[need[1]] != rank), -1))
            for stage, kind, microbatch in actions:
                result = "I" if kind == "B" else kind, stage, microbatch
                done[result] = last
                if result in waiting:
                    ready.append(waiting.pop(result))
    waits = [
        f"rank {rank} at {format_cell(row[at])}"
        for rank, (row, at) in enumerate(zip(rows, next_cells, strict=True))
        if at < len(row)
    ]
    if waits:
        raise ValueError(f"the order deadlocks: {', '.join(waits)}")
    return LinkedOrder(tuple(numbers), ranks, kinds, microbatches, sources)


@lru_cache(256)
def link_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    """Return the linked order of `order_actions`."""
    return link_order(order_actions(schedule, ranks, stages_per_rank, microbatches))


def _list_needs(action: Action, last_stage: int) -> list[Result]:
    stage, kind, m = action
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("I", stage, m)]
    return [("F", stage, m), *([("I", stage + 1, m)] if stage < last_stage else [])]


def compute_idle_share(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Return the idle share of the ranks' time, in `UNITS`.

    Exact: in closed form where micro-batches fill the pipeline, otherwise from the order.

    Raises:
        ConfigError: as `order_actions` does.
        ValueError: as `order_actions` does.
    """
    kind = find_schedule(schedule)
    if kind.allows(ranks, stages_per_rank, microbatches) and kind.fills(ranks, microbatches):
        return kind.least_idle(ranks, stages_per_rank, microbatches)
    return compute_order_idle(order_actions(schedule, ranks, stages_per_rank, microbatches))


def compute_order_idle(rows: Sequence[Sequence[Cell]]) -> float:
    """Return the mean of the ranks' idle shares in an order; raises as `link_order` does."""
    order = link_order(rows)
    makespan = order.compute_makespan({key: UNITS[key[1]] for key in order.keys})
    busy = [sum(UNITS[action.kind] for cell in row for action in cell) for row in rows]
    return math.fsum((makespan - time) / makespan for time in busy) / len(busy) if makespan else 0.0
