"""Schedules of a pipeline: in which order each rank takes micro-batches through its stages, and how long that takes.

`SCHEDULES` holds what is fixed about each of torch's schedules, `order` makes its order, action for action, and
`simulate` plays that or any other order and tells how long ranks wait for each other. Free of torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from titan.config.settings import nearest
from titan.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """What is fixed about one of torch's schedules.

    Attributes:
        name: as torch.distributed.pipelining.schedules.get_schedule_class knows it.
        stages: of a rank, unless the user says otherwise.
        fixed: whether it can have no other number of stages on a rank; else any number from 1.
        placement: stage s is on rank s modulo ranks (loop), or every other lap runs backwards (v).
        splits_backward: whether gradients of inputs and of weights are computed apart. FSDP then must not free gathered
            weights in between, and selective checkpointing, which can go backward only once, is impossible.
        microbatches: their number is free, or at least the number of stages, or a multiple of the number of rounds,
            which is how many times as many as ranks go into it, and at least 1.
        waits: how long each rank waits in a step for each rank beside it, if no longer than it must, in the time of a
            stage's forward. A whole backward is waited for on the way there and back: 1 and 2.
    """

    name: str
    stages: int
    fixed: bool
    placement: Literal["loop", "v"]
    splits_backward: bool
    microbatches: Literal["free", "stages", "rounds"]
    waits: int

    def allows(self, ranks: int, stages_per_rank: int, microbatches: int) -> bool:
        """Whether torch builds the schedule with these numbers."""
        if min(stages_per_rank, microbatches) < 1 or (self.fixed and stages_per_rank != self.stages):
            return False
        if self.microbatches == "stages":
            return microbatches >= ranks * stages_per_rank
        return self.microbatches == "free" or microbatches % rounds(ranks, microbatches) == 0

    def least_idle(self, ranks: int, stages_per_rank: int, microbatches: int) -> float:
        """The share of time in which ranks wait when enough micro-batches fill the pipeline; else it is no less."""
        wait = self.waits * (ranks - 1)
        return wait / (3 * microbatches * stages_per_rank + wait)

    def fills(self, ranks: int, microbatches: int) -> bool:
        """Whether so many micro-batches are enough for that."""
        return microbatches >= (2 * ranks - 1 if self.placement == "v" else ranks)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", 1, True, "loop", False, "free", 3),
        Schedule("1F1B", 1, True, "loop", False, "stages", 3),
        Schedule("Interleaved1F1B", 2, False, "loop", False, "rounds", 3),
        Schedule("LoopedBFS", 2, False, "loop", False, "free", 3),
        Schedule("InterleavedZeroBubble", 2, False, "loop", True, "rounds", 1),
        Schedule("ZBVZeroBubble", 2, True, "v", True, "free", 1),
        Schedule("DualPipeV", 2, True, "v", True, "stages", 2),
    )
}
"""torch's schedules by their name, as of torch 2.13."""


class Action(NamedTuple):
    """What a rank does with a micro-batch at one of its stages.

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


@dataclass(frozen=True)
class Overlap:
    """Actions that a rank may run at once; torch runs them one after the other, and sends results on after the last."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap | None
"""A place in a rank's order; None: nothing to do."""


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """The actions at a place."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Overlap) else (cell,)


# ---- the orders of torch's schedules ----


def facts(schedule: str) -> Schedule:
    """What is known of a schedule.

    Raises:
        ConfigError: when there is none of this name.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"parallelism.schedule={schedule}: choose one of {', '.join(SCHEDULES)}, or a file whose name ends in .csv"
            f"{nearest(schedule, SCHEDULES)}"
        )
    return SCHEDULES[schedule]


def order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """What each rank does, one action after the other: as torch does, without places for waiting.

    Raises:
        ConfigError: when there is no such schedule.
        ValueError: on numbers that the schedule does not allow.
    """
    if not facts(schedule).allows(ranks, stages_per_rank, microbatches):
        raise ValueError(f"{schedule} on {ranks} ranks of {stages_per_rank} stages: not {microbatches} micro-batches")
    return [list(ORDERS[schedule](rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks)]


def rounds(ranks: int, microbatches: int) -> int:
    """How often interleaved schedules go through all stages of a rank."""
    return max(1, microbatches // ranks)


def _gpipe(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """All forward, then all backward (Huang et al., GPipe, 2019)."""
    return [Action(rank, kind, m) for kind in "FB" for m in range(microbatches)]


def _looped_bfs(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Stage after stage, all micro-batches each, and back (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022)."""
    there = [(rank + lap * ranks, m) for lap in range(stages_per_rank) for m in range(microbatches)]
    return [Action(s, "F", m) for s, m in there] + [Action(s, "B", m) for s, m in reversed(there)]


def _1f1b(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """One forward, one backward (Narayanan et al., PipeDream-Flush, 2020)."""
    everything = [(rank, m) for m in range(microbatches)]
    return _alternate(everything, everything, ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """1F1B over several stages a rank (Narayanan et al., Efficient Large-Scale Training with Megatron-LM, 2021)."""
    forward, backward, once = _in_rounds(rank, ranks, stages_per_rank, microbatches)
    return _alternate(forward, backward, once + 2 * (ranks - 1 - rank))


def _interleaved_zero_bubble(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """ZB1P over several stages a rank: weights follow inputs `rank` steps later (Qi et al., Zero Bubble, 2023)."""
    forward, backward, once = _in_rounds(rank, ranks, stages_per_rank, microbatches)
    return _alternate(forward, backward, once + ranks - 1 - rank, lag=rank)


Places: TypeAlias = list[tuple[int, int]]
"""Stages and micro-batches."""


def _in_rounds(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Places, Places, int]:
    """Forward and backward order of interleaved schedules, and how much of it is before the last stage's first turn.

    A round takes about as many micro-batches as there are ranks through all stages.
    """
    size = microbatches // rounds(ranks, microbatches)
    stages = range(rank, ranks * stages_per_rank, ranks)
    turns = [range(start, start + size) for start in range(0, microbatches, size)]
    forward = [(s, m) for turn in turns for s in stages for m in turn]
    backward = [(s, m) for turn in turns for s in reversed(stages) for m in turn]
    return forward, backward, (stages_per_rank - 1) * size


def _alternate(forward: Places, backward: Places, warmup: int, lag: int | None = None) -> list[Cell]:
    """`warmup` times forward, then forward and backward in turn; with a lag, that of weights comes so much later."""
    out: list[Cell] = [Action(s, "F", m) for s, m in forward[:warmup]]
    for turn, (stage, m) in enumerate(backward):
        out += [Action(s, "F", f) for s, f in forward[warmup + turn : warmup + turn + 1]]
        out.append(Action(stage, "B" if lag is None else "I", m))
        if lag is not None and turn >= lag:
            late, f = backward[turn - lag]
            out.append(Action(late, "W", f))
    return out + [Action(s, "W", m) for s, m in (backward[-lag:] if lag else [])]


Token: TypeAlias = tuple[str, int]
"""A kind and a stage: with the stage's next micro-batch."""


def _zbv(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """ZB-V: a rank has one stage on the way there and one on the way back (Qi et al., Zero Bubble, 2023, section 6)."""
    there, back, left = rank, 2 * ranks - 1 - rank, ranks - rank
    # the pattern is that of a full pipeline going on; micro-batches that there are not are left out
    full = max(2 * ranks - 1, microbatches)
    only_back: list[Token] = [("F", back), ("I", back), ("W", back)]
    tokens = [("F", there)] * (2 * left - 1) + [("F", back), ("F", there)] * rank + only_back * left
    tokens += [("F", there), ("I", there), ("W", there), *only_back] * (full - ranks)
    tokens += [("I", there), ("I", back)] * rank + [("I", there), ("W", there)] * left
    tokens += [("W", back)] * rank + [("W", there)] * rank
    return [action for action in _numbered(tokens) if action.microbatch < microbatches]


def _dual_pipe_v(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """DualPipe cut in half: forward of one stage runs with backward of the other (DeepSeek-V3, 2024; Sea AI Lab)."""
    there, back, left = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    halves: list[tuple[Token, ...]] = [(("F", there), ("B", back)), (("F", back), ("B", there))]
    pairs = halves * (microbatches - 2 * ranks + rank + 1) + [(("B", back),), halves[1]] * left
    if rank == ranks - 1:  # the first pair is taken apart: backward need not wait
        pairs[:1] = [(token,) for token in halves[0]]
    start = [("F", there)] * (2 * left) + [("F", there), ("F", back)] * (rank + 1)
    start += [("I", back), ("W", back), ("F", back)] * left
    # in the end weights come as late as they can, in the order of their inputs
    ends = [back, there] * (rank + 1)
    late = ends[rank + 1 :] + [there] * left
    stop = [("B", s) for s in ends[: rank + 1]] + [("I", s) for s in ends[rank + 1 :]]
    stop += [token for s in late[:left] for token in (("W", s), ("I", there))] + [("W", s) for s in late[left:]]
    cells = [(token,) for token in start] + pairs + [(token,) for token in stop]
    actions = _numbered(token for cell in cells for token in cell)
    grouped = [tuple(itertools.islice(actions, len(cell))) for cell in cells]
    return [Overlap(group) if len(group) > 1 else group[0] for group in grouped]


def _numbered(tokens: Iterable[Token]) -> Iterator[Action]:
    """Give each its micro-batch: a stage takes them in order, forward, backward for inputs and for weights."""
    counts: Counter[Token] = Counter()
    for kind, stage in tokens:
        yield Action(stage, kind, counts["I" if kind == "B" else kind, stage])
        counts.update((part, stage) for part in ("IW" if kind == "B" else kind))


ORDERS: dict[str, Callable[[int, int, int, int], Sequence[Cell]]] = {
    "GPipe": _gpipe,
    "1F1B": _1f1b,
    "Interleaved1F1B": _interleaved,
    "LoopedBFS": _looped_bfs,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zbv,
    "DualPipeV": _dual_pipe_v,
}
"""How each schedule's order is made, from rank, ranks, stages of a rank and micro-batches."""


# ---- time ----


@dataclass(frozen=True)
class Timeline:
    """How long an order takes.

    Attributes:
        makespan: from the first action's start to the last one's end, in the unit of the costs.
        ranks: share of the makespan in which each rank waits.
        idle: the same, averaged over ranks.
    """

    makespan: float
    ranks: tuple[float, ...]
    idle: float


class Deadlock(ValueError):
    """An order that comes to a halt.

    Attributes:
        waiting: the next place of each rank that is not done, by rank.
    """

    def __init__(self, waiting: dict[int, Action | Overlap]) -> None:
        super().__init__(", ".join(f"rank {rank} waits at {cell}" for rank, cell in waiting.items()))
        self.waiting = waiting


def simulate(
    actions: Sequence[Sequence[Cell]], forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0
) -> Timeline:
    """Play an order: each rank does its actions one after the other, each as soon as what it needs is there.

    Forward of a stage needs the forward of the stage before, backward (also of inputs alone) the stage's own forward
    and the backward of the stage after, backward of weights that of inputs, of the same micro-batch. What happens
    within an overlap can be used by others after all of it. Sending takes no time.

    Args:
        actions: of each rank, in its order.
        forward, backward_input, backward_weight: how long each takes at any stage; a full backward takes both parts.

    Raises:
        Deadlock: when no rank can go on.
    """
    costs = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward_input + backward_weight}
    play = _Play(actions, costs)
    play.run()
    busy = [sum(costs[action.kind] for cell in row for action in actions_of(cell)) for row in actions]
    makespan = max(play.clocks, default=0.0)
    shares = tuple((makespan - time) / makespan if makespan else 0.0 for time in busy)
    return Timeline(makespan, shares, math.fsum(shares) / max(1, len(shares)))


def idle_share(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """The share of time in which ranks wait, where backward takes twice as long as forward, half of it for weights.

    Exact: in closed form where micro-batches fill the pipeline, otherwise by playing the order.

    Raises:
        ConfigError, ValueError: as `order` does.
    """
    kind = facts(schedule)
    if kind.allows(ranks, stages_per_rank, microbatches) and kind.fills(ranks, microbatches):
        return kind.least_idle(ranks, stages_per_rank, microbatches)
    return simulate(order(schedule, ranks, stages_per_rank, microbatches)).idle


class _Play:
    """An order being played: a clock for each rank, and when the result of each action is there."""

    def __init__(self, rows: Sequence[Sequence[Cell]], costs: dict[str, float]) -> None:
        self.costs = costs
        self.last = max((action.stage for row in rows for cell in row for action in actions_of(cell)), default=0)
        self.clocks = [0.0] * len(rows)
        self.todo = [deque(cell for cell in row if cell is not None) for row in rows]
        self.done: dict[tuple[str, int, int], float] = {}  # a full backward stands here as that of inputs

    def run(self) -> None:
        """Let each rank go on as far as it can, until all are done."""
        while any(self.todo):
            moved = sum(self._advance(rank) for rank in range(len(self.todo)))
            if not moved:
                raise Deadlock({rank: cells[0] for rank, cells in enumerate(self.todo) if cells})

    def _advance(self, rank: int) -> bool:
        cells, before = self.todo[rank], len(self.todo[rank])
        while cells and self._do(rank, cells[0]):
            cells.popleft()
        return len(cells) < before

    def _do(self, rank: int, cell: Action | Overlap) -> bool:
        """Do what a rank does next, if what it needs is there, and move its clock."""
        time, actions = self.clocks[rank], actions_of(cell)
        for action in actions:
            needed = [self.done.get(need) for need in self._needs(action)]
            if None in needed:
                return False
            time = max([time, *(ready for ready in needed if ready is not None)]) + self.costs[action.kind]
        self.clocks[rank] = time
        for stage, kind, m in actions:
            self.done["I" if kind == "B" else kind, stage, m] = time
        return True

    def _needs(self, action: Action) -> list[tuple[str, int, int]]:
        stage, kind, m = action
        if kind == "F":
            return [("F", stage - 1, m)] if stage else []
        if kind == "W":
            return [("I", stage, m)]
        return [("F", stage, m), *([("I", stage + 1, m)] if stage < self.last else [])]
