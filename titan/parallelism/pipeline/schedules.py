"""Pipeline schedules: the order in which each rank runs micro-batches through its stages, and how long that takes.

`SCHEDULES` has the properties of each of torch's schedules, `order` returns its actions, and `simulate` computes the
idle time of that or any other order. Free of torch.
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
    """The properties of one of torch's schedules.

    Attributes:
        name: the argument of torch.distributed.pipelining.schedules.get_schedule_class.
        stages: default number of stages per rank.
        fixed: whether this is the only possible number; else any number from 1.
        placement: stage s is on rank s modulo ranks (loop), or every other lap runs backwards (v).
        splits_backward: whether gradients of inputs and of weights are computed in two passes. FSDP then must not free
            gathered weights in between, and selective checkpointing, which allows one backward pass, is impossible.
        microbatches: their number is free, or at least the number of stages, or a multiple of the number of rounds,
            which is the number divided by the ranks, rounded down, and at least 1.
        waits: the least time that each rank waits in a step for each adjacent rank, in units of a stage's forward:
            where the backward pass is not split, 1 on the way there and 2 on the way back.
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
        """Return the idle share of a pipeline that is filled by micro-batches; otherwise a lower bound of it."""
        wait = self.waits * (ranks - 1)
        return wait / (3 * microbatches * stages_per_rank + wait)

    def fills(self, ranks: int, microbatches: int) -> bool:
        """Whether so many micro-batches fill the pipeline."""
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


@dataclass(frozen=True)
class Overlap:
    """Actions that a rank may run at once; torch runs them one after another, and sends results after the last."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap | None
"""One entry of a rank's order; None: idle."""


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of an entry."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Overlap) else (cell,)


# ---- the orders of torch's schedules ----


def schedule_info(schedule: str) -> Schedule:
    """Return the properties of a schedule.

    Raises:
        ConfigError: when there is no schedule of this name.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"parallelism.schedule={schedule}: choose one of {', '.join(SCHEDULES)}, or a file whose name ends in .csv"
            f"{nearest(schedule, SCHEDULES)}"
        )
    return SCHEDULES[schedule]


def order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """Return the actions of each rank in torch's order, without idle entries.

    Raises:
        ConfigError: when there is no such schedule.
        ValueError: on numbers that the schedule does not allow.
    """
    if not schedule_info(schedule).allows(ranks, stages_per_rank, microbatches):
        raise ValueError(f"{schedule} on {ranks} ranks of {stages_per_rank} stages: not {microbatches} micro-batches")
    return [list(ORDERS[schedule](rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks)]


def rounds(ranks: int, microbatches: int) -> int:
    """Return how many times interleaved schedules go through all stages of a rank."""
    return max(1, microbatches // ranks)


def _gpipe(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: all forward, then all backward (Huang et al., GPipe, 2019)."""
    return [Action(rank, kind, m) for kind in "FB" for m in range(microbatches)]


def _looped_bfs(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: all micro-batches stage by stage, and back (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022)."""
    there = [(rank + lap * ranks, m) for lap in range(stages_per_rank) for m in range(microbatches)]
    return [Action(s, "F", m) for s, m in there] + [Action(s, "B", m) for s, m in reversed(there)]


def _1f1b(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: one forward, one backward (Narayanan et al., PipeDream-Flush, 2020)."""
    everything = [(rank, m) for m in range(microbatches)]
    return _alternate(everything, everything, ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: 1F1B with several stages per rank (Narayanan et al., Megatron-LM, arXiv:2104.04473, 2021)."""
    forward, backward, once = _in_rounds(rank, ranks, stages_per_rank, microbatches)
    return _alternate(forward, backward, once + 2 * (ranks - 1 - rank))


def _interleaved_zero_bubble(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order: ZB1P with several stages per rank; weights follow inputs `rank` steps later (Qi et al., Zero Bubble)."""
    forward, backward, once = _in_rounds(rank, ranks, stages_per_rank, microbatches)
    return _alternate(forward, backward, once + ranks - 1 - rank, lag=rank)


Turns: TypeAlias = list[tuple[int, int]]
"""Pairs of stage and micro-batch, in order."""


def _in_rounds(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Turns, Turns, int]:
    """Return the forward and backward order of interleaved schedules, and the count before the last stage's first turn.

    A round runs about as many micro-batches as there are ranks through all stages.
    """
    size = microbatches // rounds(ranks, microbatches)
    stages = range(rank, ranks * stages_per_rank, ranks)
    turns = [range(start, start + size) for start in range(0, microbatches, size)]
    forward = [(s, m) for turn in turns for s in stages for m in turn]
    backward = [(s, m) for turn in turns for s in reversed(stages) for m in turn]
    return forward, backward, (stages_per_rank - 1) * size


def _alternate(forward: Turns, backward: Turns, warmup: int, lag: int | None = None) -> list[Cell]:
    """Return `warmup` times forward, then forward and backward in turn; with a lag, weights follow that much later."""
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
    """Order of ZB-V: a rank has a stage of the first lap and one of the second (Qi et al., Zero Bubble, section 6)."""
    there, back, left = rank, 2 * ranks - 1 - rank, ranks - rank
    # the pattern is that of a full pipeline; micro-batches that don't exist are left out
    full = max(2 * ranks - 1, microbatches)
    only_back: list[Token] = [("F", back), ("I", back), ("W", back)]
    tokens = [("F", there)] * (2 * left - 1) + [("F", back), ("F", there)] * rank + only_back * left
    tokens += [("F", there), ("I", there), ("W", there), *only_back] * (full - ranks)
    tokens += [("I", there), ("I", back)] * rank + [("I", there), ("W", there)] * left
    tokens += [("W", back)] * rank + [("W", there)] * rank
    return [action for action in _numbered(tokens) if action.microbatch < microbatches]


def _dual_pipe_v(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Cell]:
    """Order of DualPipeV: forward of one stage overlaps with backward of the other (DeepSeek-V3, 2024; Sea AI Lab)."""
    there, back, left = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    halves: list[tuple[Token, ...]] = [(("F", there), ("B", back)), (("F", back), ("B", there))]
    pairs = halves * (microbatches - 2 * ranks + rank + 1) + [(("B", back),), halves[1]] * left
    if rank == ranks - 1:  # the first pair is taken apart: backward need not wait
        pairs[:1] = [(token,) for token in halves[0]]
    start = [("F", there)] * (2 * left) + [("F", there), ("F", back)] * (rank + 1)
    start += [("I", back), ("W", back), ("F", back)] * left
    # at the end weights come as late as possible, in the order of their inputs
    ends = [back, there] * (rank + 1)
    late = ends[rank + 1 :] + [there] * left
    stop = [("B", s) for s in ends[: rank + 1]] + [("I", s) for s in ends[rank + 1 :]]
    stop += [token for s in late[:left] for token in (("W", s), ("I", there))] + [("W", s) for s in late[left:]]
    cells = [(token,) for token in start] + pairs + [(token,) for token in stop]
    actions = _numbered(token for cell in cells for token in cell)
    grouped = [tuple(itertools.islice(actions, len(cell))) for cell in cells]
    return [Overlap(group) if len(group) > 1 else group[0] for group in grouped]


def _numbered(tokens: Iterable[Token]) -> Iterator[Action]:
    """Number the micro-batches: a stage takes them in order in forward, backward of inputs and backward of weights."""
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
"""The function that returns each schedule's order, from rank, ranks, stages per rank and micro-batches."""


# ---- time ----


@dataclass(frozen=True)
class Timeline:
    """The duration of an order.

    Attributes:
        makespan: from the first action's start to the last one's end, in the unit of the costs.
        ranks: each rank's idle share of the makespan.
        idle: the mean of these.
    """

    makespan: float
    ranks: tuple[float, ...]
    idle: float


class Deadlock(ValueError):
    """Raised for an order that deadlocks.

    Attributes:
        waiting: the next entry of each rank that is not done, by rank.
    """

    def __init__(self, waiting: dict[int, Action | Overlap]) -> None:
        super().__init__(", ".join(f"rank {rank} waits at {cell}" for rank, cell in waiting.items()))
        self.waiting = waiting


def simulate(
    actions: Sequence[Sequence[Cell]], forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0
) -> Timeline:
    """Simulate an order: each rank runs its actions one after another, each as soon as its inputs exist.

    Forward of a stage needs the forward of the previous stage, backward (also of inputs alone) the stage's own forward
    and the backward of the next stage, backward of weights that of inputs, of the same micro-batch. The results of an
    overlap are available after all of it. Sending takes no time.

    Args:
        actions: of each rank, in its order.
        forward, backward_input, backward_weight: the time of each at any stage; a full backward takes both parts.

    Raises:
        Deadlock: when no rank can continue.
    """
    costs = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward_input + backward_weight}
    simulation = _Simulation(actions, lambda action: costs[action.kind])
    simulation.run()
    busy = [sum(costs[action.kind] for cell in row for action in actions_of(cell)) for row in actions]
    makespan = max(simulation.clocks, default=0.0)
    shares = tuple((makespan - time) / makespan if makespan else 0.0 for time in busy)
    return Timeline(makespan, shares, math.fsum(shares) / max(1, len(shares)))


@dataclass(frozen=True)
class Span:
    """When a rank executes an action, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


def timetable(actions: Sequence[Sequence[Cell]], cost: Callable[[Action], float], hop: float = 0.0) -> list[Span]:
    """Return when each rank executes each of its actions.

    Args:
        actions: of each rank, in its order.
        cost: seconds of an action.
        hop: seconds to send a result to a stage on another rank.

    Raises:
        Deadlock: when no rank can continue.
    """
    simulation = _Simulation(actions, cost, hop)
    simulation.run()
    return simulation.spans


def idle_share(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Return the idle share of the ranks' time, where backward takes twice as long as forward, half of it for weights.

    Exact: in closed form where micro-batches fill the pipeline, otherwise by simulation.

    Raises:
        ConfigError, ValueError: as `order` does.
    """
    kind = schedule_info(schedule)
    if kind.allows(ranks, stages_per_rank, microbatches) and kind.fills(ranks, microbatches):
        return kind.least_idle(ranks, stages_per_rank, microbatches)
    return simulate(order(schedule, ranks, stages_per_rank, microbatches)).idle


class _Simulation:
    """The state of a simulation: a clock for each rank, and when the result of each action is available."""

    def __init__(self, rows: Sequence[Sequence[Cell]], cost: Callable[[Action], float], hop: float = 0.0) -> None:
        self.cost, self.hop = cost, hop
        self.spans: list[Span] = []
        self.owner = {
            action.stage: rank for rank, row in enumerate(rows) for cell in row for action in actions_of(cell)
        }
        self.last = max((action.stage for row in rows for cell in row for action in actions_of(cell)), default=0)
        self.clocks = [0.0] * len(rows)
        self.todo = [deque(cell for cell in row if cell is not None) for row in rows]
        self.done: dict[tuple[str, int, int], float] = {}  # a full backward is entered as that of inputs

    def run(self) -> None:
        """Advance each rank as far as possible, until all are done."""
        while any(self.todo):
            if not sum(self._advance(rank) for rank in range(len(self.todo))):
                raise Deadlock({rank: cells[0] for rank, cells in enumerate(self.todo) if cells})

    def _advance(self, rank: int) -> bool:
        cells, before = self.todo[rank], len(self.todo[rank])
        while cells and self._run(rank, cells[0]):
            cells.popleft()
        return len(cells) < before

    def _run(self, rank: int, cell: Action | Overlap) -> bool:
        """Run a rank's next entry, if its inputs are available, and advance the clock."""
        time, actions, spans = self.clocks[rank], actions_of(cell), list[Span]()
        for action in actions:
            needed = [self._available(need, rank) for need in self._needs(action)]
            if None in needed:
                return False
            start = max([time, *(ready for ready in needed if ready is not None)])
            time = start + self.cost(action)
            spans.append(Span(rank, action, start, time))
        self.clocks[rank] = time
        self.spans += spans
        for stage, kind, m in actions:
            self.done["I" if kind == "B" else kind, stage, m] = time
        return True

    def _available(self, need: tuple[str, int, int], rank: int) -> float | None:
        """Return when a rank has a result; None if it is not computed yet."""
        ready = self.done.get(need)
        return ready if ready is None or self.owner[need[1]] == rank else ready + self.hop

    def _needs(self, action: Action) -> list[tuple[str, int, int]]:
        stage, kind, m = action
        if kind == "F":
            return [("F", stage - 1, m)] if stage else []
        if kind == "W":
            return [("I", stage, m)]
        return [("F", stage, m), *([("I", stage + 1, m)] if stage < self.last else [])]
