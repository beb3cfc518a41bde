"""The rehearsal's device, by itself (`checks.py`), and single and sharded runs of titan on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal import build, rehearse, table, watch
from tests.support.processes import LIMIT

NAMES = re.findall(r"@check\ndef (\w+)", (Path(__file__).parent / "checks.py").read_text())
pytestmark = pytest.mark.full  # with a build of a minute where it is the first
REST = ("single", "fsdp")
"""The runs of the rest tier."""


@pytest.fixture(scope="module")
def device() -> None:
    """Build the device, once for all sessions of this machine."""
    if why := build.find_obstacle():
        pytest.skip(why)
    build.build_extension()


@pytest.fixture(scope="module")
def errors(device: None) -> dict[str, str]:
    """The errors of all checks, by their names."""
    env = {**os.environ, "PYTHONPATH": str(watch.ROOT), "REHEARSAL_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.checks"],
        cwd=watch.ROOT, env=env, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_device(name: str, errors: dict[str, str]) -> None:
    assert errors[name] == ""


def test_titan_trains_on_the_device(device: None, tmp_path: Path) -> None:
    with rehearse.Rehearsal(tmp_path) as rehearsal:
        results = list(rehearse.rehearse_commands(rehearsal, [r for r in table.TABLE if r.name in REST]))
    assert [result.problems for result in results] == [[], []]
    assert all(result.difference is not None and result.operations["copy to the device"] for result in results)
    assert results[1].operations["nccl all_gather_base"] and not results[0].operations["nccl all_gather_base"]
    assert results[1].lines["titan/checkpoint/state.py"] and len(rehearse.format_row(results[0]).split("|")) == 9


@pytest.mark.parametrize("how", [pytest.param("wait", id="a-wait"), pytest.param("race", id="a-race")])
def test_what_does_not_hold_is_reported(how: str) -> None:
    result = rehearse.CommandResult(table.TABLE[0], 0, 1.0)
    rehearse._add_report(result, REPORT | ({"waits": {"titan/x.py f: item": 2}} if how == "wait" else {"races": ["r"]}))
    rehearse._judge_result(result, Path("/nonexistent"))
    assert len(result.problems) == 1 + len(result.rehearsed.leaves) + bool(result.rehearsed.says)


REPORT = {"waits": {}, "races": [], "operations": {}, "devices": [0], "lines": {}}
