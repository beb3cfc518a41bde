"""Nodes that make jobs fail: the state of a trial names them, and later submissions are without them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launchers.slurm.script import build_script
from launchers.slurm.sweep import SlurmSweep
from launchers.trials import Trial
from tests.support.composing import compose_test_run
from titan.cluster import rank_error
from titan.cluster.rank_error import RankError
from titan.sweep import job_exit
from titan.sweep.ledger import SLURM, SweepSpec
from titan.sweep.schema import SlurmLaunch


def ended(folder: Path, attempt: str, error: RankError | None = None, code: int = 1, srun: str = "") -> None:
    """Write what an attempt of a job leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    if error is not None:
        rank_error.write(folder / attempt / "0" / f"{error.rank}.error", error)
    (folder / f"{attempt}.out").write_text(srun)
    (folder / f"{attempt}.end").write_text(json.dumps({"code": code, "again": False, "state": "RUNNING"}))


def fails(node: str, **more: int | bool) -> RankError:
    return RankError(rank=3, text="CUDA error", node=node, **more)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two failures of gpu1 and of gpu2, one of which srun reports; others that say nothing of a node."""
    folder = tmp_path / SLURM
    ended(folder, "7_0.0", fails("gpu1"))
    ended(folder, "7_0.1", fails("gpu1"))
    ended(folder, "7_1.0", fails("gpu2"))
    ended(folder, "8.0", fails("gpu4", lost=True), srun="srun: error: gpu2: task 3: Killed\n")
    ended(folder, "9.0", fails("gpu3"))
    ended(folder, "9.1", fails("gpu3", code=2), code=2)
    ended(folder, "9.2", fails("gpu3"), code=130)
    return folder


def test_the_reason_of_a_failure_names_the_node(folder: Path) -> None:
    assert job_exit.find_error(folder, "7_0.0") == "rank 3 on gpu1: CUDA error"


@pytest.mark.parametrize(("times", "bad"), [(1, ["gpu1", "gpu2", "gpu3"]), (2, ["gpu1", "gpu2"]), (3, [])])
def test_nodes_that_failed_so_many_times_are_bad(times: int, bad: list[str], folder: Path) -> None:
    assert job_exit.find_bad_nodes(folder, times) == bad


def test_nodes_that_differ_are_counted_one_by_one(folder: Path) -> None:
    ended(folder, "7_2.0", fails("gpu3,gpu4"))
    assert job_exit.find_bad_nodes(folder, 2) == ["gpu1", "gpu2", "gpu3"]


@pytest.mark.parametrize(
    ("settings", "excluded"),
    [
        pytest.param(["cluster.exclude_bad=2", "cluster.exclude=old"], "old,gpu1,gpu2", id="asked-for"),
        pytest.param(["cluster.exclude=old"], "old", id="not-asked-for"),
        pytest.param(["cluster.exclude_bad=3"], None, id="none-is-bad"),
    ],
)
def test_bad_nodes_are_excluded_from_what_is_submitted(
    settings: list[str], excluded: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial("a", (), compose_test_run(["name=x", "cluster=cpu", *settings], remote=True))
    sweep = SlurmSweep(folder.parent, [trial], SlurmLaunch(), SweepSpec())
    script = build_script(sweep.shapes["a"], sweep._build_submission([trial], "titan-1", folder / "t.json", None))
    found = re.search("^#SBATCH --exclude=(.*)$", script, flags=re.M)
    assert (found and found[1]) == excluded
    assert ("without gpu1, gpu2" in capsys.readouterr().out) == ("gpu1" in (excluded or ""))
