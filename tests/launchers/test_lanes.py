"""A grid's limit of running jobs, as dependencies of later jobs on earlier ones."""

from __future__ import annotations

import pytest

from launchers.slurm.state import Lanes
from titan.sweep.ledger import State, TrialState


def point(jobs: str, lane: int | None, state: State = "running") -> TrialState:
    return TrialState(jobs, "", (), state, jobs=tuple(jobs.split()), lane=lane)


@pytest.mark.parametrize(
    ("count", "there", "expected"),
    [
        pytest.param(2, [], [None, None, "x0", "x1", "x0:x2"], id="nothing-before"),
        pytest.param(2, [point("1", 0)], [None, "1", "x0", "1:x1", "x0:x2"], id="one-lane-is-free"),
        pytest.param(2, [point("1 2", 1)], [None, "x0", "x0:x1", "1:2"], id="a-chain"),
        pytest.param(1, [point("1", 0), point("2", 3)], ["1:2", "1:2:x0"], id="fewer-lanes-than-before"),
        pytest.param(2, [point("7_0", None), point("7_1", None)], ["7", "7", "7:x0"], id="an-array-is-before-all"),
        pytest.param(1, [point("1", 0, "failed"), point("", None, "planned")], [None, "x0"], id="ended"),
    ],
)
def test_what_comes_after_what(count: int, there: list[TrialState], expected: list[str | None]) -> None:
    lanes, found = Lanes(count, there), []
    for number in range(len(expected)):
        lane, after = lanes.take_lane()
        lanes.add_jobs(lane, [f"x{number}"])
        found.append(after)
    assert found == expected
