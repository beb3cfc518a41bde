"""Pipeline schedules: the order in which each rank runs micro-batches through its stages. Free of torch.

`SCHEDULES` has the properties of each schedule, `order_actions` returns its actions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError


@dataclass(frozen=True)
class PipelineSchedule:
    """The properties of a schedule.

    Attributes:
        name: the argument of torch.distributed.pipelining.schedules.get_schedule_class, where torch has the schedule.
        order: returns a rank's order, from rank, ranks, stages per rank and micro-batches.
        stages: default number of stages per rank.
        fixed: whether this is the only possible number; else any number from 1.
        placement: stage s is on rank s modulo ranks (loop), or every other lap runs backwards (v).
        splits_backward: whether gradients of inputs and of weights are computed in two passes. FSDP then must not free
            gathered weights in between, and selective checkpointing, which allows one backward pass, is impossible.
        microbatches: their number is free, or at least the number of stages, or a multiple of the number of rounds,
            which is the number divided by the ranks, rounded down, and at least 1.
        waits: the least time that each rank waits in a step for each adjacent rank, in units of a stage's forward:
            where the backward pass is not split, 1 on the way there and 2 on the way back.
        in_torch: whether torch has the schedule; else titan hands the order to torch.
    """

    name: str
    order: Callable[[int, int, int, int], Sequence[Cell]]
    stages: int
    fixed: bool
    placement: Literal["loop", "v"]
    splits_backward: bool
    microbatches: Literal["free", "stages", "rounds"]
    waits: int
    in_torch: bool = True

    def allows(self, ranks: int, stages_per_rank: int, microbatches: int) -> bool:
        """Whether the schedule exists with these numbers."""
        if min(stages_per_rank, microbatches) < 1 or (self.fixed and stages_per_rank != self.stages):
            return False
        if self.microbatches == "stages":
            return microbatches >= ranks * stages_per_rank
        return self.microbatches == "free" or microbatches % count_rounds(ranks, microbatches) == 0

    def least_idle(self, ranks: int, stages_per_rank: int, microbatches: int) -> float:
        """Return the idle share of a pipeline that is filled by micro-batches; otherwise a lower bound of it."""
        wait = self.waits * (ranks - 1)
        return wait / (3 * microbatches * stages_per_rank + wait)

    def fills(self, ranks: int, microbatches: int) -> bool:
        """Whether so many micro-batches fill the pipeline."""
        return microbatches >= (2 * ranks - 1 if self.placement == "v" else ranks)


class Action(NamedTuple):
    """One computation of a micro-batch in a stage.

    Attributes:
        stage: its number.
        kind: F forward, B backward, I the part of backward for the stage's input, W the part for its weights.
        microbatch: its number.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Cell: TypeAlias = tuple[Action, ...]
"""One entry of a rank's order: an action, or several that a rank may run at once.

These run one after another, and results are sent after the last.
"""


def format_cell(cell: Cell) -> str:
    """Return an entry as torch writes it, such as 0F0 or (1F1;1B0)OVERLAP_F_B."""
    text = ";".join(map(str, cell))
    return f"({text})OVERLAP_F_B" if len(cell) > 1 else text


def find_schedule(schedule: str) -> PipelineSchedule:
    """Return the properties of a schedule.

    Raises:
        ConfigError: when there is no schedule of this name.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"parallelism.schedule={schedule}: choose a schedule by its name, one of auto, {', '.join(SCHEDULES)}"
            f"{suggest_nearest(schedule, SCHEDULES)}"
        )
    return SCHEDULES[schedule]


def order_actions(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """Return the actions of each rank in its order (of torch's schedules in torch's).

    Raises:
        ConfigError: when there is no such schedule.
        ValueError: on numbers that the schedule does not allow.
    """
    kind = find_schedule(schedule)
    if not kind.allows(ranks, stages_per_rank, microbatches):
        raise ValueError(f"{schedule} on {ranks} ranks of {stages_per_rank} stages: not {microbatches} micro-batches")
    return [list(kind.order(rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks)]


def count_rounds(ranks: int, microbatches: int) -> int:
    """Return how many times interleaved schedules go through all stages of a rank."""
    return max(1, microbatches // ranks)


def _order_gpipe(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: all forward, then all backward (Huang et al., GPipe, 2019)."""
    return [(Action(rank, kind, m),) for kind in "FB" for m in range(microbatches)]


def _order_looped_bfs(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: all micro-batches stage by stage, and back (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022)."""
    turns = [(rank + lap * ranks, m) for lap in range(stages_per_rank) for m in range(microbatches)]
    return [(Action(s, "F", m),) for s, m in turns] + [(Action(s, "B", m),) for s, m in reversed(turns)]


def _order_1f1b(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: one forward, one backward (Narayanan et al., PipeDream-Flush, 2020)."""
    turns = [(rank, m) for m in range(microbatches)]
    return _alternate_passes(turns, turns, ranks - 1 - rank)


def _order_interleaved(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int, ahead: int, splits_backward: bool = False
) -> Sequence[Cell]:
    """Order: 1F1B with several stages per rank (Narayanan et al., Megatron-LM, arXiv:2104.04473, 2021).

    A round runs about as many micro-batches as there are ranks through all stages.

    Args:
        ahead: how many forward passes more than the next rank a rank runs before its first backward pass. Megatron-LM
            runs two (megatron/core/pipeline_parallel/schedules.py), so that messages travel beside computation. One is
            the least that keeps all ranks busy: the first rank has `ranks` - 1 fewer stages' inputs in flight, and each
            message is awaited as soon as it is sent.
        splits_backward: weights follow inputs `rank` steps later (ZB1P with several stages, Qi et al., Zero Bubble).
    """
    size = microbatches // count_rounds(ranks, microbatches)
    stages = range(rank, ranks * stages_per_rank, ranks)
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    forward = [(s, m) for each in rounds for s in stages for m in each]
    backward = [(s, m) for each in rounds for s in reversed(stages) for m in each]
    warmup = (stages_per_rank - 1) * size + ahead * (ranks - 1 - rank)
    return _alternate_passes(forward, backward, warmup, lag=rank if splits_backward else None)


Turns: TypeAlias = list[tuple[int, int]]
"""Pairs of stage and micro-batch, in order."""


def _alternate_passes(forward: Turns, backward: Turns, warmup: int, lag: int | None = None) -> list[Cell]:
    """Return `warmup` times forward, then forward and backward in turn; with a lag, weights follow that much later."""
    actions = [Action(s, "F", m) for s, m in forward[:warmup]]
    for turn, (stage, m) in enumerate(backward):
        actions += [Action(s, "F", f) for s, f in forward[warmup + turn : warmup + turn + 1]]
        actions.append(Action(stage, "B" if lag is None else "I", m))
        if lag is not None and turn >= lag:
            late, f = backward[turn - lag]
            actions.append(Action(late, "W", f))
    actions += [Action(s, "W", m) for s, m in (backward[-lag:] if lag else [])]
    return [(action,) for action in actions]


Token: TypeAlias = tuple[str, int]
"""A kind and a stage: with the stage's next micro-batch."""


def _order_zbv(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order of ZB-V: a rank has a stage of the first lap and one of the second (Qi et al., Zero Bubble, section 6)."""
    first_stage, last_stage, later_ranks = rank, 2 * ranks - 1 - rank, ranks - rank
    # the pattern is that of a full pipeline; micro-batches that don't exist are left out
    full = max(2 * ranks - 1, microbatches)
    only_back: list[Token] = [("F", last_stage), ("I", last_stage), ("W", last_stage)]
    tokens = (
        [("F", first_stage)] * (2 * later_ranks - 1)
        + [("F", last_stage), ("F", first_stage)] * rank
        + only_back * later_ranks
    )
    tokens += [("F", first_stage), ("I", first_stage), ("W", first_stage), *only_back] * (full - ranks)
    tokens += [("I", first_stage), ("I", last_stage)] * rank + [("I", first_stage), ("W", first_stage)] * later_ranks
    tokens += [("W", last_stage)] * rank + [("W", first_stage)] * rank
    return [(action,) for action in _number_actions(tokens) if action.microbatch < microbatches]


def _order_dual_pipe_v(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order of DualPipeV: forward of one stage overlaps with backward of the other (DeepSeek-V3, 2024; Sea AI Lab)."""
    first_stage, last_stage, later_ranks = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    halves: list[tuple[Token, ...]] = [(("F", first_stage), ("B", last_stage)), (("F", last_stage), ("B", first_stage))]
    pairs = halves * (microbatches - 2 * ranks + rank + 1) + [(("B", last_stage),), halves[1]] * later_ranks
    if rank == ranks - 1:  # the first pair is taken apart: backward need not wait
        pairs[:1] = [(token,) for token in halves[0]]
    start = [("F", first_stage)] * (2 * later_ranks) + [("F", first_stage), ("F", last_stage)] * (rank + 1)
    start += [("I", last_stage), ("W", last_stage), ("F", last_stage)] * later_ranks
    # at the end weights come as late as possible, in the order of their inputs
    ends = [last_stage, first_stage] * (rank + 1)
    late = ends[rank + 1 :] + [first_stage] * later_ranks
    stop = [("B", s) for s in ends[: rank + 1]] + [("I", s) for s in ends[rank + 1 :]]
    stop += [token for s in late[:later_ranks] for token in (("W", s), ("I", first_stage))] + [
        ("W", s) for s in late[later_ranks:]
    ]
    cells = [(token,) for token in start] + pairs + [(token,) for token in stop]
    actions = _number_actions(token for cell in cells for token in cell)
    return [tuple(itertools.islice(actions, len(cell))) for cell in cells]


def _number_actions(tokens: Iterable[Token]) -> Iterator[Action]:
    """Number the micro-batches: a stage takes them in order in forward, backward of inputs and backward of weights."""
    counts: Counter[Token] = Counter()
    for kind, stage in tokens:
        yield Action(stage, kind, counts["I" if kind == "B" else kind, stage])
        counts.update((part, stage) for part in ("IW" if kind == "B" else kind))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("GPipe", _order_gpipe, 1, True, "loop", False, "free", 3),
        PipelineSchedule("1F1B", _order_1f1b, 1, True, "loop", False, "stages", 3),
        PipelineSchedule("Interleaved1F1B", partial(_order_interleaved, ahead=2), 2, False, "loop", False, "rounds", 3),
        PipelineSchedule(
            "ShallowInterleaved1F1B", partial(_order_interleaved, ahead=1),
            2, False, "loop", False, "rounds", 3, in_torch=False,
        ),
        PipelineSchedule("LoopedBFS", _order_looped_bfs, 2, False, "loop", False, "free", 3),
        PipelineSchedule(
            "InterleavedZeroBubble", partial(_order_interleaved, ahead=1, splits_backward=True),
            2, False, "loop", True, "rounds", 1,
        ),
        PipelineSchedule("ZBVZeroBubble", _order_zbv, 2, True, "v", True, "free", 1),
        PipelineSchedule("DualPipeV", _order_dual_pipe_v, 2, True, "v", True, "stages", 2),
    )
}  # fmt: skip
"""torch's schedules, as of torch 2.13, and one more, by their name."""
