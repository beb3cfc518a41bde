"""The time that a training thread loses beside another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.measure import lost_time
from tests.measure.lost_time import TrainingThread


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> TrainingThread:
    monkeypatch.setattr(lost_time, "ALONE_SECONDS", 0.0)
    return TrainingThread()


def test_passes_go_on_until_the_other_thread_ends(training: TrainingThread, monkeypatch: pytest.MonkeyPatch) -> None:
    enough, passes = threading.Event(), list[None]()

    def run_pass() -> None:
        passes.append(None)
        if len(passes) == 3:
            enough.set()

    monkeypatch.setattr(training, "_run_pass", run_pass)
    assert training.measure_lost_time(lambda: enough.wait(60)) >= 0
    assert len(passes) >= 3


@pytest.mark.parametrize(("each", "lost"), [(0.5, 1.2), (0.1, 0.0), (0.05, 0.0)], ids=["slower", "equal", "faster"])
def test_it_is_what_each_pass_takes_longer(
    each: float, lost: float, training: TrainingThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(is_over: Callable[[], bool]) -> tuple[float, int]:
        return each, 3

    training.seconds = 0.1
    monkeypatch.setattr(training, "_repeat", repeat)
    assert training.measure_lost_time(lambda: None) == pytest.approx(lost)


def test_an_error_of_the_other_thread_is_raised(training: TrainingThread) -> None:
    with pytest.raises(ZeroDivisionError):
        training.measure_lost_time(lambda: 1 / 0)
