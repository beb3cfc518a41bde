"""Law 4: what one mix of parallelisms saved, any other resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_manager import in_two_attempts
from tests.support.checkpoint_layouts import EXACT, KINDS, LAYOUTS, LayoutTable
from tests.support.matrix import MODEL, TrainedLayout
from tests.support.runs import compose_tiny_run, compute_difference, select_weights, train_run
from tests.support.tiers import list_further

MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9", "training.steps=6", *MODEL)
MOVES = [
    pytest.param("3d", "single", True, id="3d-single-tied"),
    pytest.param("ZBV", "pp of 4", True, id="ZBV-pp4-tied"),
    pytest.param("fsdp cp", "tp", False, id="fsdp_cp-tp"),
]
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


@pytest.mark.full
@pytest.mark.parametrize(("before", "after", "tied"), MOVES)
def test_any_layout_resumes_what_another_saved(before: str, after: str, tied: bool, tmp_path: Path) -> None:
    settings = (*MOMENTUM, *(["model.tied=true"] if tied else []))
    one = compose_tiny_run(tmp_path / "one", *settings)
    expected = TrainedLayout(one, train_run(one), 0).merge_tensors("last")
    runs = [compose_tiny_run(tmp_path / "parts", *settings, *LAYOUTS[layout]) for layout in (before, after)]
    first, second = (TrainedLayout(run, seen, 0) for run, seen in zip(runs, in_two_attempts(*runs), strict=True))
    saved, loaded = first.merge_tensors("last"), second.merge_tensors("first")
    assert saved.keys() == loaded.keys() == expected.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert compute_difference(select_weights(second.merge_tensors("last")), select_weights(expected)) <= 1e-5
