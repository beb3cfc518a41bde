"""A campaign whose pairs are jobs of a real Slurm."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.test_grids import LAUNCH, points, titan
from tests.support.processes import run_program, wait_for_end, wait_until
from tests.support.runs import TINY
from tests.support.slurm_cluster import Slurm

OPEN = ["open", *TINY, *LAUNCH, "evaluation.tokens=64", "pairs=4"]
BETTER = ["try", "optimizer.lr=0.01", "batch=4", "hypothesis=three steps want a higher rate"]


def ask(folder: Path, *words: str) -> dict[str, Any]:
    """The answer to a request."""
    code, out, err = titan(folder, "study", *words, module="titan.campaign")
    assert code == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.mark.full
def test_pairs_are_jobs_and_a_killed_request_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """The first try is killed while its jobs run; the same words then read their results and submit the rest."""
    before = slurm.read_jobs().keys()
    assert ask(tmp_path, *OPEN)["baseline"] == 0
    with run_program("-m", "titan.campaign", f"{tmp_path}/runs/study", *BETTER, env=slurm.env) as process:
        wait_until(lambda: len(slurm.read_jobs().keys() - before) == 8, "the jobs of four pairs", 120.0)
        process.send_signal(signal.SIGKILL)
        wait_for_end(process)
    answer = ask(tmp_path, *BETTER)
    assert answer["screen"]["pairs"] == 4 and len(set(answer["seeds"])) == len(answer["seeds"])
    jobs = slurm.read_jobs().keys() - before
    found = points(tmp_path, f"study/ideas/{answer['idea']}")
    assert len(jobs) == 2 * len(answer["seeds"]) == len(found), "no run was submitted twice"
    assert {point.state for point in found.values()} == {"finished"}
    assert {slurm.read_jobs()[job] for job in jobs} == {"COMPLETED"}
    assert ask(tmp_path, *BETTER)["from_book"] is (answer["state"] not in ("screening", "confirming"))
    assert slurm.read_jobs().keys() - before == jobs
    other = ["optimizer.weight_decay=0.3"]
    ask(tmp_path, "result", *other, "seed=900", "baseline_loss=3.0", "loss=2.9")
    assert ask(tmp_path, "withdraw", *other, "reason=not meant")["state"] == "withdrawn"
