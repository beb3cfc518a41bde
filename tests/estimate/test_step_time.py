"""The cost model: its parts, what a wrong figure changes, and the published runs that it is fitted on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.measure import fit_costs
from tests.support.composing import compose_test_run
from tests.support.runs import TINY
from tests.support.tiers import full, select_cases
from titan.cluster.schema import Hardware
from titan.errors import ConfigError
from titan.estimate import operations
from titan.estimate import plan as planning
from titan.estimate.constants import load_constants
from titan.estimate.operations import Speeds, estimate_collective
from titan.estimate.step_time import CAUSES, StepModel, StepTime, estimate_step
from titan.run.run import Run

H100 = Hardware(
    bf16_tflops=989, fp8_tflops=1979, fp32_tflops=67, memory_gb_per_second=3350, units=132, link_gb_per_second=340,
    link_microseconds=12, network_gb_per_second=42.5, network_microseconds=35,
)  # fmt: skip
BASE = ("model=llama8b", "dataset=synthetic", "checkpoint=off", "cluster=h100", "cluster.memory_gib=1e6",
        "compile=block", "training.seq_len=4096", "training.global_batch=262144")  # fmt: skip
LAYOUTS = {
    "fsdp": ("parallelism=fsdp", "cluster.nodes=2"),
    "fsdp-tp": ("parallelism=fsdp_tp", "parallelism.tensor=4", "memory=full"),
    "cp": ("parallelism=cp", "parallelism.context=4", "cluster.devices=4"),
    "pp": ("parallelism=pp", "parallelism.pipeline=4", "cluster.devices=4", "parallelism.microbatches=16"),
    "ddp": ("parallelism=ddp",),
}


def speeds(**changed: Any) -> Speeds:
    """The speeds of an H100 in bf16, with some figures changed."""
    return operations.derive_speeds(dataclasses.replace(H100, **changed), 8, dtype="bf16", kernel="flash")


def predicted(run: Run, change: Callable[[Speeds], Speeds] = lambda s: s) -> StepTime:
    return estimate_step(run, run.layout, run.microbatches, change(speeds()))


def composed_run(layout: str, *more: str) -> Run:
    return compose_test_run([*BASE, *LAYOUTS[layout], *more], remote=True)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_and_are_no_less_than_the_work(layout: str) -> None:
    run = composed_run(layout)
    step = predicted(run)
    assert set(step.parts) <= set(CAUSES) and all(part > 0 for part in step.parts.values())
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    flops = run.model.flops_per_token(run.training.seq_len) * run.training.global_batch / run.layout.devices
    assert step.seconds > flops / 989e12
    assert step.tokens_per_second_per_device * step.seconds * run.layout.devices == pytest.approx(262144)


WRONG = [
    full("fsdp", {"network": 0.1}, {"weights and gradients"}, id="slow-network"),
    pytest.param("fsdp-tp", {"link": 0.5}, 
                 {"tensor parallelism", "weights and gradients", "recomputation"}, id="half-link"),
    pytest.param("cp", {"link": 0.25}, {"context parallelism", "weights and gradients"}, id="slow-link-context"),
    full("pp", {"link": 0.01}, {"pipeline transfers", "pipeline idle"}, id="slow-link-pipeline"),
    full("ddp", {"memory": 0.5}, {"memory-bound", "optimizer"}, id="half-memory"),
    pytest.param("ddp", {"attention": 0.5, "attention_backward": 0.5}, {"attention"}, id="half-attention"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "factors", "causes"), WRONG)
def test_a_wrong_figure_shows_in_its_place_only(layout: str, factors: dict[str, float], causes: set[str]) -> None:
    run = composed_run(layout)
    right = predicted(run).parts
    wrong = predicted(
        run, lambda s: dataclasses.replace(s, **{name: getattr(s, name) * by for name, by in factors.items()})
    ).parts
    grown = {cause for cause in CAUSES if wrong.get(cause, 0.0) > 1.001 * right.get(cause, 0.0)}
    assert grown and grown <= causes


@pytest.mark.full
def test_recomputation_is_what_checkpointing_costs() -> None:
    by_mode = {mode: predicted(composed_run("fsdp", f"memory={mode}")).parts for mode in ("none", "selective", "full")}
    again = {mode: parts.get("recomputation", 0.0) for mode, parts in by_mode.items()}
    assert again["none"] == 0 < again["selective"] < again["full"]
    forward = (by_mode["none"]["matmuls"] + by_mode["none"]["attention"]) / 3
    assert again["full"] == pytest.approx(forward, rel=0.25)


@pytest.mark.full
def test_more_microbatches_leave_a_pipeline_less_idle() -> None:
    idle = []
    for count in (4, 8, 16, 32):
        parts = predicted(composed_run("pp", f"parallelism.microbatches={count}", "parallelism.idle=0.9")).parts
        idle.append(parts.get("pipeline idle", 0.0) / sum(parts.values()))
    assert idle == sorted(idle, reverse=True) and idle[0] == pytest.approx(3 / 7, rel=0.15)


def test_a_matmul_takes_whole_tiles() -> None:
    device = speeds()
    one = operations.estimate_matmul(4096, 4096, 4096, device)
    assert one == pytest.approx(2 * 4096**3 / device.matmul, rel=0.3)
    assert operations.estimate_matmul(4096, 129, 4096, device) > 1.2 * operations.estimate_matmul(
        4096, 128, 4096, device
    )
    assert operations.estimate_matmul(8192, 8192, 8192, device, eight_bit=True) < operations.estimate_matmul(
        8192, 8192, 8192, device
    )


def test_collectives_of_known_size() -> None:
    device = speeds(link_microseconds=1e-6, network_microseconds=1e-6)
    assert estimate_collective("all-gather", 340e9, 8, 1, device) == pytest.approx(7 / 8, rel=1e-3)
    assert estimate_collective("all-reduce", 340e9, 8, 1, device) == pytest.approx(2 * 7 / 8, rel=1e-3)
    assert estimate_collective("all-gather", 42.5e9, 4, 8, device) == pytest.approx(
        3 / 4, rel=1e-3
    )  # one device of each node
    assert estimate_collective("all-gather", 8 * 42.5e9, 16, 1, device) == pytest.approx(max(1 / 2, 7 / 8), rel=1e-3)
    assert estimate_collective("all-gather", 1e9, 1, 1, device) == 0


def test_a_missing_figure_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster.hardware.memory_gb_per_second=null: the time of memory-bound"):
        operations.derive_speeds(Hardware(bf16_tflops=100), 8, dtype="bf16", kernel="flash")
    run = compose_test_run([*TINY, "hydra.run.dir=/x"])
    with pytest.raises(ConfigError, match=r"titan.calibrate"):
        planning.build_plan(run, run.layout, run.microbatches, run.machine)


def test_a_power_limit_slows_a_device() -> None:
    limited = speeds(watts=500, reference_watts=700)
    assert limited.matmul / speeds().matmul == pytest.approx((5 / 7) ** load_constants().power)
    assert speeds(watts=900, reference_watts=700).matmul == speeds().matmul


ROWS = fit_costs.read_runs()


def published() -> list[Any]:
    cases = [
        pytest.param(row, id=f"{number}-{row['model']}-{row['precision']}-{row['n_gpus']}")
        for number, row in enumerate(ROWS)
    ]
    return select_cases(cases, [cases[number].id for number in (1, 2, 4)])


@pytest.mark.parametrize("row", published())
def test_published_runs_are_met(row: dict[str, str]) -> None:
    """The stored constants are those of this model: a change of it asks for tests.measure.fit_costs."""
    (error,) = fit_costs.compute_errors([row], load_constants())
    assert abs(error) < math.log(1.1)


@pytest.mark.full
def test_the_makespan_of_the_timetable_is_the_step_without_what_follows_it() -> None:
    step = predicted(composed_run("pp", "cluster.devices=auto", "cluster.nodes=2", "parallelism.shard=4"))
    assert min(span.start for span in step.spans) == 0
    after = step.parts.get("weights and gradients", 0.0) + step.parts["optimizer"]
    assert max(span.end for span in step.spans) == pytest.approx(step.seconds - after)


def test_a_pipelines_gradients_are_reduced_with_nothing_beside() -> None:
    """torch's schedules reduce what is accumulated whole after the last action."""
    pipeline = ("parallelism.pipeline=2", "parallelism.microbatches=8", "training.global_batch=1048576")
    run = composed_run("fsdp", *pipeline, "parallelism.accumulate=whole")
    model = StepModel(run, run.layout, run.microbatches, speeds())
    reduced = run.model.layers / 2 * model.get_block(0).reduce_seconds
    others = estimate_step(run, run.layout, run.microbatches, speeds(), merged=True)
    assert predicted(run).parts["weights and gradients"] >= reduced > others.parts["weights and gradients"]


@pytest.mark.parametrize(
    ("per_rank", "gathers_again"), [pytest.param(2, False, id="two-stages"), pytest.param(8, True, id="eight-stages")]
)
def test_a_rank_with_more_than_three_stages_gathers_them_again(per_rank: int, gathers_again: bool) -> None:
    """Over slow links the gathers outlast the computation beside them."""
    pipeline = ("parallelism.pipeline=4", f"parallelism.stages={4 * per_rank}", "parallelism.schedule=Interleaved1F1B")
    run = composed_run("fsdp", *pipeline, "parallelism.shard=4", "parallelism.microbatches=16")
    seconds = [
        estimate_step(run, run.layout, run.microbatches, speeds(link_gb_per_second=speed)).parts
        for speed in (1000.0, 0.1)
    ]
    block = StepModel(run, run.layout, run.microbatches, speeds(link_gb_per_second=0.1)).get_block(0)
    once = run.model.layers / 4 * (block.gather_seconds + block.reduce_seconds)
    slow = seconds[1]["weights and gradients"]
    assert seconds[0]["weights and gradients"] < slow and (slow > 1.5 * once) == gathers_again


@pytest.mark.full
def test_eight_bit_matmuls_by_scaling() -> None:
    """A scale for each row takes longer, and weight gradients in bf16 longer still."""
    seconds = [
        predicted(composed_run("fsdp", f"precision={name}", "parallelism.microbatches=1")).parts["matmuls"]
        for name in ("float8", "float8_rowwise", "float8_rowwise_hp", "bf16")
    ]
    assert seconds == sorted(seconds) and len(set(seconds)) == 4
