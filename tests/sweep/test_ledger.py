"""The ledger of a sweep: what is added, what follows from it, and what Slurm has to say to it."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from launchers import trials as sweep_trials
from launchers.slurm import state as standing
from launchers.slurm import sweep
from launchers.slurm.state import SlurmJob, adopt_jobs, reconcile_trial
from launchers.trials import Trial
from tests.support.composing import compose_test_run
from tests.support.tiers import full
from titan import status
from titan.cluster import rank_error
from titan.cluster.rank_error import RankError
from titan.run import identity
from titan.run.directory import is_locked
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepSpec, TrialState

POINT = {"event": "point", "id": "a", "directory": "p", "overrides": ["x=1"], "steps": 3, "devices": 2, "asked": ""}


def noted(root: Path, *events: dict[str, Any]) -> TrialState:
    """The only point of a sweep with these events."""
    ledger.add_events(root, POINT, *events)
    sweep = ledger.read(root)
    assert sweep is not None
    return sweep.trials[0]


SENDING = {"event": "sending", "token": "t", "points": ["a"]}
STARTED = {"event": "started", "id": "a"}
SENT = {"event": "sent", "token": "t", "jobs": {"a": ["7"]}}


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        pytest.param([], "planned", None, id="new"),
        pytest.param([SENDING], "queued", ledger.UNCONFIRMED, id="sending"),
        pytest.param([SENDING, SENT], "queued", None, id="sent"),
        pytest.param([SENDING, {"event": "unsent", "points": ["a"], "reason": "no"}], "failed", "no", id="unsent"),
        pytest.param([STARTED], "stopped", "its launcher was killed", id="killed"),
        pytest.param([STARTED, {"event": "ended", "id": "a", "code": 1, "reason": "r"}], "failed", "r", id="failed"),
        pytest.param([{"event": "ended", "id": "a", "code": 130}], "stopped", None, id="stopped"),
        pytest.param([{"event": "ended", "id": "a", "code": 0}], "stopped", "its result is gone", id="gone"),
        pytest.param([{"event": "ended", "id": "other", "code": 0}], "planned", None, id="another"),
    ],
)  # fmt: skip
def test_states(tmp_path: Path, events: list[dict[str, Any]], state: str, reason: str | None) -> None:
    point = noted(tmp_path, *events)
    assert (point.state, point.reason) == (state, reason)


def test_a_trial_that_a_hook_ended_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    ended = {"finished": False, "step": 2, "ended_by": {"hook": "prune", "reason": "it is enough"}}
    (tmp_path / "p" / "result.json").write_text(json.dumps(ended))
    trial = noted(tmp_path, {"event": "ended", "id": "a", "code": 0})
    assert (trial.state, trial.reason) == ("stopped", "ended by hooks.prune: it is enough")


def test_a_finished_run_counts_whatever_the_ledger_says_unless_more_steps_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "result.json").write_text('{"finished": true, "step": 3}')
    assert noted(tmp_path, SENDING, SENT).state == "finished"
    ledger.add_events(tmp_path, POINT | {"steps": 4})
    sweep = ledger.read(tmp_path)
    assert sweep is not None and sweep.trials[0].state == "queued"


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        pytest.param({"code": 1, "again": False, "state": "RUNNING"}, "failed", "rank 1: ValueError: b", id="error"),
        pytest.param({"code": 130, "again": False, "state": "COMPLETING"}, "stopped", "cancelled", id="cancelled"),
        pytest.param({"code": 75, "again": True, "state": "RUNNING"}, "queued", "rank 1: ValueError: b", id="again"),
        pytest.param({"code": 75, "again": False, "state": "RUNNING", "why": "w"}, "stopped", "w", id="too-often"),
    ],
)
def test_what_a_job_leaves_behind(tmp_path: Path, end: dict[str, Any], state: str, reason: str | None) -> None:
    words = tmp_path / "slurm"
    words.mkdir()
    (words / "7.0.end").write_text(json.dumps(end))
    for rank, time in ((0, 2.0), (1, 1.0)):
        error = RankError(rank=rank, time=time, text=f"Trace\nValueError: {'ab'[rank]}\n")
        rank_error.write(words / "7.0" / "0" / f"{rank}.error", error)
    point = noted(tmp_path, SENDING, SENT)
    assert (point.state, point.reason) == (state, reason)


@pytest.mark.parametrize(
    ("first", "lost", "reason"),
    [
        pytest.param("task 3: Killed", False, "rank 3 on node2: killed (out of memory?)", id="killed-before"),
        pytest.param("task 0: Exited with exit code 1", False, "rank 0: bad", id="killed-for-another-s-error"),
        pytest.param("task 0: Exited with exit code 1", True, "rank 1 on node1: killed (out of memory?)", id="lost"),
    ],
)
def test_a_rank_that_was_killed_comes_before_the_errors_that_followed(
    tmp_path: Path, first: str, lost: bool, reason: str
) -> None:
    then = "srun: launch/slurm: _step_signal: Terminating StepId=7.0\nsrun: error: node1: task 1: Killed\n"
    (tmp_path / "7.0.out").write_text(f"srun: error: node2: {first}\n{then}")
    rank_error.write(tmp_path / "7.0" / "0" / "0.error", RankError(lost=lost, rank=0, time=1.0, text="bad"))
    assert job_exit.find_error(tmp_path, "7.0") == reason


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        pytest.param(SlurmJob("7", "PENDING", "Priority"), "queued", "waits: Priority", id="waits"),
        pytest.param(SlurmJob("7", "RUNNING"), "running", None, id="runs"),
        pytest.param(SlurmJob("7", "NODE_FAIL"), "stopped", "its node failed", id="node"),
        pytest.param(SlurmJob("7", "OUT_OF_MEMORY"), "failed", "out of memory on its node", id="memory"),
        pytest.param(SlurmJob("7", "FAILED"), "failed", "bash: python: not found", id="said"),
        pytest.param(None, "failed", standing.FORGOTTEN_REASON, id="forgotten"),
    ],
)
def test_what_slurm_says(tmp_path: Path, job: SlurmJob | None, state: str, reason: str | None) -> None:
    (tmp_path / "slurm").mkdir()
    if job and job.state == "FAILED":
        (tmp_path / "slurm" / "7.out").write_text("bash: python: not found\n")
    point = reconcile_trial(tmp_path, noted(tmp_path, SENDING, SENT), {"7": job} if job else {})
    assert (point.state, point.reason) == (state, reason)


def test_a_submission_that_was_cut_short_is_found_by_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has forgotten the first element of the array, which has ended."""
    ledger.add_events(tmp_path, *(POINT | {"id": name, "directory": name} for name in ("a", "b")))
    ledger.add_events(tmp_path, {"event": "sending", "token": "t", "points": ["a", "b"]})
    monkeypatch.setattr(standing, "find_sent_jobs", lambda token: [])
    adopt_jobs(tmp_path)
    assert [p.state for p in ledger.read(tmp_path).trials] == ["queued", "queued"]  # type: ignore[union-attr]
    monkeypatch.setattr(standing, "find_sent_jobs", lambda token: [SlurmJob("5_1", "RUNNING")])
    adopt_jobs(tmp_path)
    assert [p.job for p in ledger.read(tmp_path).trials] == ["5_0", "5_1"]  # type: ignore[union-attr]


def test_a_submission_that_slurm_never_took_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "find_sent_jobs", lambda token: [])
    monkeypatch.setattr(standing, "UNKNOWN_SECONDS", -1.0)
    noted(tmp_path, SENDING)
    adopt_jobs(tmp_path)
    point = ledger.read(tmp_path).trials[0]  # type: ignore[union-attr]
    assert (point.state, point.reason) == ("failed", "its submission was interrupted")


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    noted(tmp_path)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "sent", "jobs": {"a"')
    assert noted(tmp_path, {"event": "ended", "id": "a", "code": 130}).state == "stopped"


def test_what_is_asked_comes_back(tmp_path: Path) -> None:
    asked = SweepSpec("why?", {"optimizer.lr": ("0.1", "0.2")}, {"optimizer.lr": "0.1"}, 0.05, 3.0)
    ledger.write_spec(tmp_path, asked)
    assert ledger.read_spec(tmp_path) == asked


def test_a_run_is_held_while_its_lock_is(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    ("varied", "name"),
    [
        pytest.param(["optimizer.lr=0.001", "training.seed=1"], "lr-0.001_seed-1", id="last-parts"),
        pytest.param(["dataset.seed=0", "training.seed=1"], "dataset.seed-0_training.seed-1", id="same-last-parts"),
        pytest.param(["optimizer.betas=[0.9,0.95]", "parallelism=3d"], "betas-0.9-0.95_parallelism-3d", id="a-list"),
        pytest.param(["+model.x='a/../b'"], "x-a-..-b", id="a-path"),
        pytest.param([], "run", id="none"),
    ],
)
def test_folders_are_named_after_what_varies(varied: list[str], name: str) -> None:
    assert sweep_trials._build_folder_name(varied) == name


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "same"),
    [
        full("cluster.time=10", True), ("name=y", True), full("training.seed=1", False),
        full("training.repeat=1", False), full("parallelism=fsdp", False), ("checkpoint=off", False),
    ],
)  # fmt: skip
def test_a_point_is_known_by_its_settings(override: str, same: bool) -> None:
    before, after = (compose_test_run(["name=x", "cluster=cpu", *more]) for more in ([], [override]))
    assert (identity.compute_trial_id(before) == identity.compute_trial_id(after)) == same


NODES = ["name=x", "cluster=h100", "parallelism=fsdp", "training.global_batch=65536"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "varied", "found"),
    [
        full(["cluster.nodes=2"], ["cluster.nodes=4"], [], 0, id="open-degrees-on-more-nodes"),
        full(["cluster.nodes=2"], ["cluster.nodes=4"], ["cluster.nodes=4"], None, id="nodes-are-varied"),
        pytest.param(["cluster.nodes=2,4"], ["cluster.nodes=4"], [], 1, id="it-is-one-of-those"),
        full(["cluster.nodes=2,4"], ["cluster.nodes=8"], [], None, id="it-could-be-any-of-those"),
        full(["cluster.nodes=2"], ["cluster.nodes=4", "training.seed=1"], [], None, id="another-seed"),
    ],
)
def test_a_point_is_found_again_on_other_machines(
    tmp_path: Path, before: list[str], after: list[str], varied: list[str], found: int | None
) -> None:
    counts = before[0].partition("=")[2].split(",")
    chosen = []
    for count in counts:
        run = compose_test_run([*NODES, f"cluster.nodes={count}", f"hydra.run.dir={tmp_path}/{count}"], remote=True)
        given = [f"cluster.nodes={count}"] if len(counts) > 1 else []
        chosen.append(Trial(sweep_trials.find_trial_id(run, given, ledger.read_trials(tmp_path)), (), run))
        sweep_trials.register_trials(tmp_path, chosen, SweepSpec())
    run = compose_test_run([*NODES, *after], remote=True)
    ids = [point.id for point in ledger.read_trials(tmp_path)]
    name = sweep_trials.find_trial_id(run, varied, ledger.read_trials(tmp_path))
    assert len(ids) == len(counts) and all(point.asked for point in ledger.read_trials(tmp_path))
    assert name == (identity.compute_trial_id(run) if found is None else ids[found])
    assert (name in ids) == (found is not None)


def test_a_copy_of_the_code_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    (root / "titan").mkdir(parents=True)
    (root / "titan" / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(sweep, "ROOT", root)
    first = sweep.copy_code(tmp_path / "s")
    assert sweep.copy_code(tmp_path / "s") == first and (first / "titan" / "a.py").read_text() == "a = 1\n"
    (root / "titan" / "a.py").write_text("a = 2\n")
    assert sweep.copy_code(tmp_path / "s") != first
    assert json.loads((first / identity.FROZEN).read_text())["code"]["titan"]


def test_status_shows_points_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted(tmp_path, {"event": "ended", "id": "a", "code": 1, "reason": "rank 3: ValueError: b"})
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 4.5, "tokens_per_second": 1234.5, "attempt": 2}\n'
    )
    assert status.main([str(tmp_path), "watch=false"]) == 1
    out = capsys.readouterr().out
    assert "1 trial: 1 failed" in out and "x=1           failed  2/3   4.5000" in out
    assert "x=1: rank 3: ValueError: b" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: there is no such directory"),
        (["/usr"], "holds neither a run nor a sweep"), ([], "DIRECTORY is missing"),
        (["x", "wach=true"], "did you mean 'watch'"),
        (["x", "seconds=0"], "must be at least 0.1"),
    ],
)  # fmt: skip
def test_status_refuses(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(arguments) == 2
    assert said in capsys.readouterr().err
