"""The rehearsal's device, by itself (`checks.py`), and single and sharded runs of titan on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rehearsal import build, rehearse, table, watch
from tests.support import tiers
from tests.support.processes import LIMIT

NAMES = re.findall(r"@check\ndef (\w+)", (Path(__file__).parent / "checks.py").read_text())
pytestmark = pytest.mark.full
REST = ("single", "fsdp")
"""The runs of the rest tier."""


@pytest.fixture(scope="module")
def device() -> None:
    """Build the device, once for all sessions of this machine."""
    if why := build.missing():
        pytest.skip(why)
    build.built()


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


@pytest.fixture(scope="module")
def rehearsal(device: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearse.Rehearsal]:
    """The servers, which end with the tests."""
    with rehearse.Rehearsal(tmp_path_factory.mktemp("rehearsal")) as rehearsal:
        yield rehearsal


@pytest.mark.parametrize("name", tiers.table([r.name for r in table.TABLE], quick=(), rest=REST, one_in=10**6))
def test_titan_trains_on_the_device(name: str, rehearsal: rehearse.Rehearsal) -> None:
    for rehearsed in rehearse.chosen([name]):
        if rehearsed.name == name or not (rehearsal.runs / rehearsed.folder).exists():
            result = rehearsal.run(rehearsed)
            assert result.problems == []
    assert sum(result.operations.values()) > 100 or rehearsed.code
