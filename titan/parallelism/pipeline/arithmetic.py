"""The arithmetic of pipelines: the layers of each stage, the rank of each stage, the number of micro-batches.

A model's layers are split into stages (`split`, `by_layers`, `explicit`), which are placed on ranks (`placement`). The
order of the ranks' actions is that of a schedule: one of torch's (`titan.parallelism.pipeline.schedules`), or a user's
from a CSV file (`read_csv`). `microbatches` chooses the number of micro-batches, `check` raises ConfigError early for
what torch would reject later. Free of torch.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from titan.config.settings import show
from titan.errors import ConfigError
from titan.parallelism.pipeline.schedules import (
    SCHEDULES,
    Action,
    Cell,
    Deadlock,
    Overlap,
    Schedule,
    Timeline,
    actions_of,
    idle_share,
    order,
    rounds,
    schedule_info,
    simulate,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Cell",
    "Deadlock",
    "Overlap",
    "Schedule",
    "Table",
    "Timeline",
    "by_layers",
    "check",
    "explicit",
    "idle_share",
    "microbatches",
    "order",
    "placement",
    "read_csv",
    "schedule_info",
    "simulate",
    "split",
]

DIGITS = 12
"""Shares of time that agree to so many digits count as equal."""


# ---- layers to stages, stages to ranks ----


def split(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Split layers into stages so that the most expensive stage is as cheap as possible.

    Exact. Among such splits the most even one is taken (the least sum of squared costs), and among those the one whose
    earlier stages have fewer layers, since they hold more micro-batches at once.

    Args:
        costs: of each layer, 0 or more, in any unit.
        stages: their number.
        first: the first stage's cost in addition to its layers (the embedding).
        last: the last stage's cost in addition to its layers (norm and head).

    Returns:
        The layers of each stage, one or more.

    Raises:
        ConfigError: when there are more stages than layers.
        ValueError: on a cost that is negative or not finite.
    """
    _enough(len(costs), stages)
    return list(_split(tuple(costs), stages, first, last))


@functools.lru_cache(512)
def _split(costs: tuple[float, ...], stages: int, first: float, last: float) -> tuple[range, ...]:
    ends = list(itertools.accumulate(_whole(costs, first, last), initial=0))
    most = _least_most(ends, stages)
    layers = len(costs)
    rest, choices = {layers: 0}, []
    for _ in range(stages):  # from the last stage to the first: the layers from which the rest can be split, and how
        options = {i: _first_end(i, ends, most, rest) for i in range(layers)}
        found = {i: option for i, option in options.items() if option is not None}
        rest = {i: squares for i, (squares, _) in found.items()}
        choices.append({i: end for i, (_, end) in found.items()})
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(_ranges(cuts))


def by_layers(layers: int, stages: int) -> list[range]:
    """Split layers into stages of equal numbers; where that is impossible, the last stages have one more.

    Raises:
        ConfigError: when there are more stages than layers.
    """
    _enough(layers, stages)
    few, more = divmod(layers, stages)
    sizes = [few + (stage >= stages - more) for stage in range(stages)]
    return _ranges(itertools.accumulate(sizes, initial=0))


def explicit(layers: int, stages: int, starts: Sequence[int]) -> list[range]:
    """Split layers at the user's indices.

    Args:
        layers: of the model.
        stages: their number.
        starts: the first layer of each stage after the first, counted from 0.

    Raises:
        ConfigError: when these are not `stages` stages of one or more layers.
    """
    given = f"parallelism.starts={show(list(starts))}"
    if len(starts) != stages - 1:
        raise ConfigError(
            f"{given}: {len(starts)} given, but {stages} stages need {stages - 1}: the first layer of each stage but "
            f"the first; correct the list or give parallelism.stages={len(starts) + 1}."
        )
    cuts = [0, *starts, layers]
    if any(start >= end for start, end in itertools.pairwise(cuts)):
        raise ConfigError(f"{given}: the numbers must ascend and be from 1 to {layers - 1}, the model's last layer.")
    return _ranges(cuts)


def placement(schedule: str, ranks: int, stages: int) -> list[int]:
    """Return the pipeline rank of each stage.

    Raises:
        ConfigError: when there is no such schedule.
    """
    v = schedule_info(schedule).placement == "v"
    laps = [divmod(stage, ranks) for stage in range(stages)]
    return [ranks - 1 - place if v and lap % 2 else place for lap, place in laps]


def _enough(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"parallelism.pipeline: {stages} stages need a layer each, and the model has {layers} layers; give a "
            f"smaller parallelism.pipeline, or at most parallelism.stages={layers}."
        )


def _whole(costs: Sequence[float], first: float, last: float) -> list[int]:
    """Return costs as integers in a common unit, so that equal sums compare equal."""
    exact = [Fraction(cost) for cost in (*costs, first, last)]
    if min(exact) < 0:
        raise ValueError(f"a negative cost in {costs}, first {first}, last {last}")
    unit = math.lcm(*(cost.denominator for cost in exact))
    *sizes, before, after = [int(cost * unit) for cost in exact]
    sizes[0] += before
    sizes[-1] += after
    return sizes


def _least_most(ends: list[int], stages: int) -> int:
    """Return the least possible cost of the most expensive stage, by bisection."""
    low, high = max(end - start for start, end in itertools.pairwise(ends)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _parts(ends, middle) <= stages else (middle + 1, high)
    return low


def _parts(ends: list[int], most: int) -> int:
    """Return the number of parts that are needed when each costs at most `most`."""
    count, start = 1, 0
    for before, end in itertools.pairwise(ends):
        if end - start > most:
            count, start = count + 1, before
    return count


def _first_end(start: int, ends: list[int], most: int, rest: dict[int, int]) -> tuple[int, int] | None:
    """Return the least sum of squares from layer `start` on, and the end of the first part of this split."""
    reach = itertools.takewhile(lambda end: ends[end] - ends[start] <= most, range(start + 1, len(ends)))
    return min(((rest[end] + (ends[end] - ends[start]) ** 2, end) for end in reach if end in rest), default=None)


def _ranges(cuts: Iterable[int]) -> list[range]:
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def microbatches(schedule: str, ranks: int, stages_per_rank: int, rows: int, idle: float = 0.1) -> int | None:
    """Return the number of micro-batches that a rank's rows are split into.

    A micro-batch has ceil(rows / number) rows, so some may be padding: time is lost where ranks are idle or compute
    padding.

    Args:
        schedule: its name.
        ranks: along the pipeline.
        stages_per_rank: their number.
        rows: of a rank in a step, at least 1.
        idle: the share of time that may be lost.

    Returns:
        The least number with which no more than `idle` is lost; if there is none, the one with which the least is
        lost; None when the schedule allows no number up to `rows`.

    Raises:
        ConfigError: when there is no such schedule.
    """
    kind = schedule_info(schedule)
    counts = [n for n in range(1, rows + 1) if kind.allows(ranks, stages_per_rank, n)]
    # few micro-batches need a simulation, which is slow for many ranks: so only for possible results
    least = {n: _lost(kind.least_idle(ranks, stages_per_rank, n), rows, n) for n in counts}
    exact = functools.cache(lambda n: _lost(idle_share(schedule, ranks, stages_per_rank, n), rows, n))
    for n in counts:
        if round(least[n], DIGITS) <= idle and round(exact(n), DIGITS) <= idle:
            return n
    simulated: list[int] = []
    for n in sorted(counts, key=least.__getitem__):
        if simulated and least[n] > min(map(exact, simulated)) + 10**-DIGITS:
            break
        simulated.append(n)
    return min(simulated, key=exact, default=None)


def _lost(idle: float, rows: int, count: int) -> float:
    return 1 - (1 - idle) * rows / (count * -(-rows // count))


# ---- a user's own schedule ----


@dataclass(frozen=True)
class Table:
    """A schedule from a file.

    Attributes:
        order: of each rank.
        owners: the rank of each stage.
        microbatches: their number.
        splits_backward: whether any gradients of inputs and of weights are computed in two passes.
        idle: the ranks' idle share of the time, as in `idle_share`.
    """

    order: tuple[tuple[Cell, ...], ...]
    owners: tuple[int, ...]
    microbatches: int
    splits_backward: bool
    idle: float

    @property
    def ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.order)

    @property
    def stages(self) -> int:
        """Stages in all."""
        return len(self.owners)


def read_csv(path: str | Path) -> Table:
    """Read a schedule from a file: one row per rank, one cell per action, in torch's format "compute_only".

    A cell is `<stage><F|B|I|W><micro-batch>`, all counted from 0, such as 0F3; or several of them as
    `(0F3;1B0)OVERLAP_F_B`; or empty. torch adds sending and receiving.

    Raises:
        ConfigError: naming `parallelism.schedule`, when the file can't be read or is no complete schedule.
    """
    try:
        rows = [
            tuple(_cell(text, row, column) for column, text in enumerate(cells, 1))
            for row, cells in enumerate(_texts(path), 1)
        ]
        owners = _owners(rows)
        listed = [action for row in rows for cell in row for action in actions_of(cell)]
        count = _complete(listed, len(owners))
        return Table(tuple(rows), owners, count, any(a.kind == "I" for a in listed), _idle(rows))
    except _Bad as bad:
        raise ConfigError(f"parallelism.schedule={path}: {bad}.") from None


class _Bad(Exception):
    """An invalid file: what is wrong, and how to correct it."""


def _texts(path: str | Path) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise _Bad(f"there is no such file; correct its name, or choose one of {', '.join(SCHEDULES)}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _Bad(f"the file can't be read ({error}); give a text file of comma-separated actions") from None
    if not rows:
        raise _Bad("the file is empty; give it a row of actions for each rank")
    return rows


def _cell(text: str, row: int, column: int) -> Cell:
    overlap = re.fullmatch(r"\(([^()]+)\)OVERLAP_F_B", text.strip())
    found = [
        re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", part.strip())
        for part in (overlap[1].split(";") if overlap else [text])
    ]
    actions = tuple(Action(int(match[1]), match[2], int(match[3])) for match in found if match)
    if text.strip() and len(actions) < len(found):
        raise _Bad(
            f"row {row}, column {column} is {text.strip()!r}; write <stage><F, B, I or W><micro-batch>, such as 0F3, "
            "or nothing (sending, receiving and reducing come by themselves)"
        )
    return Overlap(actions) if overlap else next(iter(actions), None)


def _owners(rows: list[tuple[Cell, ...]]) -> tuple[int, ...]:
    """Return the rank of each stage."""
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        actions = [action for cell in row for action in actions_of(cell)]
        if not actions:
            raise _Bad(f"row {rank + 1} has no action, but each row is a rank that needs a stage; fill or remove it")
        for stage, *_ in actions:
            if owners.setdefault(stage, rank) != rank:
                raise _Bad(f"stage {stage} is in rows {owners[stage] + 1} and {rank + 1}; keep it in one")
    gap = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if gap is not None:
        raise _Bad(f"there is a stage {max(owners)}, but no stage {gap}; number stages from 0 without a gap")
    return tuple(owners[stage] for stage in range(len(owners)))


def _complete(actions: list[Action], stages: int) -> int:
    """Return the number of micro-batches, after checking that each goes once through all stages and back."""
    counts = Counter(actions)
    twice = next((action for action, count in counts.items() if count > 1), None)
    if twice:
        raise _Bad(f"{twice} is there twice; remove one")
    count = 1 + max(action.microbatch for action in actions)
    for stage in range(stages):
        for m in range(count):  # which may be a huge number, but ends at the first that is missing
            _once(stage, m, "".join(kind for kind in "FBIW" if (stage, kind, m) in counts))
    return _in_turn([m for stage, kind, m in actions if stage == stages - 1 and kind == "F"])


def _once(stage: int, microbatch: int, kinds: str) -> None:
    """Raise `_Bad` for a micro-batch that doesn't go forward and backward through a stage once."""
    name = {kind: str(Action(stage, kind, microbatch)) for kind in "FBIW"}
    if "F" not in kinds:
        raise _Bad(f"{name['F']} is missing; each micro-batch goes forward through each stage once")
    if "B" in kinds and kinds != "FB":
        raise _Bad(f"{name[kinds[-1]]} repeats a part of {name['B']}; keep either B, or I and W")
    if kinds in ("FI", "FW"):
        missing = name["W" if kinds == "FI" else "I"]
        raise _Bad(f"{name[kinds[1]]} is there without {missing}; add it, or replace both by {name['B']}")
    if kinds == "F":
        raise _Bad(f"{name['B']} is missing; each micro-batch goes backward through each stage once")


def _in_turn(forward: list[int]) -> int:
    """Return the last stage's number of micro-batches, after checking their order.

    torch appends losses in the order of computation, and reads a micro-batch's loss by its number.
    """
    wrong = next((m for turn, m in enumerate(forward) if turn != m), None)
    if wrong is not None:
        raise _Bad(f"the last stage computes micro-batch {wrong} forward out of order; use the order 0, 1, 2, ...")
    return len(forward)


def _idle(rows: list[tuple[Cell, ...]]) -> float:
    try:
        return simulate(rows).idle
    except Deadlock as deadlock:
        rank, cell = next(iter(deadlock.waiting.items()))
        raise _Bad(
            f"the order deadlocks: row {rank + 1} waits at {cell} for an action that comes too late; "
            "put it after what it needs"
        ) from None


# ---- checks ----


def check(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    """Check stages and micro-batches against a schedule.

    Args:
        schedule: its name, or a file whose name ends in .csv.
        ranks: along the pipeline.
        stages: in all.
        microbatches: of a step.

    Raises:
        ConfigError: naming `parallelism.schedule`, `stages`, `pipeline` or `microbatches`.
    """
    if schedule.endswith(".csv"):
        _check_table(f"parallelism.schedule={schedule}", read_csv(schedule), ranks, stages, microbatches)
        return
    kind = schedule_info(schedule)
    _check_stages(kind, ranks, stages)
    if kind.allows(ranks, stages // ranks, microbatches):
        return
    given = f"parallelism.microbatches={microbatches}: {schedule} on parallelism.pipeline={ranks}"
    if kind.microbatches == "stages":
        raise ConfigError(f"{given} needs at least as many as stages; give {stages} or more, or another schedule.")
    if microbatches < 1:
        raise ConfigError(f"{given} needs at least 1; give 1 or more, or auto.")
    below, above = (
        next(n for n in itertools.count(microbatches, step) if kind.allows(ranks, stages // ranks, n))
        for step in (-1, 1)
    )
    times = rounds(ranks, microbatches)
    raise ConfigError(f"{given} has {times} rounds and needs a multiple of that; give {below}, {above} or auto.")


def _check_stages(kind: Schedule, ranks: int, stages: int) -> None:
    given, degree = f"parallelism.stages={stages}: {kind.name}", f"parallelism.pipeline={ranks}"
    wanted = ranks * kind.stages
    if kind.fixed and stages != wanted:
        each = "one stage" if kind.stages == 1 else f"{kind.stages} stages"
        raise ConfigError(f"{given} has {each} on each rank; give {wanted} or auto for {degree}.")
    if stages < 1 or stages % ranks:
        below = max(1, stages // ranks) * ranks
        raise ConfigError(f"{given} needs a multiple of {degree}; give {below}, {below + ranks} or auto.")


def _check_table(given: str, table: Table, ranks: int, stages: int, microbatches: int) -> None:
    for name, value, wanted, noun in (
        ("pipeline", ranks, table.ranks, "ranks (rows)"),
        ("stages", stages, table.stages, "stages"),
        ("microbatches", microbatches, table.microbatches, "micro-batches"),
    ):
        if value != wanted:
            raise ConfigError(
                f"parallelism.{name}={value}: {given} has {wanted} {noun}; "
                f"give parallelism.{name}={wanted}, or another file."
            )
