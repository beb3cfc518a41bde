"""The memory estimate of models with experts, and with blocks of two kinds, against traces of real steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.estimate.test_memory import CLOSE, both
from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.tiers import list_further, select_cases
from tests.support.two_kinds import with_two_kinds
from titan.estimate.traced.memory import find_peak
from titan.run.run import Run
from titan.training.trace.rank import build_rank_trace

SHAPES = {
    "tokens": "model.vocab=512 training.seq_len=512 training.global_batch=8192",
    "experts": "model.vocab=512 model.dim=512 model.expert_ffn=512 model.experts=32 model.top_k=4 "
    "training.seq_len=512 training.global_batch=2048",
    "wide": "model.vocab=512 model.dim=512 model.expert_ffn=2048 training.seq_len=512 training.global_batch=8192",
}
"""Models and batches whose peak is in the activations of experts, their weights and gradients, or both."""


def run(shape: str, *more: str, model: str = "qwen3_moe_debug") -> Run:
    """A composed run on any number of ranks."""
    common = (f"model={model}", "checkpoint=off", "dataset=synthetic", "compile=off", "cluster.memory_gib=1e6")
    chosen = ("model.top_k=1",) if model == "llama4_debug" else ()
    return compose_test_run([*common, "precision=bf16", *SHAPES[shape].split(), *chosen, *more])


FAMILIES = ("deepseek_v3_debug", "llama4_debug")
CASES_OF_ALL = [
    ("tokens", "memory=none"),
    ("tokens", "precision=fp32"),
    ("tokens", "memory=selective"),
    ("tokens", "parallelism=tp"),
    ("tokens", "parallelism=tp parallelism.sequence_parallel=false"),
    ("tokens", "parallelism=cp"),
    ("tokens", "parallelism=pp parallelism.microbatches=8 memory=full"),
    ("tokens", "parallelism=fsdp parallelism.expert=2 memory=selective"),
    ("experts", "parallelism=fsdp_tp memory=full"),
    ("experts", "parallelism=fsdp parallelism.expert=2 memory=full"),
]
CASES = [
    *CASES_OF_ALL,
    ("tokens", "memory=full parallelism.microbatches=4"),
    ("tokens", "parallelism=hsdp memory=selective"),
    ("experts", "memory=none"),
    ("experts", "parallelism=fsdp memory=full parallelism.microbatches=2"),
    ("wide", "parallelism=fsdp"),
    ("experts", "parallelism=fsdp parallelism.expert=4 cluster.devices=4 memory=full"),
    ("experts", "parallelism=fsdp parallelism.expert=2 cluster.devices=4"),
    ("tokens", "parallelism=fsdp_tp parallelism.expert=4 memory=full"),
    ("tokens", "parallelism=hsdp parallelism.expert=2"),
    ("tokens", "parallelism=tp parallelism.expert=2"),
]
FAMILY_CASES = [
    *CASES_OF_ALL,
    ("tokens", "memory=full"),
    ("tokens", "parallelism=fsdp dataset.mask_documents=true"),
    ("experts", "parallelism=fsdp memory=full"),
]


def named(*case: str) -> Any:
    """A case with an id."""
    return pytest.param(*case, id="-".join(case).replace(" ", "-"))


def check_estimate(one: Run, device: str = "cpu") -> None:
    estimated, found = both(one, 0, device)
    assert estimated == pytest.approx(found.bytes, rel=CLOSE)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "more"), select_cases([named(*case) for case in CASES], ("tokens-parallelism=tp",)))
def test_experts(shape: str, more: str) -> None:
    check_estimate(run(shape, *more.split()))


BY_FAMILY = [named(model, shape, more) for model in FAMILIES for shape, more in FAMILY_CASES]


@pytest.mark.full
@pytest.mark.parametrize(("model", "shape", "more"), list_further(lambda: BY_FAMILY))
def test_latent_attention_chunks_and_shared_experts(model: str, shape: str, more: str) -> None:
    check_estimate(run(shape, *more.split(), model=model))


@pytest.mark.full
@pytest.mark.parametrize("model", FAMILIES)
def test_norms_as_gpus_compute_them(model: str) -> None:
    check_estimate(run("tokens", model=model), "cuda")


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "dense", "more"),
    [
        pytest.param("tokens", 1, "memory=none", id="saved"),
        pytest.param("experts", 1, "parallelism=fsdp memory=full", id="gathered"),
        pytest.param("experts", 3, "parallelism=fsdp", id="gathered-once"),
        pytest.param("tokens", 2, "memory=every_n", id="every-second"),
    ],
)
def test_blocks_of_two_kinds(shape: str, dense: int, more: str) -> None:
    check_estimate(with_two_kinds(run(shape, *more.split()), dense))


@pytest.mark.full
def test_a_trace_has_dense_masks_where_a_gpu_has_blocks() -> None:
    common = ("model=llama4_debug", "dataset=synthetic", "checkpoint=off", "cluster=h100", "cluster.devices=1")
    one = compose_test_run([*common, "parallelism=single"], remote=True)
    assert one.training.attention == "flex"
    assert run_ranks(_traces, 1, one, joined=False, timeout=300) == [True]


def _traces(_: int, __: int, one: Run) -> bool:
    return find_peak(build_rank_trace(one, 0).events).bytes > 0
