"""The parent of ranks: what it says of their errors, how it hands on signals, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from launchers import supervisor
from launchers.supervisor import run_ranks
from tests.support.processes import is_alive, run_program, wait_for_end, wait_until
from tests.support.tiers import full
from titan.cluster.signals import STOP_MESSAGE
from titan.files import leases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

BODY = "tests.support.rank_body"
PARENT = f"""
import sys
from pathlib import Path
from launchers.supervisor import run_ranks
words, folder = sys.argv[2:], Path(sys.argv[1])
sys.exit(run_ranks((folder, words), len(words), folder, module={BODY!r}))
"""


def pids(folder: Path, count: int) -> list[int]:
    """The ranks' own process ids, once all of them wait."""
    files = [folder / f"ready-{rank}" for rank in range(count)]
    wait_until(lambda: all(f.is_file() and f.read_text() for f in files), "ranks to wait")
    return [int(f.read_text()) for f in files]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(["ends", "ends"], 0, [], id="all-end-well"),
        pytest.param(["raises"], 1, ["rank 0 failed:", "ZeroDivisionError: by rank 0"], id="one-raises"),
        pytest.param(
            ["consequence", "raises", "waits"], 1, ["rank 1 failed:", "ZeroDivisionError: by rank 1"], id="cause-first"
        ),
        full(["consequence", "tells"], 1, ["rank 1 failed:", "ZeroDivisionError: told by rank 1"], id="told-first"),
        full(
            ["waits", "dies"],
            1,
            ["titan: rank 1 was killed by SIGKILL (out of memory?); see log/rank-1.log"],
            id="killed",
        ),
        full(
            ["consequence", "waits", "dies"],
            1,
            ["rank 2 was killed by SIGKILL (out of memory?); see log/rank-2.log"],
            id="killed-and-consequence",
        ),
        full(["fails", "fails"], 1, ["titan: the loss is lost; find it.\n"], id="failure"),
        full(["waits", "refuses"], 2, ["titan: a=b: can't be; give a=c.\n"], id="refusal"),
        pytest.param(["waits", "exits"], 1, ["rank 1 exited with code 7 without reporting an error"], id="no-word"),
    ],
)
def test_the_cause_is_said_once(
    words: Sequence[str], code: int, said: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reasons: list[str] = []
    assert run_ranks((tmp_path, words), len(words), tmp_path, module=BODY, report=reasons.append) == code
    err = capfd.readouterr().err
    assert reasons == ([" ".join(text.removeprefix("titan: ").strip() for text in said)] if said else [])
    for text in said:
        assert err.count(text) == 1
    assert err.count("titan: ") == (1 if said else 0)
    assert err.count("Traceback") == ("raises" in words)
    assert "another rank is gone" not in err


@pytest.mark.full
def test_a_rank_keeps_its_own_error_in_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks((tmp_path, ["consequence", "raises"]), 2, tmp_path, module=BODY)
    capfd.readouterr()
    assert "ZeroDivisionError: by rank 1" in (tmp_path / "log" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        pytest.param(["waits", "waits"], signal.SIGHUP, id="listening-HUP"),
        full(["waits", "waits"], signal.SIGINT, id="listening-INT"),
        full(["waits-deaf", "waits"], signal.SIGTERM, id="still-starting-TERM"),
    ],
)
def test_a_signal_is_handed_on_to_all_ranks(words: list[str], number: int, tmp_path: Path) -> None:
    with run_program("-c", PARENT, str(tmp_path), *words) as parent:
        ranks = pids(tmp_path, 2)
        parent.send_signal(number)
        code, _, err = wait_for_end(parent)
        assert (code, err) == (130, STOP_MESSAGE)
        assert not any(map(is_alive, ranks))


def test_a_second_signal_kills_ranks_that_stay(tmp_path: Path) -> None:
    with run_program("-c", PARENT, str(tmp_path), "stays", "stays") as parent:
        ranks = pids(tmp_path, 2)
        parent.send_signal(signal.SIGINT)
        wait_until(lambda: all((tmp_path / f"heard-{r}").exists() for r in range(2)), "ranks to hear the first signal")
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        assert wait_for_end(parent)[0] == 130
        assert not any(map(is_alive, ranks))


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    with run_program("-c", PARENT, str(tmp_path), "stays", "waits") as parent:
        ranks = pids(tmp_path, 2)
        parent.kill()
        wait_until(lambda: not any(map(is_alive, ranks)), "orphans to die")


def test_folders_of_launchers_that_were_killed_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    named = f"{supervisor.SCRATCH_PREFIX}{leases.identify_machine()}-{{}}-x"
    dead, living, elsewhere = (
        tmp_path / name
        for name in (
            named.format(gone.pid),
            named.format(os.getpid()),
            f"{supervisor.SCRATCH_PREFIX}00000000-{gone.pid}-x",
        )
    )
    for folder in (dead, living, elsewhere, tmp_path / "other"):
        folder.mkdir()
        (folder / "0.pickle").touch()
    link = tmp_path / named.format(gone.pid).replace("-x", "-link")
    link.symlink_to(tmp_path / "other")
    with supervisor.make_scratch_folder() as own:
        assert own.parent == tmp_path
        assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (living, elsewhere, link, own)} | {"other"}
    assert not own.exists()
    assert (tmp_path / "other/0.pickle").exists()
