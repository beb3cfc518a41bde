"""The arithmetic of pipelines: the layers of each stage, the rank of each stage, the number of micro-batches.

A model's layers are split into stages (`split_layers`, `split_evenly`, `split_at`), which are placed on ranks
(`place_stages`). The order of the ranks' actions is that of a schedule (`list_order`): one of torch's
(`titan.parallelism.pipeline.schedules`), or a user's from a CSV file (`read_csv`). `choose_microbatches` chooses the
number of micro-batches, `check_schedule` raises ConfigError early for what torch would reject later. Free of torch.
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

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.parallelism.pipeline.schedules import (
    SCHEDULES,
    Action,
    Cell,
    Overlap,
    PipelineSchedule,
    count_rounds,
    find_schedule,
    list_actions,
    order_actions,
)
from titan.parallelism.pipeline.timing import (
    DeadlockError,
    LinkedOrder,
    compute_idle_share,
    compute_order_idle,
    link_order,
)

DIGITS = 12
"""Shares of time that agree to so many digits count as equal."""


# ---- layers to stages, stages to ranks ----


def split_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> list[range]:
    """Split layers into stages so that the most expensive stage is as cheap as possible.

    Exact. Among such splits the most even one is taken (the least sum of squared costs), and among those the one whose
    earlier stages have fewer layers, since they hold more micro-batches at once.

    Args:
        costs: of each layer, 0 or more, in any unit.
        last: the last stage's cost in addition to its layers (norm and head).

    Returns:
        The layers of each stage, one or more.

    Raises:
        ConfigError: when there are more stages than layers.
    """
    _check_stage_count(len(costs), stages)
    return list(_split_balanced(tuple(costs), stages, last))


@functools.lru_cache(512)
def _split_balanced(costs: tuple[float, ...], stages: int, last: float) -> tuple[range, ...]:
    ends = list(itertools.accumulate(_scale_to_integers(costs, last), initial=0))
    max_cost = _find_least_maximum(ends, stages)
    layers = len(costs)
    rest, choices = {layers: 0}, []
    for _ in range(stages):  # from the last stage to the first: the layers from which the rest can be split, and how
        options = {i: _find_first_end(i, ends, max_cost, rest) for i in range(layers)}
        feasible = {i: option for i, option in options.items() if option is not None}
        rest = {i: squares for i, (squares, _) in feasible.items()}
        choices.append({i: end for i, (_, end) in feasible.items()})
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(_make_ranges(cuts))


def split_evenly(layers: int, stages: int) -> list[range]:
    """Split layers into stages of equal numbers; where that is impossible, the last stages have one more.

    Raises:
        ConfigError: when there are more stages than layers.
    """
    _check_stage_count(layers, stages)
    base_size, remainder = divmod(layers, stages)
    sizes = [base_size + (stage >= stages - remainder) for stage in range(stages)]
    return _make_ranges(itertools.accumulate(sizes, initial=0))


def split_at(layers: int, stages: int, starts: Sequence[int]) -> list[range]:
    """Split layers at the user's indices.

    Args:
        starts: the first layer of each stage after the first, counted from 0.

    Raises:
        ConfigError: when these are not `stages` stages of one or more layers.
    """
    setting_text = f"parallelism.starts={format_value(list(starts))}"
    if len(starts) != stages - 1:
        raise ConfigError(
            f"{setting_text}: {len(starts)} given, but {stages} stages need {stages - 1}: the first layer of each "
            f"stage but the first; correct the list or give parallelism.stages={len(starts) + 1}."
        )
    cuts = [0, *starts, layers]
    if any(start >= end for start, end in itertools.pairwise(cuts)):
        raise ConfigError(
            f"{setting_text}: the numbers must ascend and be from 1 to {layers - 1}, the model's last layer."
        )
    return _make_ranges(cuts)


def place_stages(schedule: str, ranks: int, stages: int) -> list[int]:
    """Return the pipeline rank of each stage.

    Raises:
        ConfigError: when there is no such schedule.
    """
    is_v_shaped = find_schedule(schedule).placement == "v"
    laps = [divmod(stage, ranks) for stage in range(stages)]
    return [ranks - 1 - position if is_v_shaped and lap % 2 else position for lap, position in laps]


def _check_stage_count(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"parallelism.pipeline: {stages} stages need a layer each, and the model has "
            f"{format_plural(layers, 'layer')}; give a smaller parallelism.pipeline, or fewer parallelism.stages."
        )


def _scale_to_integers(costs: Sequence[float], last: float) -> list[int]:
    """Return costs as integers in a common unit, so that equal sums compare equal."""
    exact = [Fraction(cost) for cost in costs]
    exact[-1] += Fraction(last)
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _find_least_maximum(ends: list[int], stages: int) -> int:
    """Return the least possible cost of the most expensive stage, by bisection."""
    low, high = max(end - start for start, end in itertools.pairwise(ends)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _count_parts(ends, middle) <= stages else (middle + 1, high)
    return low


def _count_parts(ends: list[int], max_cost: int) -> int:
    """Return the number of parts that are needed when each costs at most `max_cost`."""
    count, start = 1, 0
    for previous_end, end in itertools.pairwise(ends):
        if end - start > max_cost:
            count, start = count + 1, previous_end
    return count


def _find_first_end(start: int, ends: list[int], max_cost: int, rest: dict[int, int]) -> tuple[int, int] | None:
    """Return the least sum of squares from layer `start` on, and the end of the first part of this split."""
    reach = itertools.takewhile(lambda end: ends[end] - ends[start] <= max_cost, range(start + 1, len(ends)))
    return min(((rest[end] + (ends[end] - ends[start]) ** 2, end) for end in reach if end in rest), default=None)


def _make_ranges(cuts: Iterable[int]) -> list[range]:
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


def choose_microbatches(schedule: str, ranks: int, stages_per_rank: int, rows: int, idle: float = 0.1) -> int | None:
    """Return the number of micro-batches that a rank's rows are split into.

    A micro-batch has ceil(rows / number) rows, so some may be padding: time is lost where ranks are idle or compute
    padding.

    Args:
        ranks: along the pipeline.
        rows: of a rank in a step, at least 1.
        idle: the share of time that may be lost.

    Returns:
        The least number with which no more than `idle` is lost; if there is none, the one with which the least is
        lost; None when the schedule allows no number up to `rows`.

    Raises:
        ConfigError: when there is no such schedule.
    """
    kind = find_schedule(schedule)
    counts = [n for n in range(1, rows + 1) if kind.allows(ranks, stages_per_rank, n)]
    # few micro-batches need a simulation, which is slow for many ranks: so only for possible results
    least = {n: _compute_lost_share(kind.least_idle(ranks, stages_per_rank, n), rows, n) for n in counts}
    exact = functools.cache(
        lambda n: _compute_lost_share(compute_idle_share(schedule, ranks, stages_per_rank, n), rows, n)
    )
    for n in counts:
        if round(least[n], DIGITS) <= idle and round(exact(n), DIGITS) <= idle:
            return n
    simulated: list[int] = []
    for n in sorted(counts, key=least.__getitem__):
        if simulated and least[n] > min(map(exact, simulated)) + 10**-DIGITS:
            break
        simulated.append(n)
    return min(simulated, key=exact, default=None)


def _compute_lost_share(idle: float, rows: int, count: int) -> float:
    return 1 - (1 - idle) * rows / (count * -(-rows // count))


# ---- a user's own schedule ----


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule from a file.

    Attributes:
        order: of each rank.
        owners: the rank of each stage.
        microbatches: their number.
        splits_backward: whether any gradients of inputs and of weights are computed in two passes.
        idle: the ranks' idle share of the time, as in `compute_idle_share`.
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


def read_csv(path: str | Path) -> ScheduleTable:
    """Read a schedule from a file: one row per rank, one cell per action, in torch's format "compute_only".

    A cell is `<stage><F|B|I|W><micro-batch>`, all counted from 0, such as 0F3; or several of them as
    `(0F3;1B0)OVERLAP_F_B`; or empty. torch adds sending and receiving.

    Raises:
        ConfigError: naming `parallelism.schedule`, when the file can't be read or is no complete schedule.
    """
    try:
        rows = [
            tuple(_parse_cell(text, row, column) for column, text in enumerate(cells, 1))
            for row, cells in enumerate(_read_cells(path), 1)
        ]
        owners = _find_owners(rows)
        all_actions = [action for row in rows for cell in row for action in list_actions(cell)]
        count = _count_microbatches(all_actions, len(owners))
        return ScheduleTable(tuple(rows), owners, count, any(a.kind == "I" for a in all_actions), _compute_idle(rows))
    except _InvalidScheduleError as error:
        raise ConfigError(f"parallelism.schedule={path}: {error}.") from None


class _InvalidScheduleError(Exception):
    """An invalid file: what is wrong, and how to correct it."""


def _read_cells(path: str | Path) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise _InvalidScheduleError(
            f"there is no such file; correct its name, or choose one of auto, {', '.join(SCHEDULES)}"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _InvalidScheduleError(
            f"the file can't be read ({error}); give a text file of comma-separated actions"
        ) from None
    if not rows:
        raise _InvalidScheduleError("the file is empty; give it a row of actions for each rank")
    return rows


def _parse_cell(text: str, row: int, column: int) -> Cell:
    overlap = re.fullmatch(r"\(([^()]+)\)OVERLAP_F_B", text.strip())
    matches = [
        re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", part.strip())
        for part in (overlap[1].split(";") if overlap else [text])
    ]
    actions = tuple(Action(int(match[1]), match[2], int(match[3])) for match in matches if match)
    if text.strip() and len(actions) < len(matches):
        raise _InvalidScheduleError(
            f"row {row}, column {column} is {text.strip()!r}; write <stage><F, B, I or W><micro-batch>, such as 0F3, "
            "or nothing (sending, receiving and reducing come by themselves)"
        )
    return Overlap(actions) if overlap else next(iter(actions), None)


def _find_owners(rows: list[tuple[Cell, ...]]) -> tuple[int, ...]:
    """Return the rank of each stage."""
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        actions = [action for cell in row for action in list_actions(cell)]
        if not actions:
            raise _InvalidScheduleError(
                f"row {rank + 1} has no action, but each row is a rank that needs a stage; fill or remove it"
            )
        for stage, *_ in actions:
            if owners.setdefault(stage, rank) != rank:
                raise _InvalidScheduleError(
                    f"stage {stage} is in rows {owners[stage] + 1} and {rank + 1}; keep it in one"
                )
    gap = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if gap is not None:
        raise _InvalidScheduleError(
            f"there is a stage {max(owners)}, but no stage {gap}; number stages from 0 without a gap"
        )
    return tuple(owners[stage] for stage in range(len(owners)))


def _count_microbatches(actions: list[Action], stages: int) -> int:
    """Return the number of micro-batches, after checking that each goes once through all stages and back."""
    counts = Counter(actions)
    duplicate = next((action for action, count in counts.items() if count > 1), None)
    if duplicate:
        raise _InvalidScheduleError(f"{duplicate} is there twice; remove one")
    count = 1 + max(action.microbatch for action in actions)
    for stage in range(stages):
        for m in range(count):  # which may be a huge number, but ends at the first that is missing
            _check_passes(stage, m, "".join(kind for kind in "FBIW" if (stage, kind, m) in counts))
    return _check_order([m for stage, kind, m in actions if stage == stages - 1 and kind == "F"])


def _check_passes(stage: int, microbatch: int, kinds: str) -> None:
    """Raise `_InvalidScheduleError` for a micro-batch that doesn't go forward and backward through a stage once."""
    name = {kind: str(Action(stage, kind, microbatch)) for kind in "FBIW"}
    if "F" not in kinds:
        raise _InvalidScheduleError(f"{name['F']} is missing; each micro-batch goes forward through each stage once")
    if "B" in kinds and kinds != "FB":
        raise _InvalidScheduleError(f"{name[kinds[-1]]} repeats a part of {name['B']}; keep either B, or I and W")
    if kinds in ("FI", "FW"):
        missing = name["W" if kinds == "FI" else "I"]
        raise _InvalidScheduleError(
            f"{name[kinds[1]]} is there without {missing}; add it, or replace both by {name['B']}"
        )
    if kinds == "F":
        raise _InvalidScheduleError(f"{name['B']} is missing; each micro-batch goes backward through each stage once")


def _check_order(forward: list[int]) -> int:
    """Return the last stage's number of micro-batches, after checking their order.

    torch appends losses in the order of computation, and reads a micro-batch's loss by its number.
    """
    misplaced = next((m for turn, m in enumerate(forward) if turn != m), None)
    if misplaced is not None:
        raise _InvalidScheduleError(
            f"the last stage computes micro-batch {misplaced} forward out of order; use the order 0, 1, 2, ..."
        )
    return len(forward)


def _compute_idle(rows: list[tuple[Cell, ...]]) -> float:
    try:
        return compute_order_idle(rows)
    except DeadlockError as error:
        rank, cell = next(iter(error.waiting.items()))
        raise _InvalidScheduleError(
            f"the order deadlocks: row {rank + 1} waits at {cell} for an action that comes too late; "
            "put it after what it needs"
        ) from None


# ---- orders of named schedules and of files ----


def list_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """Return the actions of each rank of one of torch's schedules, or of a CSV file, which has its own numbers.

    Raises:
        ConfigError: as `order_actions` and `read_csv` do.
        ValueError: as `order_actions` does.
    """
    if schedule.endswith(".csv"):
        return [list(row) for row in read_csv(schedule).order]
    return order_actions(schedule, ranks, stages_per_rank, microbatches)


def link_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    """Return the linked order of `list_order`."""
    if schedule.endswith(".csv"):  # the file may change
        return link_order(read_csv(schedule).order)
    return _link_named_schedule(schedule, ranks, stages_per_rank, microbatches)


@functools.lru_cache(256)
def _link_named_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> LinkedOrder:
    return link_order(order_actions(schedule, ranks, stages_per_rank, microbatches))


# ---- checks ----


def check_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    """Check stages and micro-batches against a schedule.

    Args:
        schedule: its name, or a file whose name ends in .csv.
        ranks: along the pipeline.
        stages: in all.

    Raises:
        ConfigError: naming `parallelism.schedule`, `stages`, `pipeline` or `microbatches`.
    """
    if schedule.endswith(".csv"):
        _check_table(f"parallelism.schedule={schedule}", read_csv(schedule), ranks, stages, microbatches)
        return
    kind = find_schedule(schedule)
    _check_stages(kind, ranks, stages)
    if kind.allows(ranks, stages // ranks, microbatches):
        return
    setting_text = f"parallelism.microbatches={microbatches}: {schedule} on parallelism.pipeline={ranks}"
    if kind.microbatches == "stages":
        raise ConfigError(
            f"{setting_text} needs at least as many as stages; give {stages} or more, or another schedule."
        )
    if microbatches < 1:
        raise ConfigError(f"{setting_text} needs at least 1; give 1 or more, or auto.")
    below, above = (
        next(n for n in itertools.count(microbatches, step) if kind.allows(ranks, stages // ranks, n))
        for step in (-1, 1)
    )
    round_count = count_rounds(ranks, microbatches)
    raise ConfigError(
        f"{setting_text} has {round_count} rounds and needs a multiple of that; give {below}, {above} or auto."
    )


def _check_stages(kind: PipelineSchedule, ranks: int, stages: int) -> None:
    setting_text, degree = f"parallelism.stages={stages}: {kind.name}", f"parallelism.pipeline={ranks}"
    expected = ranks * kind.stages
    if kind.fixed and stages != expected:
        stage_text = "one stage" if kind.stages == 1 else f"{kind.stages} stages"
        raise ConfigError(f"{setting_text} has {stage_text} on each rank; give {expected} or auto for {degree}.")
    if stages < 1 or stages % ranks:
        below = max(1, stages // ranks) * ranks
        raise ConfigError(f"{setting_text} needs a multiple of {degree}; give {below}, {below + ranks} or auto.")


def _check_table(setting_text: str, table: ScheduleTable, ranks: int, stages: int, microbatches: int) -> None:
    for name, value, expected, noun in (
        ("pipeline", ranks, table.ranks, "ranks (rows)"),
        ("stages", stages, table.stages, "stages"),
        ("microbatches", microbatches, table.microbatches, "micro-batches"),
    ):
        if value != expected:
            raise ConfigError(
                f"parallelism.{name}={value}: {setting_text} has {expected} {noun}; "
                f"give parallelism.{name}={expected}, or another file."
            )
