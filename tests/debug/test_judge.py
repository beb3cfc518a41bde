"""What the rank that reports says, and when the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.debug.test_diagnosis import issued, rank, waits, world
from titan.cluster.rank_info import RankInfo
from titan.debug import verdict
from titan.debug.activity import COMPUTING, ENDED, EVALUATING, HOOK, SAVING, STARTING, Activity, Clock
from titan.debug.verdict import Judge

INFO = RankInfo(0, 4, 0, supervised=True)
OTHERS = [waits(n, late=3.0) for n in (0, 1, 3)]
LATE: dict[str, Any] = {"entered": {"w": 6}}


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def judge_after(seconds: float, directory: Path, phase: str = COMPUTING, timeout: float = 1800.0) -> Judge:
    """A judge on a rank that has made no progress for so long."""
    now = Time()
    what = Activity(timeout, now)
    what.enter_phase(phase)
    now.now += seconds
    return Judge(directory, INFO, 1, Clock(what, 60.0, 4))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "debug").mkdir()
    return tmp_path


def test_ranks_that_wait_for_one_that_makes_progress_do_not_hang(directory: Path) -> None:
    """A rank that evaluates, loads or writes more than the others."""
    judge = judge_after(400, directory, EVALUATING)
    assert judge.decide_verdict(world(*OTHERS, rank(2, phase=EVALUATING, late=0.1, **LATE))) is None
    assert verdict.read_hang_sentence(directory) is None
    found = judge.decide_verdict(world(*OTHERS, rank(2, phase=EVALUATING, late=2.0, **LATE)))
    assert found is not None and found.ranks == (2,) and found.exit_code is None


@pytest.mark.parametrize(("late", "silent"), [(3.0, ()), (0.1, (2,)), (0.1, ())])
def test_at_the_timeout_the_run_ends_and_the_setting_is_named(late: float, silent: Any, directory: Path) -> None:
    """Also where the rank makes progress: the collective in which the others wait ends the run in a moment."""
    judge = judge_after(1799, directory, EVALUATING)
    found = judge.decide_verdict(world(*OTHERS, rank(2, phase=EVALUATING, late=late, **LATE), silent=silent))
    assert found is not None and found.exit_code == 1
    assert found.sentence.startswith("no progress for 1799 s: waiting for rank 2 ")
    assert "; ended after cluster.timeout=1800, see" in found.sentence


@pytest.mark.parametrize(
    ("age", "state", "end"),
    [
        (50, {}, None),
        (60, {}, "; ended after cluster.hook_timeout=60, see"),
        (5, {"pending": waits(2).pending, "entered": {"w": 7}}, None),
        (5, {"phase": SAVING}, "; ended after cluster.timeout=20, see"),
    ],
    ids=["hook", "slow-hook", "hook-that-waits", "other-phase"],
)
def test_a_hook_has_its_own_limit(age: float, state: Any, end: str | None, directory: Path) -> None:
    """The others have waited for longer than collectives may take."""
    judge = judge_after(59, directory, SAVING, timeout=20)
    judge.clock.activity.hook_timeout = 60
    found = judge.decide_verdict(world(*OTHERS, rank(2, **{"phase": HOOK, "age": age, "late": 3.0, **LATE} | state)))
    assert found is not None and (end in found.sentence if end else found.exit_code is None or found.ranks != (2,))


def test_ranks_that_have_ended_are_not_waited_for(directory: Path) -> None:
    """But in a collective that they have left out."""
    judge = judge_after(1799, directory, SAVING)
    ended = [rank(n, phase=ENDED) for n in (1, 2, 3)]
    found = judge.decide_verdict(world(rank(0, phase=SAVING), *ended))
    assert found is not None and (found.exit_code, found.ranks) == (None, ())
    found = judge.decide_verdict(world(waits(0), *ended))
    assert (
        found is not None and found.ranks == (1, 2, 3) and "; rank 3: ended in layer 12 (a.py:1 in f)" in found.sentence
    )


@pytest.mark.parametrize(("late", "silent", "code"), [(0.1, (), None), (3.0, (), 1), (0.1, (2,), 1)])
def test_a_background_save_that_makes_progress_ends_no_run(
    late: float, silent: Any, code: int | None, directory: Path
) -> None:
    """Rank 0 has written its part, rank 2 is on a slower disk; training goes on."""
    judge = judge_after(1799, directory)
    judge.clock.activity.saves = {40: 100.0}
    judge.clock.activity.enter_phase(COMPUTING)
    states = [rank(n, saving=40, saving_waits=n != 2, late=late if n == 2 else 3.0) for n in range(4)]
    found = judge.decide_verdict(world(*states, silent=silent))
    assert (found.exit_code if found else None) == code


@pytest.mark.parametrize(("late", "code"), [(0.1, None), (3.0, 130)])
@pytest.mark.parametrize("phase", [SAVING, EVALUATING, COMPUTING])
def test_after_a_ctrl_c_only_what_makes_no_progress_is_ended(
    phase: str, late: float, code: int | None, directory: Path
) -> None:
    judge = judge_after(70, directory, phase)
    judge.clock.stop_request_time = judge.clock.get_time() - 20
    found = judge.decide_verdict(world(*OTHERS, rank(2, phase=phase, late=late, **LATE)))
    assert (found.exit_code if found else None) == code


@pytest.mark.parametrize(("phase", "patience"), [(COMPUTING, 10.0), (SAVING, 60.0), (EVALUATING, 60.0)])
def test_a_request_to_stop_shortens_steps_only(phase: str, patience: float, directory: Path) -> None:
    clock = judge_after(20, directory, phase).clock
    clock.stop_request_time = clock.get_time()
    assert clock.compute_patience() == patience


def test_a_collective_that_no_gpu_completes_ends_the_run_without_a_rank(directory: Path) -> None:
    stuck = world(*(issued(n, late=3.0) for n in range(4)))
    waiting = judge_after(400, directory).decide_verdict(stuck)
    last = judge_after(1799, directory).decide_verdict(stuck)
    assert waiting is not None and last is not None
    assert (waiting.exit_code, last.exit_code, last.ranks, last.node) == (None, 1, (), "")


def test_progress_is_no_hang() -> None:
    now = Time()
    what = Activity(get_time=now)
    clock = Clock(what, 60.0, 4)
    for phase, advance in (
        (STARTING, what.record_progress),
        (EVALUATING, what.record_progress),
        (SAVING, what.record_save_progress),
    ):
        what.enter_phase(phase)
        for _ in range(10):
            now.now += 25
            advance()
            assert clock.compute_lateness() == 0
        now.now += 60
        assert clock.compute_lateness() == 1


def test_a_save_in_the_background_is_no_progress_of_training() -> None:
    now = Time()
    what = Activity(get_time=now)
    what.saves = {40: 100.0}
    what.enter_phase(COMPUTING)
    now.now += 120
    what.record_save_progress()
    assert (what.compute_idle_seconds(), what.compute_save_idle_seconds()) == (120, 0)


def test_graphs_that_are_compiled_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as dynamo

    now = Time()
    what = Activity(get_time=now)
    what.check_compiler()
    now.now += 30
    what.check_compiler()
    assert what.compute_idle_seconds() == 30
    monkeypatch.setitem(dynamo.counters["stats"], "unique_graphs", dynamo.counters["stats"]["unique_graphs"] + 1)
    what.check_compiler()
    assert what.compute_idle_seconds() == 0
