"""Gradients that FSDP accumulates whole, in fp32 or bf16: sums against fp64, memory, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.runs import Tensors, compose_tiny_run, train_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.estimate.traced.memory import LiveMemory, find_peak
from titan.model import init_weights
from titan.model.schema import Llama
from titan.parallelism import data
from titan.parallelism.microbatches import Microbatches
from titan.precision.low_precision import set_compute_dtype
from titan.precision.schema import Precision
from titan.training.trace.rank import trace_rank
from titan.training.train_step import GradAccumulation, ModelStage

CONFIG = Llama(dim=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=64)
BF16 = Precision("bf16")
MATRICES = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "head.weight")
ACCUMULATED = "precision.accumulate=bf16"
WHOLE = ("precision=bf16", "parallelism.accumulate=whole", "parallelism.microbatches=4")
PIPELINED = ("precision=bf16", "parallelism=pp", "parallelism.shard=2", "parallelism.microbatches=4", "model.layers=4")


def build_stage(mesh: Any = None, accumulate: torch.dtype = torch.float32) -> ModelStage:
    """Return a stage that computes in bf16, sharded over a mesh or whole."""
    with torch.device("meta"):
        model: Any = CONFIG.build()
    initial, stage = model.initial(), ModelStage(model)
    set_compute_dtype(model, BF16)
    if mesh is not None:
        data.shard_stage(stage, mesh, torch.bfloat16, reshard=True, accumulate_dtype=accumulate)
    init_weights.materialise_model(model, initial, 0, "cpu")
    return stage


def make_rows(rank: int, count: int) -> Microbatches:
    """Return the micro-batches of a rank."""
    tokens = torch.randint(0, CONFIG.vocab, (count, 1, 17), generator=torch.Generator().manual_seed(rank))
    return Microbatches(tokens[..., :-1], targets=tokens[..., 1:])


def list_matrix_gradients(stage: ModelStage) -> Tensors:
    """Return whole gradients of matrices, whose bits are those that FSDP computes."""
    named = ((name, p.grad) for name, p in stage.model.named_parameters() if any(part in name for part in MATRICES))
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in named if grad is not None
    }


def sum_gradients(rank: int, world: int, count: int, accumulate: torch.dtype) -> tuple[Tensors, Tensors, Tensors]:
    """Return the sums of FSDP, those of each micro-batch's gradient in fp64, and those rounded after each addition."""
    stage = build_stage(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)), accumulate)
    GradAccumulation(stage, stage, unsharded_gradients=True).backward(make_rows(rank, count), 1.0)
    exact, rounded = _sum_independently(rank, count)
    for sums in (exact, rounded):
        for total in sums.values():
            dist.all_reduce(total)
    return list_matrix_gradients(stage), exact, rounded


def _sum_independently(rank: int, count: int) -> tuple[Tensors, Tensors]:
    """Return a rank's sums over micro-batches in fp64, without FSDP, and those in bf16."""
    exact: Tensors = {}
    rounded: Tensors = {}
    stage, rows = build_stage(), make_rows(rank, count)
    for i in range(count):
        stage.zero_grad()
        stage(*rows.select_microbatch(i)).backward()
        for name, grad in list_matrix_gradients(stage).items():
            exact[name] = exact.get(name, 0) + grad.double()
            rounded[name] = (rounded.get(name, 0) + grad.double()).float().bfloat16().double()
    return exact, rounded


def compute_error(sums: Tensors, exact: Tensors) -> float:
    """Return the largest 2-norm of an error in that of the exact sum."""
    return max(float((sums[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact)


@pytest.mark.full
@pytest.mark.parametrize("count", [pytest.param(4, id="4"), full(64, id="64")])
def test_sums_are_rounded_once_per_addition_and_in_fp32_not_at_all(count: int) -> None:
    for accumulate, least, most in ((torch.float32, 0.0, 1e-6), (torch.bfloat16, 1e-4, 1.5e-2)):
        sums, exact, rounded = run_ranks(sum_gradients, 2, count, accumulate)[0]
        assert sums.keys() == exact.keys() and len(sums) == 9
        assert least <= compute_error(sums, exact) < most
        if accumulate == torch.bfloat16:
            assert compute_error(sums, rounded) < 1e-6


LAYOUTS = {
    "fsdp": ("parallelism=fsdp", *WHOLE),
    "hsdp": ("parallelism=hsdp", "parallelism.replicate=2", "parallelism.shard=2", *WHOLE, "training.global_batch=256"),
    "cp": ("parallelism=cp", *WHOLE),
    "ep": ("model=qwen3_moe_debug", "parallelism=fsdp", "parallelism.expert=2", *WHOLE),
    "offloaded": ("parallelism=fsdp", "memory.offload=true", *WHOLE),
    "fsdp-tp": ("parallelism=fsdp_tp", "parallelism.shard=2", "parallelism.tensor=2", "model.kv_heads=2", *WHOLE),
    "replicate-pp": ("parallelism.replicate=2", *PIPELINED[:1], *PIPELINED[3:], "parallelism.pipeline=2"),
    "pp": PIPELINED,
    "interleaved": (*PIPELINED, "parallelism.schedule=Interleaved1F1B"),
    "zbv": (*PIPELINED, "parallelism.schedule=ZBVZeroBubble"),
    "float8": ("parallelism=fsdp", *WHOLE, "precision=float8", "precision.emulate=true"),
    "bf16-weights": ("parallelism=fsdp", *WHOLE, "precision=bf16_pure"),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_round_by_a_bf16_rounding(layout: str, tmp_path: Path) -> None:
    settings = (*LAYOUTS[layout], "training.steps=1", "checkpoint=off")
    gradients = [
        train_run(compose_tiny_run(tmp_path / str(i), *settings, *more))[0].gradients
        for i, more in enumerate(((), (ACCUMULATED,)))
    ]
    errors = {
        name: float((rounded - usual).norm() / usual.norm().clamp(min=1e-30))
        for (name, usual), rounded in zip(gradients[0].items(), gradients[1].values(), strict=True)
    }
    assert 2e-4 < max(errors.values()) < 8e-3, errors


@pytest.mark.full
def test_schedules_that_split_backward_add_up_in_fp32(tmp_path: Path) -> None:
    """torch adds gradients of weights up in bf16 until FSDP casts them: all of the last micro-batches'."""
    settings = (*PIPELINED, "training.steps=1", "checkpoint=off", "parallelism.microbatches=8")
    settings += ("training.global_batch=256",)
    schedules = ("parallelism.schedule=Interleaved1F1B", "parallelism.schedule=ZBVZeroBubble")
    usual, split = (
        {
            name: gradient
            for rank in train_run(compose_tiny_run(tmp_path / schedule[-3:], *settings, schedule))
            for name, gradient in rank.gradients.items()
        }
        for schedule in schedules
    )
    assert usual.keys() == split.keys()
    assert max(float((split[name] - usual[name]).norm() / usual[name].norm()) for name in usual) < 1e-6


def trace_peak(settings: tuple[str, ...], rank: int) -> LiveMemory:
    """Return the fullest moment of a rank's traced step."""
    run = compose_test_run(["model=debug", "dataset=synthetic", "compile=off", *settings])
    return run_ranks(_trace_peak, 1, run, rank, joined=False)[0]  # type: ignore[no-any-return]


def _trace_peak(_: int, __: int, run: Any, rank: int) -> LiveMemory:
    return find_peak(trace_rank(run, rank, "cpu").events)


@pytest.mark.full
@pytest.mark.parametrize("schedule", [pytest.param("Interleaved1F1B", id="interleaved"), full("ZBVZeroBubble", id="v")])
def test_whole_gradients_need_half_the_bytes(schedule: str) -> None:
    settings = (*PIPELINED, f"parallelism.schedule={schedule}", "training.global_batch=8192", "memory=full")
    usual, halved = (trace_peak((*settings, *more), 0).parts for more in ((), (ACCUMULATED,)))
    assert halved["gradients"] == pytest.approx(usual["gradients"] / 2, rel=0.02)
    assert {k: v for k, v in halved.items() if k != "gradients"} == {k: v for k, v in usual.items() if k != "gradients"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(("parallelism=fsdp", *WHOLE, "precision=fp32"), "computed in precision.compute=fp32", id="fp32"),
        pytest.param(("parallelism=ddp", "precision=bf16"), "no weights are sharded; give parallelism=fsdp", id="ddp"),
        pytest.param(("parallelism.replicate=2", "parallelism.tensor=2", "precision=bf16"), "no weights are", id="tp"),
        pytest.param(("parallelism=pp", "precision=bf16"), "no weights are sharded; give parallelism=fsdp", id="pp"),
        pytest.param(("parallelism=fsdp", "precision=bf16"), "give parallelism.accumulate=whole", id="sharded"),
        pytest.param((*WHOLE, "parallelism=fsdp", "parallelism.microbatches=1"), "one micro-batch", id="one"),
        pytest.param(
            ("parallelism=fsdp", *WHOLE, "parallelism.microbatches=256", "training.global_batch=131072"),
            "a sum of 256 micro-batches",
            id="many",
        ),
    ],
)
def test_where_it_cannot_work_it_is_rejected(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"precision\.accumulate=bf16: .*{message}.*, or precision\.accumulate=fp32"):
        compose_test_run(["model=debug", "dataset=synthetic", *settings, ACCUMULATED])
