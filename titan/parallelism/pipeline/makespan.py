"""The makespan of a pipeline's step where stages take different times, without a timetable. Free of torch.

Which result an action waits for does not depend on how long actions take: `link_order` finds it once for all layouts
with the same schedule, and `LinkedOrder.compute_makespan` replays it with the times of one of them. The result is that
of `titan.parallelism.pipeline.schedules.compute_timetable`.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from titan.parallelism.pipeline.arithmetic import read_csv
from titan.parallelism.pipeline.schedules import Action, Cell, DeadlockError, list_actions, order_actions

StageKind = tuple[int, str]
"""A stage and a kind of action."""


@dataclass(frozen=True, eq=False)
class LinkedOrder:
    """An order's actions, each after those that it waits for.

    Attributes:
        keys: the kinds of action of each stage.
        ranks: of each action.
        kinds: of each action, as an index of `keys`.
        sources: the action of another rank that each waits for, as an index; -1: none. What it waits for on its own
            rank is done when the rank reaches it.
    """

    keys: tuple[StageKind, ...]
    ranks: array[int]
    kinds: array[int]
    sources: array[int]

    @cached_property
    def counts(self) -> dict[StageKind, int]:
        """Actions of each kind in each stage."""
        return {self.keys[kind]: count for kind, count in Counter(self.kinds).items()}

    def compute_makespan(self, seconds: Mapping[StageKind, float], hop: float = 0.0) -> float:
        """Return the time from the first action's start to the last one's end.

        Args:
            seconds: of each kind of action in each stage.
            hop: seconds to send a result to a stage on another rank.
        """
        costs = [seconds[key] for key in self.keys]
        clocks, ends = [0.0] * (1 + max(self.ranks, default=0)), list[float]()
        for rank, kind, source in zip(self.ranks, self.kinds, self.sources, strict=True):
            time = clocks[rank]
            if source >= 0 and (arrival := ends[source] + hop) > time:
                time = arrival
            clocks[rank] = time = time + costs[kind]
            ends.append(time)
        return max(clocks)


def link_order(rows: Sequence[Sequence[Cell]]) -> LinkedOrder:
    """Return an order with the action of another rank that each action waits for.

    Args:
        rows: the actions of each rank, each after those of its rank that it needs.

    Raises:
        DeadlockError: when no rank can continue.
    """
    linking = _Linking(rows)
    linking.run()
    return LinkedOrder(tuple(linking.kinds), linking.ranks, linking.entered_kinds, linking.sources)


class _Linking:
    """The state of the linking: what each rank has left to do, and which ranks wait for which result."""

    def __init__(self, rows: Sequence[Sequence[Cell]]) -> None:
        self.owner = {
            action.stage: rank for rank, row in enumerate(rows) for cell in row for action in list_actions(cell)
        }
        self.queues = [deque(cell for cell in row if cell is not None) for row in rows]
        self.waiting: dict[Action, int] = {}
        self.results: dict[Action, int] = {}  # a full backward is entered as that of inputs
        self.kinds: dict[StageKind, int] = {}
        self.ranks, self.entered_kinds, self.sources = array("i"), array("i"), array("i")

    def run(self) -> None:
        """Take the actions of all ranks, each when the result that it waits for is there."""
        ready = list(range(len(self.queues)))
        while ready:
            rank = ready.pop()
            cells = self.queues[rank]
            while cells and self._take_cell(rank, list_actions(cells[0]), ready):
                cells.popleft()
        if any(self.queues):
            raise DeadlockError({rank: cells[0] for rank, cells in enumerate(self.queues) if cells})

    def _take_cell(self, rank: int, actions: tuple[Action, ...], ready: list[int]) -> bool:
        """Enter an entry of a rank, unless it waits for a result that is not there."""
        awaited = [self._find_source(action, rank) for action in actions]
        missing = next((source for source in awaited if source is not None and source not in self.results), None)
        if missing is not None:
            self.waiting[missing] = rank
            return False
        for (stage, kind, _), source in zip(actions, awaited, strict=True):
            self.ranks.append(rank)
            self.entered_kinds.append(self.kinds.setdefault((stage, kind), len(self.kinds)))
            self.sources.append(-1 if source is None else self.results[source])
        for stage, kind, microbatch in actions:  # the results of an overlap are there after all of it
            self._add_result(Action(stage, "I" if kind == "B" else kind, microbatch), ready)
        return True

    def _add_result(self, result: Action, ready: list[int]) -> None:
        """Enter the last action as that which has a result, and the rank that waits for it as ready."""
        self.results[result] = len(self.ranks) - 1
        if result in self.waiting:
            ready.append(self.waiting.pop(result))

    def _find_source(self, action: Action, rank: int) -> Action | None:
        """Return the result of another rank that an action waits for."""
        stage, kind, microbatch = action
        neighbour = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or self.owner.get(neighbour, rank) == rank:
            return None
        return Action(neighbour, "F" if kind == "F" else "I", microbatch)


def link_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    """Return the linked order of one of torch's schedules, or of a CSV file's actions.

    Raises:
        ConfigError: as `order_actions` and `read_csv` do.
        ValueError: as `order_actions` does.
    """
    if schedule.endswith(".csv"):  # the file may change
        return link_order(read_csv(schedule).order)
    return _link_named_schedule(schedule, ranks, stages_per_rank, microbatches)


@lru_cache(64)
def _link_named_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    return link_order(order_actions(schedule, ranks, stages_per_rank, microbatches))
