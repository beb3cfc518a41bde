"""What is added to a run's live tensors: the page on memory states the figures that estimates use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measure.measured_memory import CASES, list_words
from tests.support.composing import compose_test_run
from titan.cluster import heap
from titan.estimate import fit, overhead

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


MEASURED = {  # MiB of the largest rank, by `python -m tests.measure.measured_memory`
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
