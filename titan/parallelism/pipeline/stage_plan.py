"""The stage plan of a pipeline: the number of stages, their layers and their ranks, and the number of micro-batches.

A model's layers are split into stages (`split_layers`, `split_evenly`, `split_at`), which are placed on ranks
(`place_stages`). The order of the ranks' actions is that of a schedule (`titan.parallelism.pipeline.schedules`).
`choose_microbatches` chooses the number of micro-batches, `check_schedule` raises ConfigError early for what torch
would reject later. Free of torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.parallelism.pipeline.schedules import SCHEDULES, PipelineSchedule, count_rounds, find_schedule
from titan.parallelism.pipeline.timing import compute_idle_share
from titan.parallelism.schema import Layout, Parallelism, StagePlan

if TYPE_CHECKING:
    from titan.model.schema import Decoder

DIGITS = 12
"""Shares of time that agree to so many digits count as equal."""


def list_microbatch_counts(parallelism: Parallelism, layout: Layout, rows: int) -> list[int]:
    """Return the numbers of micro-batches that a pipeline may have, ascending from the one that meets `idle`.

    Args:
        parallelism: the schedule and the largest idle share.
        rows: of a rank in a step.

    Raises:
        ConfigError: when the schedule needs more micro-batches than there are rows.
    """
    ranks, per_rank = layout.pipeline, count_stages_per_rank(parallelism, layout.pipeline)
    least = choose_microbatches(parallelism.schedule, ranks, per_rank, rows, parallelism.idle)
    if least is None:
        count = _count_stages(parallelism, layout)
        check_schedule(parallelism.schedule, ranks, count, 2 * count)  # where the stages are the reason
        raise ConfigError(
            f"parallelism.schedule={parallelism.schedule}: needs more micro-batches than the {rows} "
            f"row{'s' if rows > 1 else ''} that a rank has in a step; raise training.global_batch, or give another "
            "schedule such as GPipe."
        )
    kind = find_schedule(parallelism.schedule)
    return [least, *(n for n in range(least + 1, rows + 1) if kind.allows(ranks, per_rank, n))]


def plan_stages(parallelism: Parallelism, layout: Layout, model: Decoder, seq_len: int, microbatches: int) -> StagePlan:
    """Return the stage plan of a layout.

    With `split=balanced` a stage's cost is the FLOPs of its blocks and, for the last stage, of the head; the embedding
    is a look-up and costs nothing.

    Raises:
        ConfigError: when the schedule can't have such stages or micro-batches, there are too few layers, or the
            settings ask for several stages without a pipeline.
    """
    ranks, schedule = layout.pipeline, parallelism.schedule
    if ranks == 1:
        find_schedule(schedule)
        if parallelism.stages not in ("auto", 1) or parallelism.starts:
            name = "starts" if parallelism.starts else "stages"
            value = list(parallelism.starts) if parallelism.starts else parallelism.stages
            raise ConfigError(
                f"parallelism.{name}={value}: there is one stage without a pipeline; give parallelism=pp too."
            )
        return StagePlan("", ((0, model.layers),), (0,))
    count = _count_stages(parallelism, layout)
    check_schedule(schedule, ranks, count, microbatches)
    if parallelism.stages == "auto" and count > model.layers:
        raise ConfigError(
            f"parallelism.pipeline={ranks}: {schedule} needs {count} stages, and the model has {model.layers} "
            f"layer{'s' if model.layers > 1 else ''}; give a smaller parallelism.pipeline."
        )
    owners, parts = zip(*assign_layers(parallelism, layout, model, seq_len), strict=True)
    layers = tuple((part.start, part.stop) for part in parts)
    idle = compute_idle_share(schedule, ranks, count // ranks, microbatches)
    return StagePlan(schedule, layers, owners, find_schedule(schedule).splits_backward, idle)


@functools.lru_cache(256)
def assign_layers(
    parallelism: Parallelism, layout: Layout, model: Decoder, seq_len: int
) -> tuple[tuple[int, range], ...]:
    """Return the pipeline rank and the layers of each stage.

    Raises:
        ConfigError: when there are too few layers.
    """
    count = _count_stages(parallelism, layout)
    check_schedule(parallelism.schedule, layout.pipeline, count, 2 * count)
    owners = place_stages(parallelism.schedule, layout.pipeline, count)
    parts = _split_model(parallelism.starts, parallelism.split, model, seq_len, count)
    return tuple(zip(owners, parts, strict=True))


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes the gradients of inputs and of weights in two passes."""
    return find_schedule(parallelism.schedule).splits_backward


@functools.lru_cache(1024)
def _split_model(starts: tuple[int, ...], split: str, model: Decoder, seq_len: int, count: int) -> list[range]:
    if starts:
        return split_at(model.layers, count, starts)
    if split == "layers":
        return split_evenly(model.layers, count)
    kinds = {kind: model.block_flops(seq_len, layers[0]) for kind, layers in model.kinds().items()}
    costs = [kinds[model.kind(layer)] for layer in range(model.layers)]
    return split_layers(costs, count, last=model.head_flops())


def _count_stages(parallelism: Parallelism, layout: Layout) -> int:
    stages = parallelism.stages
    return layout.pipeline * find_default_stages(parallelism) if stages == "auto" else int(stages)


def count_stages_per_rank(parallelism: Parallelism, ranks: int) -> int:
    """Return the number of stages on each of `ranks` pipeline ranks."""
    if parallelism.stages == "auto":
        return find_default_stages(parallelism)
    return max(1, int(parallelism.stages) // ranks)


def find_default_stages(parallelism: Parallelism) -> int:
    """Return the schedule's default number of stages per rank."""
    schedule = SCHEDULES.get(parallelism.schedule)
    return schedule.stages if schedule else 1


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
    return _make_ranges(cuts)


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


# ---- checks ----


def check_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    """Check the pipeline's stages in all, and micro-batches, against a schedule.

    Raises:
        ConfigError: naming `parallelism.schedule`, `stages`, `pipeline` or `microbatches`.
    """
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
