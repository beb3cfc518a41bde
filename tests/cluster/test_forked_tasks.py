"""Calls in forked processes: results in order, and an error for each way in which one can end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from titan.cluster.forked_tasks import ForkedTaskError, map_in_forks


def compute(value: int) -> tuple[int, int]:
    """Return the value and the process; negative ones fail, 0 is killed, and large ones take forever."""
    if value < 0:
        raise ValueError(f"{value} is negative")
    if value == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if value > 100:
        time.sleep(600)
    return value, os.getpid()


@pytest.mark.full
def test_each_call_has_a_process_of_its_own() -> None:
    """More calls than workers: the later ones start from this process, too."""
    results = map_in_forks(compute, [(value,) for value in range(1, 8)], 2, 60)
    assert [value for value, _ in results] == list(range(1, 8))
    assert len({process for _, process in results} | {os.getpid()}) == 8


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        pytest.param((1, -2, 3), ValueError, "-2 is negative", id="raises"),
        pytest.param((1, 2, 0, 3), ForkedTaskError, "ended with code -9", id="killed"),
        pytest.param((1, 101), ForkedTaskError, "no result within 1 s", id="too-long"),
    ],
)
def test_no_call_that_ends_otherwise_is_waited_for(values: tuple[int, ...], error: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=text):
        map_in_forks(compute, [(value,) for value in values], 2, 1 if 101 in values else 60)
    assert time.monotonic() - start < 30


def test_an_unfinished_call_ends_with_the_function() -> None:
    def announce(file: int, value: int) -> int:
        os.write(file, f"{os.getpid()} ".encode())
        time.sleep(0.3)  # until the others have written
        return compute(value)[0]

    reader, writer = os.pipe()
    with pytest.raises(ForkedTaskError):
        map_in_forks(announce, [(writer, 101), (writer, 102), (writer, 0)], 3, 60)
    processes = os.read(reader, 100).split()
    assert len(processes) == 3
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)
