"""A console that can't be written ends no work: the exit code says what was done."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import titan
from tests.support.processes import ROOT, run_program, wait_for_end, wait_until
from tests.support.runs import TINY
from titan.checkpoint import manifest
from titan.cluster.signals import is_repeat, list_stop_signals
from titan.console import output
from titan.errors import exit_code
from titan.metrics.reader import read_records
from titan.training.signals import StopSignals

PROGRAM = """
import sys
from pathlib import Path
from titan import errors
from titan.console import output
keep_going, folder = sys.argv[1] == "keep", Path(sys.argv[2])

def work():
    for number in range(3):
        print("x" * 10000, flush=True)
        print("y", file=sys.stderr)
    held = open(folder / "file", "w")
    print("z", flush=True)
    (folder / "done").touch()
    return 5

output.run(lambda: errors.exit_code(work), keep_going=keep_going)
"""


def started(kind: str, redirect: str, folder: Path, kib: str = "unlimited") -> subprocess.CompletedProcess[str]:
    line = f'ulimit -f {kib}; {sys.executable} -c "$0" {kind} {folder} {redirect}'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", line, PROGRAM], capture_output=True, text=True, env=env, timeout=300)


def test_what_is_redirected_is_in_the_file_and_a_signal_reaches_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with output.redirect_output(tmp_path / "log"):
        assert output.is_redirected()
        print("printed")
        with output.redirect_output(tmp_path / "inner"):
            os.write(2, b"written\n")
            output.write_stderr("stopping\n")
        subprocess.run(["echo", "a child's"], check=True)
        print("an error", file=sys.stderr)
    print("after")
    assert not output.is_redirected() and capfd.readouterr() == ("after\n", "stopping\n")
    assert (tmp_path / "inner").read_text() == "written\n"
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["a child's", "an error", "printed"]


@pytest.mark.parametrize(
    "redirect",
    [
        pytest.param("2>/dev/null | true; exit ${PIPESTATUS[0]}", id="reader-gone"),
        pytest.param("2>&1 | true; exit ${PIPESTATUS[0]}", id="both-gone"),
        pytest.param(">/dev/full 2>/dev/full", id="disk-full"),
        pytest.param(">&- 2>&-", id="closed"),
    ],
)
def test_work_goes_on_without_a_console(redirect: str, tmp_path: Path) -> None:
    done = started("keep", redirect, tmp_path)
    assert done.returncode == 5 and (tmp_path / "done").exists()
    assert (tmp_path / "file").read_text() == done.stderr == ""


def test_work_goes_on_when_the_file_behind_the_console_may_not_grow(tmp_path: Path) -> None:
    done = started("keep", f">{tmp_path}/out", tmp_path, kib="1")
    assert done.returncode == 5 and (tmp_path / "done").exists()
    assert (tmp_path / "out").stat().st_size == 1024


@pytest.mark.parametrize(
    ("redirect", "code", "said"),
    [
        pytest.param("2>/dev/null | true; exit ${PIPESTATUS[0]}", 141, "", id="reader-gone"),
        pytest.param(">/dev/full", 1, "titan: stdout can't be written (No space left on device).", id="disk-full"),
    ],
)
def test_a_command_whose_output_is_its_product_ends(redirect: str, code: int, said: str, tmp_path: Path) -> None:
    done = started("end", redirect, tmp_path)
    assert done.returncode == code and not (tmp_path / "done").exists()
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_training_outlives_its_reader_and_a_hang_up_stops_it_with_a_checkpoint(tmp_path: Path) -> None:
    line = [
        *TINY,
        "training.steps=1000000",
        "cluster.restarts=1",
        "metrics.console_every=1",
        f"hydra.run.dir={tmp_path}/run",
    ]
    with run_program("-m", "titan.train", *line, env={"TITAN_CACHE": str(tmp_path / "cache")}) as train:
        train.stdout.readline()
        train.stdout.close()
        steps = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: steps.exists() and len(list(read_records(steps))) > 20, "steps without a reader")
        for _ in range(2):  # as a terminal and its shell send it
            train.send_signal(signal.SIGHUP)
        train.stdout = None
        assert wait_for_end(train)[0] == 130
    assert manifest.list_complete(tmp_path / "run")


def test_a_hang_up_asks_once_and_is_ignored_under_nohup() -> None:
    assert signal.SIGHUP in list_stop_signals()
    assert [is_repeat(signal.SIGHUP, 0), is_repeat(signal.SIGHUP, 1), is_repeat(signal.SIGTERM, 1)] == [0, 1, 0]
    with StopSignals() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert stop.requested
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_is_one_line_and_130(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a command, and while it imports."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(output, "write_stderr", lambda text: print(text, end="", file=sys.stderr))

    def interrupt() -> int:
        raise KeyboardInterrupt

    assert exit_code(interrupt) == 130 and capfd.readouterr().err == "titan: interrupted\n"
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    importlib.reload(titan)
    assert sys.excepthook is output.print_exception
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capfd.readouterr().err == "titan: interrupted\n"
