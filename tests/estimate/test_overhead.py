"""What is added to a run's live tensors: the page on memory states the figures that estimates use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.composing import compose_test_run
from tests.support.measured_memory import CASES, list_words
from titan.cluster import heap
from titan.estimate import fit, overhead
from titan.estimate.deep_ep_buffers import count_entries
from titan.estimate.memory import Usage
from titan.parallelism.schema import Layout

PAGE = " ".join((Path(__file__).parents[2] / "docs/memory.md").read_text().split())


@pytest.mark.parametrize(
    "phrase",
    [
        pytest.param(f"On a CPU titan adds {overhead.PROCESS_GIB:g} GiB per rank", id="process"),
        pytest.param(f"{100 * overhead.FRAGMENTATION:g}% of the live tensors", id="heap"),
        pytest.param(f"{overhead.EXPERT_FRAGMENTATION:g} times a block's activations", id="experts"),
        pytest.param(f"{overhead.EXPERT_KERNELS_GIB:g} GiB for kernels in bf16", id="expert-kernels"),
        pytest.param(
            f"On a GPU it adds {overhead.CONTEXT_GIB:g} GiB and {100 * overhead.FRAGMENTS:g}%", id="allocator"
        ),
        pytest.param(
            f"from {heap.LARGE // 2**20} MiB on, or from {heap.LARGE_GATHERED // 2**20} MiB on where FSDP", id="large"
        ),
        pytest.param(f"the rank is {100 * (heap.GROWTH - 1):.0f}% larger", id="growth"),
    ],
)
def test_the_page_on_memory_states_the_figures_of_the_code(phrase: str) -> None:
    assert phrase in PAGE


MEASURED = {  # MiB of the largest rank, by `python -m tests.support.measured_memory`
    "qwen3_moe": 2729, "qwen3_moe fp32": 2173, "qwen3_moe fp32 full": 1576, "qwen3_moe fsdp": 1741,
    "qwen3_moe fp32 ep": 1163, "qwen3_moe ep": 1757, "qwen3_moe ep of 4": 1441, "deepseek_v3 fp32 fsdp": 1220,
    "deepseek_v3 ep": 1760, "qwen3_moe_debug": 1492, "deepseek_v3 fp32 selective": 1851,
}  # fmt: skip
"""In bf16 after 40 steps, in fp32 after 4."""


@pytest.mark.full
@pytest.mark.parametrize("name", MEASURED)
def test_the_memory_of_experts_on_a_cpu_is_about_what_was_measured(name: str) -> None:
    precision = () if any(word.startswith("precision=") for word in CASES[name]) else ("precision=bf16",)
    run = compose_test_run([*list_words(CASES[name]), *precision])
    stated = fit.estimate_memory(run, run.layout, run.microbatches, "cpu").bytes / 2**20
    assert 0.95 <= stated / MEASURED[name] <= 1.22


@pytest.mark.parametrize(
    ("ranks", "top_k", "entries"),
    [
        pytest.param(4, 8, 4, id="a-rank-for-each-expert"),
        pytest.param(8, 2, 8, id="one-node"),
        pytest.param(64, 8, 80, id="eight-nodes"),
        pytest.param(16, 2, 19, id="two-nodes"),
    ],
)
def test_buffers_of_deep_ep_have_room_for_all_ranks_tokens(ranks: int, top_k: int, entries: int) -> None:
    assert count_entries(ranks, 8, top_k) == entries


@pytest.mark.full
def test_a_plan_counts_the_buffers_of_deep_ep() -> None:
    layout = Layout(shard=64, expert=64)
    words = ["model=deepseek_v3_debug", "training.seq_len=4096", "training.global_batch=262144", "cluster=cpu"]
    recipe = compose_test_run(words)
    exchanged, sent = (
        overhead.add_overhead(
            replace(recipe, parallelism=replace(recipe.parallelism, dispatcher=name)), layout, 1, Usage("peak"), "cuda"
        ).parts["communication"]
        for name in ("alltoall", "deepep")
    )
    model = recipe.model
    entry = 2 * model.dim + 12 * model.top_k  # type: ignore[attr-defined]
    assert exchanged == 0 and sent == count_entries(64, 8, model.top_k) * 4096 * 32 * -(-entry // 32)
