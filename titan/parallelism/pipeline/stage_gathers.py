"""When a pipeline rank gathers the weights of its stages that FSDP shards. Free of torch.

torch's schedules gather at most three of a rank's stages at a time: those whose actions come next. A rank with more
stages frees the weights of one and gathers those of another as its actions go on. Source: _add_unshard_reshard in
torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from titan.parallelism.pipeline.schedules import Cell, list_actions

MOST_GATHERED = 3
"""The stages of a rank that are gathered at a time."""


def count_stage_gathers(cells: Sequence[Cell]) -> Counter[int]:
    """Return how often a rank gathers the weights of each of its stages in a step.

    Args:
        cells: of the rank, in order.
    """
    stages = [action.stage for cell in cells for action in list_actions(cell)]
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
