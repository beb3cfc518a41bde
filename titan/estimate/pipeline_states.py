"""The memory states that each rank of a pipeline passes through under a schedule. Free of torch.

A rank's memory depends on the action that it executes and on how many micro-batches each of its stages has in flight.
The schedule is replayed action by action; of the states that occur only those are kept that can need the most memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.parallelism.pipeline.arithmetic import read_csv
from titan.parallelism.pipeline.schedules import Action, Cell, Overlap, list_actions, order_actions
from titan.parallelism.pipeline.stage_plan import count_stages_per_rank

if TYPE_CHECKING:
    from titan.parallelism.schema import Parallelism

ALL_FORWARD = ("GPipe", "LoopedBFS")
"""Schedules that run the forward passes of all micro-batches before the first backward pass."""
STEADY_STATE = 8
"""Micro-batches per rank after which the other schedules repeat states that have occurred before."""


class State(NamedTuple):
    """Everything that a rank's memory depends on while it executes one action.

    Attributes:
        stage: index of the stage that executes the action.
        kind: "F" forward, "B" full backward, "I" backward for inputs, "W" backward for weights (torch's pipeline
            schedules name them so).
        in_flight: for each stage of the rank, micro-batches after forward and before backward, this one included.
        awaiting_weight_grads: for each stage of the rank, micro-batches after "I" and before "W", this one included.
        has_grads: whether the rank holds weight gradients of an earlier micro-batch.
        beside: index of the stage whose action takes turns with this one (`parallelism.pairs`); None: none does.
    """

    stage: int
    kind: str
    in_flight: tuple[tuple[int, int], ...]
    awaiting_weight_grads: tuple[tuple[int, int], ...]
    has_grads: bool
    beside: int | None = None


def find_rank_states(parallelism: Parallelism, ranks: int, microbatches: int) -> list[set[State]]:
    """Return the states of each pipeline rank in which its memory can be largest.

    Args:
        parallelism: gives the schedule.
        ranks: the pipeline degree; with 1 there is one rank, which runs forward and backward in turn.
        microbatches: micro-batches of a rank in one step.
    """
    if ranks == 1:
        has_grads = (False, True) if microbatches > 1 else (False,)
        return [{State(0, kind, ((0, 1),), ((0, 0),), has_earlier) for kind in "FB" for has_earlier in has_grads}]
    if parallelism.schedule not in ALL_FORWARD:
        microbatches = min(microbatches, STEADY_STATE * ranks)
    stages = count_stages_per_rank(parallelism, ranks)
    return find_schedule_states(parallelism.schedule, ranks, stages, microbatches, parallelism.pairs)


@lru_cache(1024)
def find_schedule_states(
    schedule: str, ranks: int, stages: int, microbatches: int, pairs: bool = False
) -> list[set[State]]:
    """Return the largest states of each rank under a schedule, given by its name or as the path of a CSV file.

    With `pairs`, the actions that it runs at once take turns.
    """
    rows = _list_cells(schedule, ranks, stages, microbatches)
    return [_select_largest({state for _, state in _replay_cells(cells, pairs)}) for cells in rows]


def list_action_states(
    parallelism: Parallelism, ranks: int, rank: int, microbatches: int
) -> list[tuple[Action, State]]:
    """Return all actions of a pipeline rank in a step, in order, each with the rank's state during it.

    Without a pipeline these are the first two micro-batches; later ones repeat the second.
    """
    if ranks == 1:
        cells: list[Cell] = [Action(0, kind, microbatch) for microbatch in range(min(2, microbatches)) for kind in "FB"]
    else:
        stages = count_stages_per_rank(parallelism, ranks)
        cells = _list_cells(parallelism.schedule, ranks, stages, microbatches)[rank]
    return list(_replay_cells(cells, parallelism.pairs))


def _list_cells(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[Cell]]:
    """Return the entries of each rank in its order."""
    if schedule.endswith(".csv"):
        return [list(row) for row in read_csv(schedule).order]
    return order_actions(schedule, ranks, stages, microbatches)


def _replay_cells(cells: list[Cell], pairs: bool) -> Iterator[tuple[Action, State]]:
    """Yield each action of a rank with the rank's state during it."""
    actions = [action for cell in cells for action in list_actions(cell)]
    in_flight, has_grads = dict.fromkeys(sorted({action.stage for action in actions}), 0), False
    awaiting = dict.fromkeys(in_flight, 0)
    partners = _find_partners(cells) if pairs else {}
    for action in actions:
        stage, kind, _ = action
        in_flight[stage] += (kind == "F") - (kind == "I")
        awaiting[stage] += kind == "I"
        counts = tuple(in_flight.items()), tuple(awaiting.items())
        yield action, State(stage, kind, *counts, has_grads, partners.get(action))
        in_flight[stage] -= kind == "B"
        awaiting[stage] -= kind == "W"
        has_grads = has_grads or kind in "BW"


def _find_partners(cells: list[Cell]) -> dict[Action, int]:
    """Return the stage of the other action for each one of a pair."""
    pairs = [cell.actions for cell in cells if isinstance(cell, Overlap) and cell.is_pair]
    return {action: other.stage for pair in pairs for action, other in (pair, pair[::-1])}


def _select_largest(states: set[State]) -> set[State]:
    """Return the states that no other state of the same stages and kind dominates in every count."""
    groups: dict[tuple[int, str, int | None], list[tuple[tuple[int, ...], State]]] = {}
    for state in states:
        counts = tuple(count for _, count in (*state.in_flight, *state.awaiting_weight_grads))
        groups.setdefault((state.stage, state.kind, state.beside), []).append(((*counts, state.has_grads), state))
    return {state for group in groups.values() for state in _iterate_maximal(group)}


def _iterate_maximal(group: list[tuple[tuple[int, ...], State]]) -> Iterator[State]:
    """Yield the states with counts that no other's equal or exceed throughout; those with the largest sums first."""
    maximal: list[tuple[int, ...]] = []
    for counts, state in sorted(group, key=lambda entry: sum(entry[0]), reverse=True):
        if not any(all(map(operator.le, counts, larger)) for larger in maximal):
            maximal.append(counts)
            yield state


@lru_cache(1024)
def find_most_in_flight(schedule: str, ranks: int, stages: int, microbatches: int) -> int:
    """Return the most micro-batches that the stages of a rank have in flight at once, added up, on any rank."""
    if schedule in ALL_FORWARD:
        return stages * microbatches
    microbatches = min(microbatches, STEADY_STATE * ranks)
    states = find_schedule_states(schedule, ranks, stages, microbatches)
    return max(sum(count for _, count in state.in_flight) for rank in states for state in rank)
