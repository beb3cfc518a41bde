"""A run with a stopped rank: what it says before the timeout and at it, what it leaves, and that Ctrl-C ends it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.support.processes import (
    LIMIT,
    is_alive,
    list_descendants,
    read_command,
    run_program,
    wait_for_end,
    wait_until,
)
from tests.support.runs import TINY
from tests.support.tiers import full
from titan.cluster import rank_error
from titan.cluster.rank_info import RankInfo
from titan.debug import verdict
from titan.debug import watch as watch_module
from titan.debug.activity import COMPUTING, SAVING, STARTING, Activity
from titan.debug.thread_state import ThreadState, read_thread_states
from titan.debug.verdict import HangError, Messages, Verdict
from titan.debug.watch import Watch
from titan.status import read_hang_sentence
from titan.training.signals import StopSignals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LAUNCHED = ["-m", "titan.train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "titan.train"]
SETTINGS = ["parallelism=fsdp", "training.steps=1000000", "debug.hang_seconds=3", "cluster.step_timeout=8",
            "cluster.timeout=120", "metrics.sample_tokens=0"]  # fmt: skip
"""Timeouts of a step that a stopped rank lets pass, and a slow one does not."""
ASYNC = ["checkpoint=async", "checkpoint.every=100000"]


def rank_of(pid: int) -> str:
    """Return RANK in the environment of a process of torchrun, else the number of its file."""
    env = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    found = re.search(r"/(\d+)\.pickle", read_command(pid)) or re.search(r"\0RANK=(\d+)", env)
    return found[1] if found else ""


def stopped(folder: Path, parent: int, rank: str, steps: int = 4) -> int:
    """Stop a rank (SIGSTOP) after some steps, and return its process."""
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= steps, "steps")
    (pid,) = [pid for pid in list_descendants(parent) if rank_of(pid) == rank and "titan" in read_command(pid)]
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize(
    ("command", "rank"),
    [
        full(LAUNCHED, "1", id="launcher"),
        full(LAUNCHED, "0", id="launcher-rank-0"),
        full(TORCHRUN, "1", id="torchrun"),
        full(TORCHRUN, "0", id="torchrun-rank-0"),
    ],
)
def test_a_stopped_rank_is_named_before_and_at_the_timeout(command: list[str], rank: str, tmp_path: Path) -> None:
    with run_program(*command, *TINY, *SETTINGS, *ASYNC, f"hydra.run.dir={tmp_path}") as process:
        pid = stopped(tmp_path, process.pid, rank)
        code, _, errors = wait_for_end(process)
    said = re.findall(r"titan: (no step for \d+ s .*)", errors)
    cause = f"waiting for rank {rank} in the "
    assert code == 1 and len(said) >= 2 and all(cause in line for line in said)
    assert all(f"rank {rank}: stopped (SIGSTOP), process {pid} on" in line for line in said)
    assert re.search("ended after cluster.(step_)?timeout=(8|120), see", said[-1]) and "ended after" not in said[0]
    assert not is_alive(pid)
    for number in range(2):
        assert "most recent call first" in (tmp_path / f"debug/stacks/rank-{number}.txt").read_text()
    assert (tmp_path / "debug/analysis.txt").read_text().startswith(said[-1])
    assert (tmp_path / "debug/flight_recorder" / f"rank_{1 - int(rank)}").stat().st_size


@pytest.mark.full
def test_the_first_ctrl_c_ends_a_run_that_hangs(tmp_path: Path) -> None:
    settings = [*SETTINGS[:2], "metrics.sample_tokens=0", *ASYNC]
    with run_program(*LAUNCHED, *TINY, *settings, f"hydra.run.dir={tmp_path}") as process:
        pid = stopped(tmp_path, process.pid, "1")
        process.send_signal(signal.SIGINT)
        code, _, errors = wait_for_end(process)
    assert code == 130 and "waiting for rank 1 in the" in errors and not is_alive(pid)


def test_the_usual_time_leaves_out_what_comes_between_steps() -> None:
    now = [7.0]
    what = Activity(get_time=lambda: now[0])
    for step in range(1, 5):
        what.begin_step(step)
        now[0] += 0.25
    what.enter_phase("evaluating")
    now[0] += 9.0
    what.begin_step(5)
    assert what.estimate_step_seconds() == 0.25


def test_threads_are_found_with_their_layer() -> None:
    class Layer:
        def forward(self, go: threading.Event, here: threading.Event) -> None:
            here.set()
            go.wait()

    me, go, here = Layer(), threading.Event(), threading.Event()
    thread = threading.Thread(target=me.forward, args=(go, here), name="titan-loader")
    thread.start()
    here.wait()
    found = read_thread_states({id(me): "layers.3"})
    go.set()
    thread.join()
    assert found["data"].layer == "layers.3" and "in forward" in found["data"].line
    assert "in test_threads" in found["main"].line


def test_reading_threads_keeps_none_of_their_variables() -> None:
    """Garbage is collected rarely in a run: a cycle of frames would keep the gradients of a step."""
    tensors: list[weakref.ref[threading.Event]] = []
    go, here = threading.Event(), threading.Event()

    def compute() -> None:
        tensor = threading.Event()
        tensors.append(weakref.ref(tensor))
        here.set()
        go.wait()

    thread = threading.Thread(target=compute, name="titan-loader")
    gc.disable()
    try:
        thread.start()
        here.wait()
        assert "data" in read_thread_states({})
        go.set()
        thread.join()
        assert tensors[0]() is None
    finally:
        gc.enable()


def test_one_rank_alone_says_where_it_is_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    what = Activity(timeout=4)
    what.begin_step(9)
    what.enter_phase(COMPUTING)
    with Watch(tmp_path, RankInfo(), 1, what, 1.0):
        wait_until(lambda: read_hang_sentence(tmp_path), "a message")
        what.begin_step(10)
        wait_until(lambda: not read_hang_sentence(tmp_path), "the end of the hang")
    said = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"titan: no step for \d+ s: it is computing gradients \(.*\), step 9", said[0])
    assert said[-1] == "titan: the run continues with step 10"


def end_a_child() -> None:
    """Fork as a user's pool of workers does, and end the child with SIGTERM."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIMIT,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM


def test_a_signal_to_a_users_worker_is_none_to_the_rank(tmp_path: Path) -> None:
    watch = Watch(tmp_path, RankInfo(), 1, Activity())
    with StopSignals() as stop, watch:
        end_a_child()
        watch._notice_signals()
        assert watch.clock.stop_request_time is None and not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: watch.clock.stop_request_time is not None, "this process's own signal")
        assert stop.requested


@pytest.mark.parametrize(
    ("step", "phase", "compiles", "scheduled", "code"),
    [
        pytest.param(1, COMPUTING, True, False, 130, id="first-step"),
        pytest.param(0, STARTING, True, False, 130, id="before-it"),
        pytest.param(1, COMPUTING, False, False, None, id="does-not-compile"),
        pytest.param(2, COMPUTING, True, False, None, id="later-step"),
        pytest.param(1, SAVING, True, False, None, id="between-steps"),
        pytest.param(1, COMPUTING, True, True, None, id="scheduler"),
    ],
)
def test_a_request_to_stop_ends_only_a_first_compilation_at_once(
    step: int,
    phase: str,
    compiles: bool,
    scheduled: bool,
    code: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = list[int]()
    monkeypatch.setattr(watch_module, "exit_now", codes.append)
    monkeypatch.setattr(
        watch_module, "read_thread_states", lambda names: {"main": ThreadState("a.py:1", compiles=compiles)}
    )
    monkeypatch.setattr(Watch, "_close_files", lambda watch: None)
    what = Activity(get_time=lambda: 100.0)
    for number in range(1, step + 1):
        what.begin_step(number)
    what.enter_phase(phase)
    watch = Watch(tmp_path, RankInfo(scheduled=scheduled), 1, what)
    watch._leave_compiler()
    assert codes == []
    watch.clock.stop_request_time = 99.0
    watch._leave_compiler()
    assert codes == [code] * (code is not None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    watch._leave_compiler()
    assert len(codes) == (code is not None)


@pytest.mark.parametrize("moves", [True, False])
def test_collectives_that_go_on_are_progress(moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    what = Activity(get_time=lambda: now[0])
    what.enter_phase(COMPUTING)
    watch, numbers = Watch(tmp_path, RankInfo(0, 2), 1, what, 60.0), iter(range(9))
    monkeypatch.setattr(
        Watch, "_read_collectives", lambda watch: {"entered": {"0": next(numbers) if moves else 7}, "completed": {}}
    )
    for _ in range(2):
        now[0] += 40
        watch._read_details(late=True)
    assert what.compute_idle_seconds() == (0 if moves else 80)


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_collective_that_times_out_is_no_progress(
    is_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a processor looks only after the collective has failed, and still says what it waited for."""
    now = [100.0]
    what = Activity(get_time=lambda: now[0], timeout=60)
    what.enter_phase(COMPUTING)
    watch = Watch(tmp_path, RankInfo(0, 2), 1, what, 30.0)
    found = [{"entered": {"0": 7}, "completed": {"0": 6}, "pending": ("x",)},
             {"entered": {"0": 7}, "completed": {"0": 7}, "pending": ()}]  # fmt: skip
    monkeypatch.setattr(Watch, "_read_collectives", lambda watch: found.pop(0))
    for seconds in (40, 10 if is_reported else 21):
        now[0] += seconds
        watch._read_details(late=True)
        if is_reported:
            watch.hang_event.set()
    assert found == [] and what.compute_idle_seconds() == now[0] - 100
    assert watch._details["pending"] == ("x",)


def test_the_launcher_shows_messages_that_come_later(tmp_path: Path) -> None:
    (tmp_path / "debug").mkdir()
    verdict.append_message(tmp_path, "of an earlier attempt")
    messages = Messages(tmp_path)
    assert messages.read_new() == []
    verdict.append_message(tmp_path, "no step for 60 s")
    assert (messages.read_new(), messages.read_new()) == (["no step for 60 s"], [])


def test_the_error_of_a_hang_names_the_node_that_the_others_wait_for() -> None:
    error = rank_error.describe_error(HangError(Verdict(1, "no step", (5, 7), "gpu3", 1)), rank=0)
    assert (error.rank, error.node, error.text, error.plain) == (5, "gpu3", "no step", True)
