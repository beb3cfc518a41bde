"""The memory states that each rank of a pipeline passes through under a schedule. Free of torch.

A rank's memory depends on the action that it executes and on how many micro-batches each of its stages has in flight.
The schedule is replayed action by action; of the states that occur only those are kept that can need the most memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.parallelism.pipeline.schedules import (
    SCHEDULES,
    Action,
    Cell,
    count_rounds,
    order_actions,
)
from titan.parallelism.pipeline.stage_plan import count_stages_per_rank

if TYPE_CHECKING:
    from titan.parallelism.schema import Parallelism

ALL_FORWARD = ("GPipe", "LoopedBFS")
"""Schedules that run the forward passes of all micro-batches before the first backward pass."""
STEADY_STATE = 4
"""Micro-batches per rank, or rounds, after which the other schedules repeat states that have occurred before."""


class State(NamedTuple):
    """Everything that a rank's memory depends on while it executes one action.

    Attributes:
        stage: index of the stage that executes the action.
        kind: "F" forward, "B" full backward, "I" backward for inputs, "W" backward for weights (torch's pipeline
            schedules name them so).
        in_flight: for each stage of the rank, micro-batches after forward and before backward, this one included.
        awaiting_weight_grads: for each stage of the rank, micro-batches after "I" and before "W", this one included.
        has_grads: whether the rank holds weight gradients of an earlier micro-batch.
    """

    stage: int
    kind: str
    in_flight: tuple[tuple[int, int], ...]
    awaiting_weight_grads: tuple[tuple[int, int], ...]
    has_grads: bool


def find_rank_states(parallelism: Parallelism, ranks: int, microbatches: int) -> list[list[State]]:
    """Return the states of each of `ranks` pipeline ranks in which its memory can be largest.

    With one rank, which has no pipeline, it runs forward and backward of so many micro-batches in turn.
    """
    if ranks == 1:
        has_grads = (False, True) if microbatches > 1 else (False,)
        return [[State(0, kind, ((0, 1),), ((0, 0),), has_earlier) for kind in "FB" for has_earlier in has_grads]]
    schedule, stages = parallelism.schedule, count_stages_per_rank(parallelism, ranks)
    limit = _limit_microbatches(schedule, ranks, microbatches)
    return find_schedule_states(schedule, ranks, stages, limit)


def _limit_microbatches(schedule: str, ranks: int, microbatches: int) -> int:
    """Return so many micro-batches that a schedule passes through all its states; rounds keep their size."""
    if schedule in ALL_FORWARD:
        return microbatches
    in_rounds = SCHEDULES[schedule].microbatches == "rounds"
    size = microbatches // count_rounds(ranks, microbatches) if in_rounds else ranks
    return min(microbatches, size * STEADY_STATE)


@lru_cache(1024)
def find_schedule_states(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[State]]:
    """Return the largest states of each rank under a schedule."""
    return [_list_largest_states(cells) for cells in order_actions(schedule, ranks, stages, microbatches)]


def list_action_states(
    parallelism: Parallelism, ranks: int, rank: int, microbatches: int
) -> list[tuple[Action, State]]:
    """Return all actions of a pipeline rank in a step, in order, each with the rank's state during it.

    Without a pipeline these are the first two micro-batches; later ones repeat the second.
    """
    if ranks == 1:
        microbatches = min(2, microbatches)
        cells: list[Cell] = [(Action(0, kind, microbatch),) for microbatch in range(microbatches) for kind in "FB"]
    else:
        stages = count_stages_per_rank(parallelism, ranks)
        cells = order_actions(parallelism.schedule, ranks, stages, microbatches)[rank]
    return list(_replay_actions(cells))


def _replay_actions(cells: list[Cell]) -> Iterator[tuple[Action, State]]:
    """Yield each action of a rank with the rank's state during it."""
    actions = [action for cell in cells for action in cell]
    in_flight = dict.fromkeys(sorted({action.stage for action in actions}), 0)
    awaiting, has_grads = dict.fromkeys(in_flight, 0), False
    for action in actions:
        stage, kind, _ = action
        in_flight[stage] += (kind == "F") - (kind == "I")
        awaiting[stage] += kind == "I"
        yield action, State(stage, kind, tuple(in_flight.items()), tuple(awaiting.items()), has_grads)
        if kind in "BW":
            (in_flight if kind == "B" else awaiting)[stage] -= 1
            has_grads = True


def _list_largest_states(cells: list[Cell]) -> list[State]:
    """Return the states that no other state of the same stages and kind equals or exceeds in every count."""
    groups: dict[tuple[int, str], dict[State, list[int]]] = {}
    for _, state in _replay_actions(cells):
        counts = [count for _, count in (*state.in_flight, *state.awaiting_weight_grads)]
        groups.setdefault((state.stage, state.kind), {})[state] = [*counts, state.has_grads]
    states = []
    for group in groups.values():
        maximal: list[State] = []
        for state, counts in sorted(group.items(), key=lambda item: sum(item[1]), reverse=True):
            if not any(all(map(operator.le, counts, group[larger])) for larger in maximal):
                maximal.append(state)
        states += maximal
    return states


@lru_cache(1024)
def find_most_in_flight(schedule: str, ranks: int, stages: int, microbatches: int) -> int:
    """Return the most micro-batches that the stages of a rank have in flight at once, added up, on any rank."""
    if schedule in ALL_FORWARD:
        return stages * microbatches
    states = find_schedule_states(schedule, ranks, stages, _limit_microbatches(schedule, ranks, microbatches))
    return max(sum(count for _, count in state.in_flight) for rank in states for state in rank)
