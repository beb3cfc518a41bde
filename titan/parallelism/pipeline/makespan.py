"""The makespan of a pipeline's step where stages take different times, without a timetable. Free of torch.

Which result an action waits for does not depend on how long actions take: `link_order` finds it once for all layouts
with the same schedule, and `LinkedOrder.compute_makespan` replays it with the times of one of them. The result is that
of `titan.parallelism.pipeline.schedules.compute_timetable`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

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
    return LinkedOrder(tuple(linking.codes), linking.ranks, linking.kinds, linking.sources)


class ActionCode(NamedTuple):
    """What all actions of a kind in a stage have in common; results are numbered, two for each micro-batch.

    Attributes:
        kind: its number among the kinds of all stages.
        awaited: the result of another rank that micro-batch 0 waits for; -1: none.
        result: that of micro-batch 0; -1: one that only its rank needs.
    """

    kind: int
    awaited: int
    result: int


class _Linking:
    """The state of the linking: what each rank has left to do, and which ranks wait for which result."""

    def __init__(self, rows: Sequence[Sequence[Cell]]) -> None:
        cells = [[cell for cell in row if cell is not None] for row in rows]
        actions = [[action for cell in row for action in list_actions(cell)] for row in cells]
        self.size = 2 * max((1 + action.microbatch for row in actions for action in row), default=0)
        self.owner = {stage: rank for rank, row in enumerate(actions) for stage in {action.stage for action in row}}
        self.codes: dict[StageKind, ActionCode] = {}
        for rank, row in enumerate(actions):
            for stage, kind in sorted({(action.stage, action.kind) for action in row}):
                self.codes[stage, kind] = self._encode_kind(stage, kind, rank)
        self.rows, self.next_cells = cells, [0] * len(cells)
        self.waiting: dict[int, int] = {}
        self.results: dict[int, int] = {}
        self.ranks, self.kinds, self.sources = array("i"), array("i"), array("i")

    def _encode_kind(self, stage: int, kind: str, rank: int) -> ActionCode:
        """Return the code of a kind of action; a full backward pass has the result of that for inputs."""
        number, neighbour, part = len(self.codes), stage - 1 if kind == "F" else stage + 1, int(kind != "F")
        waits = kind != "W" and self.owner.get(neighbour, rank) != rank
        awaited = neighbour * self.size + part if waits else -1
        return ActionCode(number, awaited, -1 if kind == "W" else stage * self.size + part)

    def run(self) -> None:
        """Take the actions of all ranks, each when the result that it waits for is there."""
        self.ready = list(range(len(self.rows)))
        while self.ready:
            self._advance_rank(self.ready.pop())
        left = {
            rank: row[n] for rank, (row, n) in enumerate(zip(self.rows, self.next_cells, strict=True)) if n < len(row)
        }
        if left:
            raise DeadlockError(left)

    def _advance_rank(self, rank: int) -> None:
        """Take a rank's actions until one waits for a result that is not there."""
        cells, first, results = self.rows[rank], self.next_cells[rank], self.results
        for position in range(first, len(cells)):
            cell = cells[position]
            actions = (cell,) if isinstance(cell, Action) else list_actions(cell)
            sources = []
            for stage, kind, microbatch in actions:
                awaited = self.codes[stage, kind].awaited
                source = results.get(awaited + 2 * microbatch, -2) if awaited >= 0 else -1
                if source == -2:
                    self.waiting[awaited + 2 * microbatch] = rank
                    self.next_cells[rank] = position
                    return
                sources.append(source)
            self._enter_actions(rank, actions, sources)
        self.next_cells[rank] = len(cells)

    def _enter_actions(self, rank: int, actions: Sequence[Action], sources: list[int]) -> None:
        """Enter the actions of a cell, whose results are there after all of it, and wake ranks that wait for them."""
        last = len(self.ranks) + len(actions) - 1
        for (stage, kind, microbatch), source in zip(actions, sources, strict=True):
            code = self.codes[stage, kind]
            self.ranks.append(rank)
            self.kinds.append(code.kind)
            self.sources.append(source)
            result = code.result + 2 * microbatch
            if code.result >= 0:
                self.results[result] = last
                if result in self.waiting:
                    self.ready.append(self.waiting.pop(result))


def link_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    """Return the linked order of one of torch's schedules, or of a CSV file's actions.

    Raises:
        ConfigError: as `order_actions` and `read_csv` do.
        ValueError: as `order_actions` does.
    """
    if schedule.endswith(".csv"):  # the file may change
        return link_order(read_csv(schedule).order)
    return _link_named_schedule(schedule, ranks, stages_per_rank, microbatches)


@lru_cache(256)
def _link_named_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    return link_order(order_actions(schedule, ranks, stages_per_rank, microbatches))
