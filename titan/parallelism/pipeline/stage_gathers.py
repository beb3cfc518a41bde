"""When a pipeline rank gathers the weights of its stages that FSDP shards. Free of torch.

torch's schedules gather at most three of a rank's stages at a time: those whose actions come next. A rank with more
stages frees the weights of one and gathers those of another as its actions go on. Source: _add_unshard_reshard in
torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from titan.parallelism.pipeline.arithmetic import read_csv
from titan.parallelism.pipeline.schedules import Cell, list_actions, order_actions

MOST_GATHERED = 3
"""The stages of a rank that are gathered at a time."""


def count_schedule_gathers(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[Counter[int], ...]:
    """Return how often each rank of a pipeline gathers each of its stages in a step; see `order_actions` for errors."""
    if schedule.endswith(".csv"):  # the file may change
        return tuple(count_stage_gathers(row) for row in read_csv(schedule).order)
    return _count_named_gathers(schedule, ranks, stages_per_rank, microbatches)


@lru_cache(64)
def _count_named_gathers(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[Counter[int], ...]:
    return tuple(map(count_stage_gathers, order_actions(schedule, ranks, stages_per_rank, microbatches)))


def count_stage_gathers(cells: Sequence[Cell]) -> Counter[int]:
    """Return how often a rank gathers the weights of each of its stages in a step.

    Args:
        cells: of the rank, in order.
    """
    stages = [action.stage for cell in cells for action in list_actions(cell)]
    if len(set(stages)) <= MOST_GATHERED:
        return Counter(set(stages))
    gathers: Counter[int] = Counter()
    gathered: set[int] = set()
    for i in range(len(stages)):
        following = _list_next_stages(stages, i)
        gathers.update(following - gathered)
        gathered = following
    return gathers


def _list_next_stages(stages: Sequence[int], start: int) -> set[int]:
    """Return the first stages, as many as are gathered at a time, of the actions from one on."""
    following: set[int] = set()
    for i in range(start, len(stages)):
        following.add(stages[i])
        if len(following) == MOST_GATHERED:
            break
    return following
