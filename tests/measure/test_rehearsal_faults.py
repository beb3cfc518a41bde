"""The planted faults of CUDA branches: where they stand, and that each names a command which could find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measure import rehearsal_faults as faults
from tests.rehearsal import build, rehearse, watch
from tests.support import planted


def test_every_fault_has_its_place() -> None:
    lost = []
    for found in faults.FAULTS:
        try:
            planted.find_file(found.fault, watch.ROOT)
        except LookupError as error:
            lost.append(f"{found.fault.name}: {error}")
    assert lost == []
    assert {found.command for found in faults.FAULTS} <= {rehearsed.name for rehearsed in rehearse.TABLE}
    assert len({found.fault.name for found in faults.FAULTS}) == len(faults.FAULTS) >= 12


@pytest.mark.full
def test_a_planted_fault_is_found(tmp_path: Path) -> None:
    if why := build.find_obstacle():
        pytest.skip(why)
    build.build_extension()
    (found,) = (found for found in faults.FAULTS if found.fault.name == "item() in a step")
    (tmp_path / "x").mkdir()
    root = planted.copy_repository(tmp_path / "x" / "copy")
    known: rehearse.References = {"dense": _done(dict.fromkeys(range(1, 7), 5.0))}
    outcome = faults.judge_fault(found, root, known)
    assert outcome.caught and "host waits within steps" in outcome.text, outcome.format_row()


def _done(losses: dict[int, float]) -> rehearse.Future[dict[int, float]]:
    future: rehearse.Future[dict[int, float]] = rehearse.Future()
    future.set_result(losses)
    return future
