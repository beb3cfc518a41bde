"""Law 4: what one mix of parallelisms saved, any other resumes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.measure.checkpoint_layouts import EXACT, KINDS, LAYOUTS, LayoutTable
from tests.support.tiers import list_further

CELLS = [pytest.param(kind, loads, list(LAYOUTS), id=f"{kind} {loads} of all") for kind in KINDS for loads in LAYOUTS]


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LayoutTable]:
    """The checkpoints of each kind, saved once."""
    tables = {kind: LayoutTable(tmp_path_factory.mktemp("layouts"), kind) for kind in KINDS}
    return tables.__getitem__


@pytest.mark.full
@pytest.mark.parametrize(("kind", "loads", "rows"), list_further(lambda: CELLS))
def test_a_layout_loads_to_the_bit_what_others_saved_and_goes_on_like_one_device(
    kind: str, loads: str, rows: list[str], table: Callable[[str], LayoutTable]
) -> None:
    cells = table(kind).compute_column(loads, rows)
    assert list(cells) == rows
    assert [row for row, cell in cells.items() if not cell.exact] == []
    assert {row: cell for row, cell in cells.items() if not cell.worst <= EXACT} == {}
