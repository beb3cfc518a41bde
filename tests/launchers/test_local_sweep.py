"""Why a trial of a local sweep failed: the ledger has the reason, whether or not the trial is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import run_file, start
from launchers import trials as sweep_trials
from launchers.command import run_command
from launchers.local import sweep, trial
from launchers.local.sweep import LocalSweep
from launchers.trials import Trial
from tests.support.runs import compose_tiny_run
from tests.support.tiers import full
from titan import errors
from titan.errors import ConfigError, RunError
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.sweep import ledger
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import LocalLaunch

TINY = ["cluster=cpu", "dataset=synthetic", "training.seq_len=16", "training.global_batch=128", "parallelism=single"]


def rejects(run: Run, report: Callable[[str], object]) -> int:
    raise ConfigError("a=b: is no c; give d.")


def fails(run: Run, report: Callable[[str], object]) -> int:
    raise RunError("the loss is lost.")


def has_bug(run: Run, report: Callable[[str], object]) -> int:
    return {}["x"]  # type: ignore[no-any-return, typeddict-item]


def loses_rank(run: Run, report: Callable[[str], object]) -> int:
    report("rank 1 was killed by SIGKILL")
    return 1


ENDS = [
    pytest.param(rejects, 2, "a=b: is no c; give d.", id="config-error"),
    full(fails, 1, "the loss is lost.", id="run-error"),
    pytest.param(loses_rank, 1, "rank 1 was killed by SIGKILL", id="killed-rank"),
    full(lambda run, report: 7, 7, "exited with code 7", id="no-reason"),
]


@pytest.mark.full
@pytest.mark.parametrize(("body", "code", "reason"), ENDS)
def test_the_ledger_has_the_reason(
    body: Callable[..., int], code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s/run/log").mkdir(parents=True)
    (tmp_path / "s/run/log/launcher.log").write_text("2030-01-01T00:00:00+00:00 what an earlier attempt printed\n")
    monkeypatch.setattr(start, "run_local", lambda run, apart, report: body(run, report))
    assert run_command(["-m", *TINY, f"hydra.sweep.dir={tmp_path}/s", "training.seed=1"], lambda run: 0) == code
    sweep = ledger.read(tmp_path / "s")
    assert sweep is not None and [t.reason for t in sweep.trials] == [reason]


@pytest.mark.parametrize(("body", "code", "reason"), [*ENDS, pytest.param(has_bug, 1, "KeyError: 'x'", id="bug")])
def test_the_process_of_a_trial_leaves_the_reason(
    body: Callable[..., int], code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(run_file, "read", lambda file: None)
    monkeypatch.setattr(start, "run_local", lambda run, report: body(run, report))
    file = tmp_path / "a.pickle"
    if body is has_bug:
        monkeypatch.setattr(errors, "find_own_code_error", lambda error: None)
        with pytest.raises(KeyError):
            trial.main(str(file), str(os.getpid()))
    else:
        assert trial.main(str(file), str(os.getpid())) == code
    assert run_file.read_reason(file, code) == reason
    assert run_file.read_reason(file, -9) == "killed by SIGKILL"
    assert run_file.read_reason(file, -50) == "killed by signal 50"


@pytest.mark.full
def test_the_reason_of_an_earlier_attempt_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [("the first attempt failed", 1), (None, 7)]

    def start_ranks(run: Run, attempt: Attempt, apart: bool, report: Callable[[str], object]) -> int:
        reason, code = ends.pop(0)
        if reason:
            report(reason)
        return code

    monkeypatch.setattr(start, "_start_ranks", start_ranks)
    run, file = compose_tiny_run(tmp_path / "run", "cluster.restarts=1"), tmp_path / "a.pickle"
    assert start.run_local(run, report=partial(run_file.write_reason, file)) == 7
    assert run_file.read_reason(file, 7) == "exited with code 7"


def test_a_grid_of_another_recipe_under_one_name_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials that a command repeats, or adds with more values, are not."""
    monkeypatch.setattr(start, "run_local", lambda run, apart, report: 7)
    grid = ["-m", *TINY, f"hydra.sweep.dir={tmp_path}/s"]
    notes = []
    for more in (["training.seed=0,1"], ["training.seed=0,1,2"], ["training.seed=0,1", "training.steps=5"]):
        run_command([*grid, *more], lambda run: 0)
        notes += [line for line in capsys.readouterr().out.splitlines() if "no command varies" in line]
    assert len(notes) == 1 and notes[0].startswith("2 new trials differ from the 3 that the directory has")


def prints_and_warns(run: Run, apart: bool, report: Callable[[str], object]) -> int:
    print("the banner", flush=True)
    print("titan: warning: the same for all.", file=sys.stderr)
    with (Path(run.directory) / "log" / "rank-0.log").open("a") as log:
        log.write("2030-01-01 00:00:00,000 WARNING the tracker is not installed.\n")
        log.write("2030-01-01 00:00:00,000 WARNING step 3: a spike\n")
    if run.training.seed == 1:
        raise ConfigError("a=b: is no c; give d.")
    content = {"finished": True, "step": 3, "validation_loss": 4.5}
    (Path(run.directory) / "result.json").write_text(json.dumps(content))
    return 0


LINES = [
    "[1/3] training.seed=0  validation loss 4.5000  0:00  about 0:00 left",
    "[2/3] training.seed=1  rejected: a=b: is no c; give d.  0:00  about 0:00 left",
    "[3/3] training.seed=2  validation loss 4.5000  0:00",
]


@pytest.mark.parametrize("verbose", [False, full(True)])
def test_a_trial_is_one_line_and_a_warning_is_shown_once(
    verbose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "run_local", prints_and_warns)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: 0.0))
    grid = ["-m", *TINY, f"hydra.sweep.dir={tmp_path}/s", "training.seed=0,1,2", f"hydra.launcher.verbose={verbose}"]
    assert run_command(grid, lambda run: 0) == 2
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if "  " in line] == LINES and "\r" not in out + err
    assert out.count("the banner") == 3 * verbose
    assert err.count("the tracker is not installed.") == 1 and "spike" not in err
    assert err.count("the same for all.") == (3 if verbose else 1)
    console = tmp_path / "s" / "seed-1" / "log" / "console.log"
    expected = "the banner\ntitan: warning: the same for all.\ntitan: a=b: is no c; give d.\n"
    assert verbose or console.read_text() == expected


@pytest.mark.parametrize(
    ("ended", "waiting", "left"),
    [
        pytest.param([(100, 0, 20.0)], [100, 300], "about 1:00 left", id="steps-count"),
        pytest.param([(100, 50, 15.0)], [100], "about 0:20 left", id="resumed"),
        pytest.param([(100, 0, 20.0), (300, 0, 40.0), (100, 0, 90.0)], [100, 100], "about 0:40 left", id="one-is-slow"),
        pytest.param([(100, 0, 20.0)], [], "", id="none-left"),
        pytest.param([], [100], "", id="none-measured"),
    ],
)
def test_the_time_left_is_that_of_the_steps_and_what_is_beside_them(
    ended: list[tuple[int, int, float]], waiting: list[int], left: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each trial takes 10 s beside its steps, and 0.1 s for a step."""

    def make(steps: int, start: int = 0) -> Trial:
        run = compose_tiny_run(tmp_path / f"{steps}-{start}", f"training.steps={steps}")
        return Trial(f"{steps}-{start}", (), run)

    made = make(1).run.training.global_batch
    monkeypatch.setattr(sweep, "read_attempts", lambda folder: [{"from_step": int(folder.name.split("-")[1])}])
    monkeypatch.setattr(
        sweep,
        "read_result",
        lambda folder: ({"step": int(folder.name.split("-")[0]), "tokens_per_second": made / 0.1}, None),
    )
    costs = [sweep._measure_cost(make(steps, start).run, seconds) for steps, start, seconds in ended]
    shown = sweep.SweepScreen([make(steps) for steps in waiting], costs=costs)
    assert "".join(shown._describe_rest()) == left


@pytest.mark.parametrize(
    ("number", "signals", "code", "state"),
    [
        pytest.param(signal.SIGTERM, 1, 130, "stopped", id="ctrl-c"),
        pytest.param(signal.SIGKILL, 2, 130, "stopped", id="a-second-ctrl-c"),
        pytest.param(signal.SIGTERM, 0, 1, "failed", id="someone-else"),
        pytest.param(signal.SIGSEGV, 1, 1, "failed", id="a-crash"),
    ],
)
def test_a_trial_that_ctrl_c_ends_before_it_handles_signals_is_stopped(
    number: int, signals: int, code: int, state: str, tmp_path: Path
) -> None:
    made = Trial("a", ("x=1",), compose_tiny_run(tmp_path / "a"))
    sweep_trials.register_trials(tmp_path, [made], SweepSpec())
    sweep = LocalSweep(tmp_path, [made], LocalLaunch(at_once=2), SweepSpec())
    sweep.supervisor.signals = signals
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(number)
    process.wait()
    sweep.screen.begin_trial(made)
    sweep.running = {made.id: (made, process, tmp_path / "a.json")}
    assert sweep._collect_trial(made) == code
    assert [t.state for t in ledger.read_trials(tmp_path)] == [state]
