"""How the ranks of a Slurm job find rank 0, and where they leave their words: what a shared file system sees of it."""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launchers import rendezvous
from launchers.slurm import job
from titan.cluster import rank_error
from titan.cluster.rank_error import RankError
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError
from titan.sweep import job_exit


@dataclass
class WaitCost:
    """The operations of a rank's wait on the shared folder, how long it took, and how long after the address came."""

    opens: int = 0
    listings: int = 0
    seconds: float = 0.0
    late: float = 0.0


def simulate_wait(seconds: float, monkeypatch: pytest.MonkeyPatch) -> WaitCost:
    """The launcher's own wait, where the address comes after some seconds, on a clock that does not wait."""
    cost = WaitCost()

    class AddressFile:
        parent = Path()

        def read_text(self) -> str:
            cost.opens += 1
            return "node1 29500\n" if cost.seconds >= seconds else ""

    def count(name: str, amount: float = 1) -> None:
        setattr(cost, name, getattr(cost, name) + amount)

    with monkeypatch.context() as patches:
        patches.setattr(time, "sleep", lambda pause: count("seconds", pause))
        patches.setattr(time, "monotonic", lambda: cost.seconds)
        patches.setattr(os, "listdir", lambda *folder: count("listings"))
        assert rendezvous._wait_for_address(AddressFile()) == ("node1", "29500")  # type: ignore[arg-type]
    cost.late = cost.seconds - seconds
    return cost


@pytest.mark.parametrize("seconds", [0.0, 1.0, 30.0, 600.0])
def test_a_waiting_rank_opens_one_file_ever_less_often_and_lists_nothing(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = simulate_wait(seconds, monkeypatch)
    assert seen.listings == 0
    assert seen.opens <= 8 + seconds / (0.75 * rendezvous.LONGEST_LOOK_SECONDS)
    assert seen.late <= min(rendezvous.LONGEST_LOOK_SECONDS, max(rendezvous.LOOK_SECONDS, 2 * seconds))


def test_ranks_do_not_look_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({simulate_wait(3.0, monkeypatch).seconds for _ in range(8)}) > 1


@pytest.mark.parametrize("before", [None, ""], ids=["no-file", "an-empty-file"])
def test_rank_0_writes_into_the_file_that_is_there(before: str | None, tmp_path: Path) -> None:
    """A file in its place would be another one, which a shared folder's client may not look for at once."""
    file = tmp_path / "7.0" / "meet"
    inode = None
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
        inode = file.stat().st_ino
    told: list[tuple[str, str]] = []
    waiting = threading.Thread(target=lambda: told.append(rendezvous._wait_for_address(file)))
    waiting.start()
    store = rendezvous._join_by_file(file, RankInfo(0, 2))
    waiting.join(300)
    assert told == [(store.host, str(store.port))]
    assert inode in (None, file.stat().st_ino)
    assert [f.name for f in file.parent.iterdir()] == ["meet"]


@pytest.mark.parametrize(
    ("ranks", "limits", "expected"),
    [
        pytest.param(64, (1024, 4096), 1192, id="raised"),
        pytest.param(64, (4096, 4096), None, id="enough"),
        pytest.param(16384, (1024, 1048576), 50152, id="many"),
        pytest.param(16384, (1024, resource.RLIM_INFINITY), 50152, id="no-hard-limit"),
        pytest.param(16384, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, id="no-limit"),
        pytest.param(16384, (1024, 4096), ConfigError, id="too-low"),
    ],
)
def test_rank_0_may_have_a_connection_of_each_rank(
    ranks: int, limits: tuple[int, int], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: limited.append(new))
    if expected is ConfigError:
        with pytest.raises(ConfigError, match=r"^ulimit -n 4096: rank 0 needs 50,152 open files"):
            rendezvous._allow_connections(ranks)
    else:
        rendezvous._allow_connections(ranks)
    assert limited == ([(expected, limits[1])] if isinstance(expected, int) else [])


def test_errors_are_found_where_ranks_leave_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (2, 3, 11):
        monkeypatch.setenv("SLURM_NODEID", str(rank // 2))
        error = RankError(rank=rank, time=float(rank), text=f"ValueError: {rank}")
        rank_error.write(job._locate_error_file(tmp_path / "7.1", rank), error)
    assert job_exit.find_error(tmp_path, "7.1") == "rank 2: ValueError: 2"
    assert job_exit.find_error(tmp_path, "7.0") is None
    assert job_exit.find_latest_attempt(tmp_path, "7") == "7.1"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["7.1"], "one folder for an attempt"
    assert sorted(f.name for f in (tmp_path / "7.1").iterdir()) == ["1", "5"], "one folder for a node in it"


def test_a_task_that_came_to_no_log_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "7.0" / "0").mkdir(parents=True)
    (tmp_path / "7.out").write_text("the script's own\n")
    (tmp_path / "7.0" / "0" / "2.out").write_text("no such module\n")
    (tmp_path / "7.0" / "0" / "10.out").write_text("later\n")
    assert job_exit.find_error(tmp_path, "7.0") == "no such module"
