"""What is added to a run's live tensors: the page on memory states the figures that estimates use."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.cluster import heap
from titan.estimate import overhead

PAGE = " ".join((Path(__file__).parents[2] / "docs/memory.md").read_text().split())


@pytest.mark.parametrize(
    "phrase",
    [
        pytest.param(f"On a CPU titan adds {overhead.PROCESS_GIB:g} GiB per rank", id="process"),
        pytest.param(f"{100 * overhead.FRAGMENTATION:g}% of the live tensors", id="heap"),
        pytest.param(f"{overhead.EXPERT_FRAGMENTATION:g} times the activations", id="experts"),
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
