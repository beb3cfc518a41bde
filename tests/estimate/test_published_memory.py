"""The table of published layouts' memory in docs/memory.md is that of the code."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.measure.published_memory import PublishedLayout, format_table, list_layouts, measure_layout
from tests.support.tiers import select_cases

TEXT = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
LAYOUTS = [layout for layout in list_layouts() if f"| {layout.name} | " in TEXT]
QUICK = "405B-on-576-bf16-tensor-8-pipeline-9-context-2-63-stages"


@pytest.mark.parametrize("layout", select_cases([pytest.param(layout, id=layout.id) for layout in LAYOUTS], [QUICK]))
def test_the_documented_line_is_that_of_the_code(layout: PublishedLayout) -> None:
    assert TEXT.count(list(format_table([measure_layout(layout)]))[-1] + "\n") == 1


def test_a_layout_of_each_model_and_number_of_gpus_is_documented() -> None:
    sizes = [{name.partition(",")[0] for name in (x.name for x in layouts)} for layouts in (LAYOUTS, list_layouts())]
    assert sizes[0] == sizes[1]
    heading = "\n".join(islice(format_table([]), 2))
    table = TEXT.partition(heading)[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[1:]] == [x.name for x in LAYOUTS]
