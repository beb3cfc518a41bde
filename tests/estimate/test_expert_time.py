"""The cost model of blocks with experts, of two kinds of blocks, and of expert-parallel ranks."""

from __future__ import annotations

import dataclasses

import pytest

from tests.estimate.test_step_time import speeds
from tests.measure import fit_costs
from tests.support.composing import compose_test_run
from tests.support.two_kinds import with_two_kinds
from titan.estimate import operations
from titan.estimate import plan as planning
from titan.estimate.constants import load_constants
from titan.estimate.operations import estimate_collective
from titan.estimate.step_time import CAUSES, StepTime, estimate_step
from titan.parallelism.pipeline.stage_plan import assign_layers
from titan.run.run import Run

BASE = ("model=qwen3_30b_a3b", "dataset=synthetic", "dataset.vocab=151936", "checkpoint=off", "cluster=h100",
        "cluster.memory_gib=1e6", "compile=block", "training.seq_len=4096", "training.global_batch=262144",
        "cluster.devices=8")  # fmt: skip


def run(*more: str) -> Run:
    return compose_test_run([*BASE, "parallelism=fsdp", *more], remote=True)


def predicted(one: Run) -> StepTime:
    return estimate_step(one, one.layout, one.microbatches, speeds())


@pytest.mark.full
def test_a_step_is_no_shorter_than_the_work_of_active_experts() -> None:
    one = run()
    step = predicted(one)
    assert set(step.parts) <= set(CAUSES) and "expert parallelism" not in step.parts
    flops = one.model.flops_per_token(4096) * one.training.global_batch / 8 / 989e12
    assert flops < step.seconds < 8 * flops
    idle = 6 * (one.model.parameters() - one.model.active_parameters()) * one.training.global_batch / 8 / 989e12
    assert step.seconds < idle


@pytest.mark.full
def test_expert_parallel_ranks_exchange_rows_and_gather_fewer_weights() -> None:
    without, divided = (predicted(run(f"parallelism.expert={n}", "parallelism.microbatches=1")) for n in (1, 8))
    one = run("parallelism.expert=8", "parallelism.microbatches=1")
    rows = one.model.top_k * one.training.global_batch / 8
    sent, weights = (estimate_collective("all-to-all", rows * n, 8, 1, speeds()) for n in (one.model.dim * 2, 4))
    assert divided.parts["expert parallelism"] == pytest.approx(one.model.layers * (4 * sent + 2 * weights))
    assert divided.parts["weights and gradients"] < without.parts["weights and gradients"]


@pytest.mark.full
def test_shared_experts_compute_beside_an_exchange() -> None:
    shared = ("model=moonlight_16b", "dataset.vocab=163840", "cluster.nodes=2", "cluster.devices=16")
    one = run(*shared, "parallelism.expert=16", "parallelism.microbatches=1", "precision=bf16")
    rows = one.model.top_k * one.microbatch_rows * 4096
    sent, weights = (estimate_collective("all-to-all", rows * n, 16, 1, speeds()) for n in (one.model.dim * 2, 4))
    layers = sum(one.model.expert_parameters(layer) > 0 for layer in range(one.model.layers))
    assert predicted(one).parts["expert parallelism"] < 0.99 * layers * (4 * sent + 2 * weights)


@pytest.mark.full
def test_checkpointing_exchanges_rows_again() -> None:
    full, none = (predicted(run("parallelism.expert=8", f"memory={mode}")) for mode in ("full", "none"))
    assert full.parts["recomputation"] > none.parts["expert parallelism"] / 2 + none.parts["experts"] / 3


def test_an_all_to_all_between_nodes_uses_one_adapter_for_each_rank() -> None:
    device = speeds(link_microseconds=1e-6, network_microseconds=1e-6)
    assert estimate_collective("all-to-all", 42.5e9, 16, 1, device) == pytest.approx(1 / 2, rel=1e-3)
    assert estimate_collective("all-to-all", 340e9, 8, 1, device) == pytest.approx(7 / 8, rel=1e-3)


def test_small_experts_are_slower_than_one_matmul() -> None:
    device = speeds()
    whole, many = (operations.estimate_matmul(8192 / n, 768, 2048, device, count=n) for n in (1, 128))
    assert many >= whole > operations.estimate_matmul(8192, 768, 2048, device)


@pytest.mark.full
def test_blocks_of_two_kinds_take_the_sum_of_their_times() -> None:
    one = run("memory=full", "parallelism.microbatches=2")
    dense, mixed, sparse = (predicted(with_two_kinds(one, n)).parts for n in (48, 12, 0))
    for cause in ("matmuls", "experts", "memory-bound", "recomputation"):
        each = [parts.get(cause, 0.0) for parts in (dense, mixed, sparse)]
        assert each[1] == pytest.approx((12 * each[0] + 36 * each[2]) / 48, rel=0.001)


@pytest.mark.full
def test_stages_have_equal_cost_where_blocks_differ() -> None:
    one = run("parallelism.pipeline=4", "parallelism.microbatches=8", "training.global_batch=1048576")
    wide = with_two_kinds(dataclasses.replace(one, model=dataclasses.replace(one.model, ffn=100_000)), 8)
    placed = assign_layers(wide.parallelism, wide.layout, wide.model, 4096)
    flops = [sum(wide.model.block_flops(4096, layer) for layer in layers) for _, layers in placed]
    assert len(placed[0][1]) < 8 and max(flops) < 1.5 * sum(flops) / 4


@pytest.mark.full
def test_published_runs_move_the_time_of_models_with_experts_and_the_plan_states_their_ratios() -> None:
    moe, constants = run(), load_constants()
    dense = compose_test_run([*BASE[1:], "model=llama1b", "dataset.vocab=128256", "parallelism=fsdp"], remote=True)
    plans = [planning.build_plan(r, r.layout, r.microbatches, r.machine) for r in (moe, dense)]
    for planned, one, ratio in zip(plans, (moe, dense), (constants.experts, 1.0), strict=True):
        hardware = planning.resolve_hardware(one.cluster, one.machine)
        device = planning.derive_device_speeds(one, hardware, one.machine, one.layout)
        fit = estimate_step(one, one.layout, one.microbatches, dataclasses.replace(device, slowdown=1.0))
        assert planned.step.seconds == pytest.approx(ratio * fit.seconds)
    assert [p.error for p in plans] == [constants.experts_error, constants.error]
    words = f"take {constants.experts_least:.1f} to {constants.experts_most:.1f} times"
    assert [words in p.intervals for p in plans] == [True, False]


@pytest.mark.full
def test_the_stored_ratios_are_those_of_the_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    constants = load_constants()
    unfitted = dataclasses.replace(constants, experts=1.0, experts_least=1.0, experts_most=1.0, experts_error=1.0)
    fitted = fit_costs.fit_experts(fit_costs.read_runs(fit_costs.EXPERTS), unfitted)
    assert dataclasses.astuple(fitted) == pytest.approx(dataclasses.astuple(constants))
    assert fitted.experts_most / fitted.experts <= 1 + fitted.experts_error >= fitted.experts / fitted.experts_least
    assert "experts, left out" in capsys.readouterr().out
