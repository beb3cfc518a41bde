"""Traces of a rank's real step: composed from a few blocks and whole; their time; that nothing is left behind."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.tiers import select_cases
from titan.errors import ConfigError
from titan.estimate.operations import Speeds
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.traced.replay import RankResult, build_rank_result
from titan.run.run import Run
from titan.training.trace.rank import build_rank_trace, trace_run

MODEL = [
    "model=debug", "model.dim=512", "model.heads=8", "model.ffn=1536", "model.vocab=512", "training.seq_len=512",
    "dataset=synthetic", "checkpoint=off", "precision=bf16", "cluster=h100", "compile=off", "cluster.memory_gib=1e6",
]  # fmt: skip
LAYOUTS = {
    "fsdp": "parallelism=fsdp model.layers=9 training.global_batch=8192 memory=full",
    "fsdp-accumulating": "parallelism=fsdp model.layers=8 training.global_batch=24576 parallelism.microbatches=6",
    "hsdp-every-second-block": "parallelism=hsdp cluster.devices=4 model.layers=13 training.global_batch=8192 "
    "memory=every_n parallelism.microbatches=2",
    "ddp": "parallelism=ddp model.layers=9 training.global_batch=8192",
    "tp-selective": "parallelism=tp cluster.devices=2 model.layers=9 training.global_batch=8192 memory=selective",
    "cp-ring": "parallelism=cp parallelism.context_method=ring model.layers=9 training.global_batch=8192",
    "1f1b": "parallelism=pp parallelism.pipeline=2 cluster.devices=2 "
    "model.layers=17 training.global_batch=8192 parallelism.microbatches=4",
    "interleaved": "parallelism=3d model.layers=27 training.global_batch=8192 parallelism.schedule=Interleaved1F1B",
    "experts-ahead": "model=qwen3_moe_debug model.layers=10 model.dim=128 model.expert_ffn=64 parallelism=ep "
    "cluster.devices=4 parallelism.expert=2 training.global_batch=8192 memory=full",
    "zbv": "parallelism=pp parallelism.pipeline=2 cluster.devices=2 parallelism.schedule=ZBVZeroBubble "
    "model.layers=26 training.global_batch=8192",
}


def run(layout: str, *more: str) -> Run:
    """A composed run on H100s."""
    return compose_test_run([*MODEL, *LAYOUTS[layout].split(), *more], remote=True)


def speeds(one: Run) -> Speeds:
    return derive_device_speeds(one, resolve_hardware(one.cluster, one.machine), one.machine, one.layout)


def results(one: Run, rank: int, *whole: bool) -> list[RankResult]:
    """The result of a rank, each in a process of its own."""
    return [run_ranks(_result, 1, one, rank, each, joined=False, timeout=300)[0] for each in whole]


def _result(_: int, __: int, one: Run, rank: int, whole: bool) -> RankResult:
    return build_rank_result(one, one.layout, speeds(one), build_rank_trace(one, rank, full=whole), "cuda")


@pytest.mark.parametrize("layout", select_cases(LAYOUTS, ("fsdp",)))
def test_a_composed_trace_equals_the_whole_one(layout: str) -> None:
    one = run(layout)
    last = one.layout.devices - one.layout.devices // one.layout.pipeline
    short, whole = results(one, last, False, True)
    assert short.live.bytes == pytest.approx(whole.live.bytes, rel=0.01)
    assert short.gib == pytest.approx(whole.gib, rel=0.01)
    assert sum(short.time.parts.values()) == pytest.approx(sum(whole.time.parts.values()), rel=0.01)
    assert short.time.actions == pytest.approx(whole.time.actions, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "moved"),
    [
        pytest.param(["cluster.hardware.link_gb_per_second=5"], "weights and gradients", id="slower-links"),
        pytest.param(["memory=none"], "recomputation", id="nothing-recomputed"),
        pytest.param(["cluster.hardware.memory_gb_per_second=1000"], "memory-bound", id="slower-memory"),
    ],
)
def test_a_change_moves_its_own_part_of_the_time(more: list[str], moved: str) -> None:
    (before,), (after,) = (results(run("fsdp", *extra), 0, False) for extra in ([], more))
    ratio = {cause: after.time.parts[cause] / before.time.parts[cause] for cause in ("matmuls", "attention", moved)}
    assert ratio["matmuls"] == ratio["attention"] == pytest.approx(1.0)
    assert abs(ratio[moved] - 1) > 0.3


@pytest.mark.full
def test_a_pipeline_is_traced_on_one_rank_of_each_stage() -> None:
    one = run("1f1b")
    found = trace_run(one, speeds(one))
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.step.spans
    parts = Counter(found.step.parts)
    assert parts["pipeline idle"] > 0
    assert found.step.seconds == pytest.approx(parts.total())
    assert not dist.is_initialized()
    assert _fsdp_collectives._get_device_handle.__module__ == "torch.distributed.device_mesh"


@pytest.mark.full
def test_code_that_needs_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        sum(p.grad.sum().item() for group in optimizer.param_groups for p in group["params"])

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    one = run("fsdp")
    with pytest.raises(ConfigError, match=r"plan\.trace=true: .*test_trace\.py:\d+ needs the value of a tensor"):
        trace_run(one, speeds(one))
