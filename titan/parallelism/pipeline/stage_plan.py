"""The stage plan of a pipeline: the number of stages, their layers and their ranks. Free of torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from titan.errors import ConfigError
from titan.parallelism.pipeline import arithmetic, schedules, timing
from titan.parallelism.schema import Layout, Parallelism, StagePlan

if TYPE_CHECKING:
    from titan.model.schema import Decoder


def list_microbatch_counts(parallelism: Parallelism, layout: Layout, rows: int) -> list[int]:
    """Return the numbers of micro-batches that a pipeline may have, ascending from the one that meets `idle`.

    Args:
        parallelism: the schedule and the largest idle share.
        rows: of a rank in a step.

    Raises:
        ConfigError: when the schedule needs more micro-batches than there are rows.
    """
    ranks, per_rank = layout.pipeline, count_stages_per_rank(parallelism, layout.pipeline)
    least = arithmetic.choose_microbatches(parallelism.schedule, ranks, per_rank, rows, parallelism.idle)
    if least is None:
        count = _count_stages(parallelism, layout)
        arithmetic.check_schedule(parallelism.schedule, ranks, count, 2 * count)  # where the stages are the reason
        raise ConfigError(
            f"parallelism.schedule={parallelism.schedule}: needs more micro-batches than the {rows} "
            f"row{'s' if rows > 1 else ''} that a rank has in a step; raise training.global_batch, or give another "
            "schedule such as GPipe."
        )
    kind = schedules.find_schedule(parallelism.schedule)
    return [least, *(n for n in range(least + 1, rows + 1) if kind.allows(ranks, per_rank, n))]


def plan_stages(parallelism: Parallelism, layout: Layout, model: Decoder, seq_len: int, microbatches: int) -> StagePlan:
    """Return the stage plan of a layout.

    With `split=balanced` a stage's cost is the FLOPs of its blocks and, for the last stage, of the head; the embedding
    is a look-up and costs nothing.

    Raises:
        ConfigError: when the schedule can't have such stages or micro-batches, or there are too few layers.
    """
    ranks, schedule = layout.pipeline, parallelism.schedule
    if ranks == 1:
        return _single_stage(parallelism, model.layers)
    count = _count_stages(parallelism, layout)
    arithmetic.check_schedule(schedule, ranks, count, microbatches)
    if parallelism.stages == "auto" and count > model.layers:
        raise ConfigError(
            f"parallelism.pipeline={ranks}: {schedule} needs {count} stages, and the model has {model.layers} "
            f"layer{'s' if model.layers > 1 else ''}; give a smaller parallelism.pipeline."
        )
    owners, parts = zip(*assign_layers(parallelism, layout, model, seq_len), strict=True)
    layers = tuple((part.start, part.stop) for part in parts)
    idle = timing.compute_idle_share(schedule, ranks, count // ranks, microbatches)
    return StagePlan(schedule, layers, owners, schedules.find_schedule(schedule).splits_backward, idle)


@lru_cache(256)
def assign_layers(
    parallelism: Parallelism, layout: Layout, model: Decoder, seq_len: int
) -> tuple[tuple[int, range], ...]:
    """Return the pipeline rank and the layers of each stage.

    Raises:
        ConfigError: when there are too few layers.
    """
    count = _count_stages(parallelism, layout)
    arithmetic.check_schedule(parallelism.schedule, layout.pipeline, count, 2 * count)
    owners = arithmetic.place_stages(parallelism.schedule, layout.pipeline, count)
    parts = _split_layers(parallelism.starts, parallelism.split, model, seq_len, count)
    return tuple(zip(owners, parts, strict=True))


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes the gradients of inputs and of weights in two passes."""
    return schedules.find_schedule(parallelism.schedule).splits_backward


def _single_stage(parallelism: Parallelism, layers: int) -> StagePlan:
    """Return the plan without a pipeline.

    Raises:
        ConfigError: when the settings ask for several stages.
    """
    schedules.find_schedule(parallelism.schedule)
    if parallelism.stages not in ("auto", 1) or parallelism.starts:
        name = "starts" if parallelism.starts else "stages"
        value = list(parallelism.starts) if parallelism.starts else parallelism.stages
        raise ConfigError(
            f"parallelism.{name}={value}: there is one stage without a pipeline; give parallelism=pp too."
        )
    return StagePlan("", ((0, layers),), (0,))


@lru_cache(1024)
def _split_layers(starts: tuple[int, ...], split: str, model: Decoder, seq_len: int, count: int) -> list[range]:
    if starts:
        return arithmetic.split_at(model.layers, count, starts)
    if split == "layers":
        return arithmetic.split_evenly(model.layers, count)
    kinds = {kind: model.block_flops(seq_len, layers[0]) for kind, layers in model.kinds().items()}
    costs = [kinds[model.kind(layer)] for layer in range(model.layers)]
    return arithmetic.split_layers(costs, count, last=model.head_flops())


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
    schedule = schedules.SCHEDULES.get(parallelism.schedule)
    return schedule.stages if schedule else 1
