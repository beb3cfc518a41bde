"""A Mac, rehearsed on Linux: what macOS lacks is taken away from real programs (tests/support/mac_site)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import hangs
from tests.support.processes import ROOT, is_alive, list_descendants, run_program, wait_for_end, wait_until
from tests.support.runs import LAYOUTS, TINY
from titan.metrics.reader import read_records

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="takes from Linux what a Mac lacks"),
]  # fmt: skip
PATHS = os.pathsep.join((f"{ROOT}/tests/support/mac_site", str(ROOT)))


@contextmanager
def run_on_mac(*arguments: str, **variables: str) -> Iterator[Any]:
    """Python in a process without what a Mac lacks, and those that it starts."""
    with run_program(*arguments, env={"PYTHONPATH": PATHS, **variables}) as process:
        yield process


def run_to_end(*arguments: str, **variables: str) -> tuple[str, str]:
    """Output and errors of a program on a Mac that ends with exit code 0."""
    with run_on_mac(*arguments, **variables) as process:
        code, out, err = wait_for_end(process)
    assert code == 0, out + err
    return out, err


def read_losses(run: Path) -> list[tuple[int, float]]:
    """The losses of steps, of attempts too that were killed in between."""
    return sorted({(line["step"], line["loss"]) for line in read_records(run / "metrics.jsonl") if "loss" in line})


def test_what_is_taken_away() -> None:
    code = "import os, titan.files.platform as p; print(os.path.exists('/proc/self'), p.find_c_function('prctl'), "
    code += "hasattr(os, 'pidfd_open'), hasattr(os, 'sched_getaffinity'), p.START_METHOD, p.STACKS_SIGNAL.name)"
    assert run_to_end("-c", code)[0].split() == ["False", "None", "False", "False", "spawn", "SIGURG"]


def test_the_default_job_from_the_text_on(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    out, _ = run_to_end("-m", "titan.train", "training.steps=2", f"hydra.run.dir={run}", TITAN_CACHE=cache)
    assert "Done after step 2 of 2." in out
    assert [step for step, _ in read_losses(run)] == [1, 2]
    assert not list((tmp_path / "cache").rglob("*.claim"))


def test_two_ranks_are_killed_with_their_parent_and_go_on(tmp_path: Path) -> None:
    tiny = [setting for setting in TINY if not setting.startswith("training.steps")]
    settings = [*tiny, *LAYOUTS["fsdp2"], "training.steps=100", "checkpoint.every=10", "metrics.sample_tokens=0"]
    run, alone = tmp_path / "run", tmp_path / "alone"
    with run_on_mac("-m", "titan.train", *settings, f"hydra.run.dir={run}") as process:
        wait_until(lambda: (run / "checkpoints/step-10/manifest.json").exists() or process.poll() is not None, "a save")
        ranks = list_descendants(process.pid)
        assert len(ranks) >= 2
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks)), "ranks to end with their parent")
    assert max(step for step, _ in read_losses(run)) < 100
    out, _ = run_to_end("-m", "titan.train", *settings, f"hydra.run.dir={run}")
    assert "Done after step 100 of 100." in out
    run_to_end("-m", "titan.train", *settings, f"hydra.run.dir={alone}")
    assert read_losses(run) == read_losses(alone)


def test_a_grid(tmp_path: Path) -> None:
    out, _ = run_to_end("-m", "titan.train", "-m", *TINY, "training.seed=0,1", f"hydra.sweep.dir={tmp_path / 'grid'}")
    assert "finished: 2 of 2 trials" in out


def test_a_stopped_rank_is_named_with_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "run_program", lambda *a, env: run_on_mac(*a, **env))
    result = hangs.run_hang(hangs.HangCase("stop", "tp", "off", 1), tmp_path / "run")
    assert (result.names_only(1), result.code) == (True, 1)
    assert "Thread" in (tmp_path / "run/debug/stacks/rank-1.txt").read_text()


def test_a_proof_starts_ranks_that_are_not_forked(tmp_path: Path) -> None:
    run = partial(run_to_end, XDG_STATE_HOME=str(tmp_path))
    _, err = run("-m", "titan.prove", *TINY, *LAYOUTS["fsdp2"])
    assert "collectives: traced" in err
