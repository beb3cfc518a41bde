"""The table of published layouts' memory in docs/memory.md is that of the code."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.support.published_memory import (
    GOAL_GIB,
    PublishedLayout,
    count_norm_inputs,
    format_missing,
    format_table,
    list_layouts,
    measure_layout,
)
from tests.support.tiers import select_cases

TEXT = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
LAYOUTS = list_layouts()
QUICK = "405B-on-576-bf16-tensor-8-pipeline-9-context-2-63-stages"


@pytest.mark.parametrize("layout", select_cases([pytest.param(layout, id=layout.id) for layout in LAYOUTS], [QUICK]))
def test_the_documented_lines_are_those_of_the_code(layout: PublishedLayout) -> None:
    memories = [measure_layout(layout)]
    for lines in (format_table(memories), format_missing(memories)):
        assert TEXT.count("\n".join(lines).split("\n")[-1] + "\n") == 1


def test_all_layouts_are_documented() -> None:
    for lines in (format_table([]), format_missing([])):
        heading = "\n".join(islice(lines, 2))
        table = TEXT.partition(heading)[2].partition("\n\n")[0]
        assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[1:]] == [x.name for x in LAYOUTS]


def test_the_goal_and_the_norms_of_405b() -> None:
    """Two norms of a block keep 2 x 16.8 MB each of 4,096 tokens on one of 8 tensor ranks: 71 stages of two blocks."""
    (layout,) = (layout for layout in LAYOUTS if layout.id == QUICK)
    assert count_norm_inputs(layout.change("gate")) == 71 * 2 * 2 * 4096 / 8 * 16384 * 2
    assert f"goal of {GOAL_GIB} GiB" in TEXT
