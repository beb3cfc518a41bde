"""Grids on a real Slurm: what is submitted, how points end, and what is said of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.slurm import state
from launchers.slurm.state import read_state
from tests.support.processes import ROOT, run_program, wait_for_end, wait_until
from tests.support.runs import TINY, compose_tiny_run, read_learned_values, train_run
from tests.support.slurm_cluster import Slurm
from tests.sweep.test_ladder import TINY_LADDER
from titan.metrics.reader import read_records
from titan.sweep import ledger
from titan.sweep.ledger import TrialState

LAUNCH = ["hydra/launcher=slurm", "hydra.launcher.poll_seconds=0.5", "metrics.sample_tokens=0"]
HARM = ["modules=[tests]", "optimizer._target_=tests.slurm.faults.Harmful"]
SECONDS = 600.0


def titan(folder: Path, *arguments: str, module: str = "titan.train", env: dict[str, str] | None = None) -> Any:
    """A command of titan's, in `folder`; gives exit code, output and errors."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=folder, capture_output=True, text=True, timeout=SECONDS,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def points(folder: Path, name: str) -> dict[str, TrialState]:
    sweep = read_state(folder / "runs" / name)
    assert sweep is not None
    return {" ".join(point.overrides): point for point in sweep.trials}


def one(folder: Path, name: str) -> TrialState:
    (point,) = points(folder, name).values()
    return point


@pytest.mark.full
def test_a_grid_of_several_shapes_then_the_same_command_then_a_larger_one(slurm: Slurm, tmp_path: Path) -> None:
    before = slurm.read_jobs().keys()
    grid = ["-m", "name=grid", *TINY, *LAUNCH, "parallelism=single,fsdp", "training.seed=0,1"]
    code, out, err = titan(tmp_path, *grid)
    assert (code, err) == (0, "")
    assert "1 node x 1 rank)" in out and "1 node x 2 ranks)" in out
    found = points(tmp_path, "grid")
    assert {p.state for p in found.values()} == {"finished"} and len(found) == 4
    arrays = {p.job.partition("_")[0] for p in found.values() if p.job}
    assert len(arrays) == 2
    wait_until(
        lambda: {slurm.read_jobs()[str(p.job)] for p in found.values()} == {"COMPLETED"}, "Slurm to know that all ended"
    )
    assert len(list((tmp_path / "runs/grid/slurm/code").iterdir())) == 1
    for word, point in found.items():
        layout = "fsdp2" if "fsdp" in word else "single"
        alone = compose_tiny_run(tmp_path / "alone" / point.id, point.overrides[1], layout=layout)
        train_run(alone)
        env = json.loads((Path(point.directory) / "env.json").read_text())
        here = compose_tiny_run(Path(point.directory), point.overrides[1], layout=layout)
        assert read_learned_values(here) == read_learned_values(alone) and env["code"]["commit"]
        assert (Path(point.directory) / "log" / "rank-0.log").read_text().count("Done after step 3 of 3") == 1

    code, out, err = titan(tmp_path, *grid, "cluster.time=10")
    assert (code, err) == (0, "") and "4 of 4 trials: finished" in out and len(slurm.read_jobs().keys() - before) == 4

    grown = [*grid[:-1], "training.seed=0,1,2", "cluster.tasks=node", "cluster.nodes=2"]
    code, out, err = titan(tmp_path, *grown, "hydra.launcher.dry_run=true")
    assert (code, err) == (0, "") and "4 of 6 trials: finished" in out and "\n2 trials: device-hours not" in out
    assert out.count("#SBATCH --nodes") == 2 and len(slurm.read_jobs().keys() - before) == 4
    code, out, err = titan(tmp_path, *grown)
    assert (code, err) == (0, "") and "4 of 6 trials: finished" in out and "2 nodes x 1 rank)" in out
    assert len(slurm.read_jobs().keys() - before) == 6 and {p.state for p in points(tmp_path, "grid").values()} == {
        "finished"
    }
    code, out, _ = titan(tmp_path, "runs/grid", module="titan.status")
    assert code == 0 and "6 trials: 6 finished" in out


@pytest.mark.full
def test_a_bad_point_stops_the_grid_with_nothing_submitted(slurm: Slurm, tmp_path: Path) -> None:
    before = slurm.read_jobs()
    tiny = [override for override in TINY if not override.startswith("model.heads=")]
    code, out, err = titan(tmp_path, "-m", "name=bad", *tiny, *LAUNCH, "model.heads=2,3,4")
    assert (code, out) == (2, "") and "trial 2 of the sweep" in err and "nothing was started" in err
    assert slurm.read_jobs() == before and not (tmp_path / "runs").exists()


@pytest.mark.full
def test_a_rank_that_raises_and_one_that_is_killed_are_told_and_do_not_stop_the_others(
    slurm: Slurm, tmp_path: Path
) -> None:
    faults = "0.002:raise:1,0.003:kill:1"
    grid = ["-m", "name=harm", *TINY, *LAUNCH, *HARM, "parallelism=fsdp", "optimizer.lr=0.001,0.002,0.003"]
    code, out, _ = titan(tmp_path, *grid, f"cluster.environment={{FAULTS:'{faults}'}}")
    found = points(tmp_path, "harm")
    assert code == 1
    assert {word: p.state for word, p in found.items()} == {
        "optimizer.lr=0.001": "finished", "optimizer.lr=0.002": "failed", "optimizer.lr=0.003": "failed",
    }  # fmt: skip
    raised = found["optimizer.lr=0.002"].reason or ""
    assert re.fullmatch(
        r"rank 1 on node\d: your code failed: .*faults\.py:\d+ in harm \(ZeroDivisionError: by rank 1\);.*", raised
    )
    assert "rank 1 on node" in str(found["optimizer.lr=0.003"].reason) and "killed" in str(
        found["optimizer.lr=0.003"].reason
    )
    assert f"failed    optimizer.lr=0.002  ({raised})" in out
    log = Path(found["optimizer.lr=0.002"].directory) / "log" / "rank-1.log"
    assert "ZeroDivisionError: by rank 1" in log.read_text()

    code, out, err = titan(tmp_path, *grid, "cluster.tasks=node", f"cluster.environment={{FAULTS:'{faults}'}}")
    assert code == 1 and "1 of 3 trials: finished" in out
    again = points(tmp_path, "harm")
    killed = again["optimizer.lr=0.003"].reason or ""
    assert re.fullmatch(r"rank 1 on node\d: killed by SIGKILL \(out of memory\?\)", killed)
    assert again["optimizer.lr=0.003"].submissions == 2

    code, out, err = titan(tmp_path, *grid)
    assert (code, err) == (0, "") and {p.state for p in points(tmp_path, "harm").values()} == {"finished"}


@pytest.mark.full
def test_a_job_whose_rank_died_goes_on_from_its_checkpoint_on_other_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """Also where jobs are chained; a run that fails before it has saved anything new is not restarted again."""
    run = [*TINY, *LAUNCH, *HARM, "parallelism=fsdp", "cluster.nodes=2", "checkpoint.every=1", "cluster.restarts=2"]
    run += ["cluster.environment={FAULTS:'0.001:kill:1'}", "hydra.launcher.wait=false"]
    loop = [*TINY, *LAUNCH, *HARM, "cluster.restarts=3", "cluster.environment={FAULTS:'0.001:always:0'}"]
    assert titan(tmp_path, "name=dead", *run, "training.steps=4")[0] == 0
    assert titan(tmp_path, "name=chain", *run, "training.steps=4", "cluster.chain=2")[0] == 0
    assert titan(tmp_path, "name=loop", *loop, "hydra.launcher.wait=false")[0] == 0
    wait_until(lambda: one(tmp_path, "dead").state == one(tmp_path, "chain").state == "finished", "the ends", SECONDS)
    for name in ("dead", "chain"):
        folder, point = tmp_path / "runs" / name, one(tmp_path, name)
        assert _from_steps(folder)[0] == 0 < _from_steps(folder)[1]
        (end,) = (e for e in folder.glob("slurm/*.end") if "restart" in e.read_text())
        bad = json.loads(end.read_text())["note"].rpartition(" ")[2]
        assert json.loads(end.read_text())["note"] == f"restart 1 of 2 without {bad}" and bad in slurm.nodes
        said = slurm.run("scontrol", "show", "job", "--oneliner", point.jobs[-1])
        assert f"ExcNodeList={bad} " in said and f" NodeList={bad}" not in said
    assert "restart 1 of 2 without node" in (tmp_path / "runs/dead/log/launcher.log").read_text()
    wait_until(lambda: one(tmp_path, "loop").state == "failed", "the end", SECONDS)
    assert "not restarted, since no checkpoint was saved" in str(one(tmp_path, "loop").reason)
    assert _from_steps(tmp_path / "runs/loop") == [0, 0]


@pytest.mark.full
def test_disturbed_runs_go_on_at_the_saved_step_and_learn_the_same(slurm: Slurm, tmp_path: Path) -> None:
    """One is preempted, one's node is lost, one comes to its time limit, one is cancelled."""
    rates = "0.001,0.002,0.003,0.004"
    small = ["training.steps=100", "checkpoint.every=10", f"optimizer.lr={rates}", "parallelism=fsdp"]
    slow = "cluster.environment={FAULTS:'0.001:slow:0,0.002:slow:0,0.003:slow:0,0.004:slower:0'}"
    job = ["cluster.exclusive=true", "cluster.time=60", "cluster.signal_seconds=150", "hydra.launcher.wait=false", slow]
    code, out, err = titan(tmp_path, "-m", "name=dis", *TINY, *LAUNCH, *HARM, *small, *job)
    assert (code, err) == (0, ""), err
    nodes = {}
    wait_until(lambda: len(_nodes(slurm, nodes)) == 4, "four running jobs", SECONDS)
    folders = {p.job: Path(p.directory) for p in points(tmp_path, "dis").values()}
    for name, folder in folders.items():
        enough = 2 if name == max(nodes) else 12
        wait_until(lambda at=folder, least=enough: _lines(at) >= least, f"steps of {name}", SECONDS)
    preempted, lost, cancelled, limited = sorted(nodes)
    slurm.run("sbatch", "-p", "high", "-w", nodes[preempted], "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    slurm.run("scancel", cancelled)
    slurm.run("scontrol", "update", f"JobId={limited}", "TimeLimit=2")  # from its start: so it hears of it at once
    # between two checkpoints: right after one, no step would be lost
    wait_until(lambda: 2 <= _lines(folders[lost]) % 10 <= 6, "steps after a checkpoint", SECONDS)
    slurm.kill_node(nodes[lost])
    slurm.revive_node(nodes[lost])
    wait_until(lambda: list((tmp_path / "runs/dis/slurm").glob(f"{limited}.0.end")), "the end of an attempt", SECONDS)
    slurm.run("scontrol", "update", f"JobId={limited}", "TimeLimit=60")
    wait_until(
        lambda: all(p.state in ("finished", "stopped") for p in points(tmp_path, "dis").values()), "the ends", SECONDS
    )
    found = {str(p.job): p for p in points(tmp_path, "dis").values()}
    assert {job: p.state for job, p in found.items()} == {
        preempted: "finished", lost: "finished", limited: "finished", cancelled: "stopped",
    }  # fmt: skip
    assert found[cancelled].reason == "cancelled" and (folders[cancelled] / "checkpoints").is_dir()
    code, out, err = titan(tmp_path, "-m", "name=dis", *TINY, *LAUNCH, *HARM, *small, "cluster.exclusive=true")
    assert (code, err) == (0, "") and "3 of 4 trials: finished" in out
    for job, point in found.items():
        run = compose_tiny_run(Path(point.directory), *small[:2], *point.overrides, layout="fsdp2")
        whole = compose_tiny_run(tmp_path / "whole" / job, *small[:2], *point.overrides, layout="fsdp2")
        train_run(whole)
        assert read_learned_values(run) == read_learned_values(whole), job
        begun = _from_steps(Path(point.directory))
        assert len(begun) >= 2 and all(step > 0 for step in begun[1:])
        again = _lines(Path(point.directory)) - 100
        assert 0 < again < 20 if job == lost else again == 0, "only what was not asked to end does steps twice"


def _nodes(slurm: Slurm, nodes: dict[str, str]) -> dict[str, str]:
    """The node of each job that has run."""
    for line in slurm.run("squeue", "--noheader", "--array", "--states=running", "--format=%i %N").splitlines():
        if len(line.split()) == 2:
            nodes[line.split()[0]] = line.split()[1]
    return nodes


def _lines(run: Path) -> int:
    """Steps that a run has written down, those that it did twice twice."""
    return sum("loss" in line for line in read_records(run / "metrics.jsonl"))


def _from_steps(run: Path) -> list[int]:
    import yaml

    return [int(d["from_step"]) for d in yaml.safe_load_all((run / "run.yaml").read_text())]


@pytest.mark.full
def test_a_chain_of_jobs_in_place_of_requeueing(slurm: Slurm, tmp_path: Path) -> None:
    slow = "cluster.environment={FAULTS:'0.001:slow:0'}"
    chain = ["cluster.chain=3", slow, "training.steps=60", "hydra.launcher.wait=false"]
    own = {"SUBMITIT_PREEMPT_SIGNAL": "USR1"}
    code, _, err = titan(
        tmp_path, "name=chained", *TINY, *LAUNCH, *HARM, *chain, "cluster.sbatch={comment:own}", env=own
    )
    assert (code, err) == (0, "")
    scripts = list((tmp_path / "runs/chained/slurm").glob("*_submission.sh"))
    assert len(scripts) == 3 and {script.stat().st_mode & 0o777 for script in scripts} == {0o600}
    (point,) = points(tmp_path, "chained").values()
    assert len(point.jobs) == 3
    wait_until(lambda: _lines(Path(point.directory)) >= 5, "five steps", SECONDS)
    assert point.jobs[0] in [job.id for job in state.find_sent_jobs(_token(tmp_path / "runs/chained"))]
    slurm.run("scancel", "--signal=USR1", point.jobs[0])
    wait_until(
        lambda: {slurm.read_jobs().get(job) for job in point.jobs} <= {"COMPLETED", "FAILED"}, "all jobs", SECONDS
    )
    (point,) = points(tmp_path, "chained").values()
    states = [slurm.read_jobs()[job] for job in point.jobs]
    assert point.state == "finished" and states == ["FAILED", "COMPLETED", "COMPLETED"]
    assert len(_from_steps(Path(point.directory))) == 2


def _token(sweep: Path) -> str:
    return next(str(event["token"]) for event in ledger.read_events(sweep) if event["event"] == "sending")


@pytest.mark.full
def test_a_ledger_goes_on_after_its_launcher_was_killed(slurm: Slurm, tmp_path: Path) -> None:
    before = slurm.read_jobs().keys()
    grid = [
        "-m",
        f"hydra.sweep.dir={tmp_path}/runs/cut",
        *TINY,
        *LAUNCH,
        "training.seed=0,1,2",
        "hydra.launcher.array_size=1",
    ]
    slow = {**slurm.env, "PATH": f"{_slow_sbatch(tmp_path)}{os.pathsep}{os.environ['PATH']}"}
    with run_program("-m", "titan.train", *grid, env=slow) as process:
        wait_until(lambda: (tmp_path / "second").exists(), "the second submission", SECONDS)
        process.send_signal(signal.SIGKILL)
        wait_for_end(process)
    wait_until(lambda: len(slurm.read_jobs().keys() - before) == 2, "the second job")
    assert [e["event"] for e in ledger.read_events(tmp_path / "runs/cut")][-3:] == ["sending", "sent", "sending"]
    code, _, err = titan(tmp_path, *grid)
    assert (code, err) == (0, "") and len(slurm.read_jobs().keys() - before) == 3
    assert [(p.state, p.submissions) for p in points(tmp_path, "cut").values()] == [("finished", 1)] * 3


def _slow_sbatch(folder: Path) -> Path:
    """A folder with an sbatch that tells of its second call and then takes a while to answer."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    place = folder / "bin"
    place.mkdir()
    (place / "sbatch").write_text(
        f'#!/bin/bash\n{real} "$@" > {folder}/said\n'
        f"if [ -e {folder}/first ]; then touch {folder}/second; sleep 30; fi\ntouch {folder}/first\ncat {folder}/said\n"
    )
    (place / "sbatch").chmod(0o755)
    return place


@pytest.mark.full
def test_no_more_jobs_in_the_queue_than_allowed(slurm: Slurm, tmp_path: Path) -> None:
    before = slurm.read_jobs().keys()
    grid = ["-m", "name=few", *TINY, *LAUNCH, "training.seed=0,1,2", "hydra.launcher.max_jobs=2"]
    code, out, err = titan(tmp_path, *grid, "hydra.launcher.wait=false")
    assert (code, err) == (0, "") and len(slurm.read_jobs().keys() - before) == 2 and "not submitted: 1 trial (" in out
    code, out, err = titan(tmp_path, *grid)
    assert (code, err) == (0, "") and {p.state for p in points(tmp_path, "few").values()} == {"finished"}


@pytest.mark.full
def test_a_limit_is_the_whole_grid_s_whatever_its_shapes_and_submissions(slurm: Slurm, tmp_path: Path) -> None:
    """Two may run: so of four jobs of two shapes two come after others, and what is submitted later after all those."""
    slow = [*HARM, "cluster.environment={FAULTS:'0.001:slower:0'}", "training.steps=300", "hydra.launcher.wait=false"]
    grid = ["-m", "name=lanes", *TINY, *LAUNCH, *slow, "hydra.launcher.at_once=2", "parallelism=single,fsdp"]
    assert titan(tmp_path, *grid, "training.seed=0,1")[0] == 0
    assert titan(tmp_path, *grid, "training.seed=0,1,2")[0] == 0
    jobs = [str(point.job) for point in points(tmp_path, "lanes").values()]
    shown = (slurm.run("scontrol", "show", "job", "--oneliner", job).partition(" Dependency=")[2] for job in jobs)
    after = [set(re.findall(r"afterany:(\d+)", text.split()[0])) for text in shown]
    assert after == [set(), set(), {jobs[0]}, {jobs[1]}, {jobs[0], jobs[2]}, {jobs[1], jobs[3]}]
    assert titan(tmp_path, "-m", "name=array", *grid[2:-1], "parallelism=single", "training.seed=0,1,2")[0] == 0
    script = next((tmp_path / "runs/array/slurm").glob("*_submission.sh")).read_text()
    assert "#SBATCH --array=0-2%2\n" in script and "dependency" not in script


@pytest.mark.full
def test_devices_are_those_that_slurm_gives(slurm: Slurm, tmp_path: Path) -> None:
    """GPUs are simulated, so on its node the run is refused for want of a GPU build of torch."""
    node = ["cluster.device=cuda", "cluster.devices_per_node=2", "cluster.device_name=NVIDIA H100"]
    show = "cluster.setup=['echo GPUS $CUDA_VISIBLE_DEVICES']"
    code, out, _ = titan(tmp_path, "name=gpus", *TINY, *LAUNCH, "parallelism=fsdp", "cluster=auto", *node, show)
    (point,) = points(tmp_path, "gpus").values()
    words = (tmp_path / "runs/gpus/slurm" / f"{point.job}.out").read_text()
    assert code == 1 and "1 node x 2 GPUs" in out and "GPUS 0,1" in words
    assert "the installed torch is built for the CPU only" in str(point.reason)


@pytest.mark.full
@pytest.mark.parametrize("by", ["scancel", "launcher"])
def test_waiting_ends_with_the_jobs_or_before_them(slurm: Slurm, tmp_path: Path, by: str) -> None:
    slow = "cluster.environment={FAULTS:'0.001:slow:0'}"
    run = ["-m", "titan.train", f"hydra.run.dir={tmp_path}/run", *TINY, *LAUNCH, *HARM, "training.steps=300", slow]
    with run_program(*run, env=slurm.env) as process:
        wait_until(lambda: _lines(tmp_path / "run") >= 3, "three steps", SECONDS)
        (job,) = (name for name, state in slurm.read_jobs().items() if state == "RUNNING")
        slurm.run("scancel", job) if by == "scancel" else process.send_signal(signal.SIGINT)
        code, out, _ = wait_for_end(process)
    assert code == 130
    if by == "launcher":
        assert "The jobs continue" in out and f"scancel {job}" in out and slurm.read_jobs()[job] == "RUNNING"
        before = slurm.read_jobs()
        code, out, err = titan(tmp_path, *run[2:], "hydra.launcher.wait=false")
        assert (code, err) == (0, "") and "1 of 1 trial: running" in out and slurm.read_jobs().keys() == before.keys()
    else:
        assert "stopped" in out and "(cancelled)" in out


@pytest.mark.full
def test_what_is_submitted_runs_also_when_the_checkout_changes_and_is_where_jobs_start(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The job starts in a checkout whose code has been broken meanwhile; its own lines stop at errors."""
    checkout = tmp_path / "checkout"
    for part in ("titan", "launchers", "conf"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    setup = f"cluster.setup=['set -euo pipefail','while [ ! -e {tmp_path}/go ]; do sleep 0.1; done']"
    run = ["name=kept", *TINY, *LAUNCH, setup, "hydra.launcher.wait=false"]
    code, _, err = titan(checkout, *run, env={"PYTHONPATH": str(checkout), "SBATCH_EXPORT": "NONE"})
    assert (code, err) == (0, "")
    (checkout / "titan" / "worker.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "go").touch()
    wait_until(lambda: one(checkout, "kept").state in ("finished", "failed"), "the end", SECONDS)
    assert one(checkout, "kept").state == "finished"


@pytest.mark.full
def test_a_single_run_is_known_by_its_directory(slurm: Slurm, tmp_path: Path) -> None:
    run = ["name=one", *TINY, *LAUNCH]
    before = slurm.read_jobs().keys()
    assert titan(tmp_path, *run)[0] == 0
    code, out, _ = titan(tmp_path, *run)
    assert code == 0 and "is finished: 3 steps; nothing to do" in out
    code, _, err = titan(tmp_path, *run, "optimizer.lr=0.5")
    assert code == 2 and "holds another experiment (optimizer.lr was" in err
    code, _, err = titan(tmp_path, *run, "training.steps=2")
    assert code == 2 and "has 3; give 3 or more" in err and len(slurm.read_jobs().keys() - before) == 1
    code, _, err = titan(tmp_path, *run, "training.steps=4", "parallelism=fsdp")
    assert (code, err) == (0, "") and len(_from_steps(tmp_path / "runs/one")) == 2
    (tmp_path / "runs/foreign").mkdir()
    (tmp_path / "runs/foreign/a.txt").touch()
    code, _, err = titan(tmp_path, "name=foreign", *TINY, *LAUNCH)
    assert code == 2 and "holds no run" in err and len(list((tmp_path / "runs/foreign").iterdir())) == 1


@pytest.mark.full
def test_a_job_is_not_started_more_often_than_allowed(slurm: Slurm, tmp_path: Path) -> None:
    slow = "cluster.environment={FAULTS:'0.001:slow:0'}"
    run = ["name=often", *TINY, *LAUNCH, *HARM, slow, "training.steps=300", "cluster.requeues=0"]
    assert titan(tmp_path, *run, "hydra.launcher.wait=false")[0] == 0
    (point,) = points(tmp_path, "often").values()
    wait_until(lambda: _lines(Path(point.directory)) >= 3, "three steps", SECONDS)
    slurm.run("scontrol", "requeue", str(point.job))
    wait_until(lambda: one(tmp_path, "often").state == "stopped", "the end", SECONDS)
    reason = one(tmp_path, "often").reason
    assert reason == "started again more often than cluster.requeues=0 allows"


@pytest.mark.full
def test_a_grid_below_a_link(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    grid = ["-m", "name=linked", *TINY, *LAUNCH, "training.seed=0"]
    assert titan(tmp_path, *grid)[0] == 0
    code, out, err = titan(tmp_path, *grid)
    assert (code, err) == (0, "") and "1 of 1 trial: finished" in out


@pytest.mark.full
def test_a_ladder_waits_for_each_batch_and_predicts_before_the_largest(slurm: Slurm, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    code, out, err = titan(tmp_path, "-m", "name=ladder", *TINY_LADDER, *LAUNCH, env=env)
    assert (code, err) == (0, "")
    found = points(tmp_path, "ladder")
    assert {p.state for p in found.values()} == {"finished"} and len(found) == 16
    written = (tmp_path / "runs/ladder/prediction.json").stat().st_mtime
    first = min(p.sent_at for name, p in found.items() if "model.dim=32" in name)
    assert max(p.sent_at for name, p in found.items() if "model.dim=32" not in name) < written < first
    assert "your predictions so far: " in out and (tmp_path / "state/titan/predictions.jsonl").exists()


@pytest.mark.full
def test_a_search_has_a_job_for_each_trial_and_goes_on_after_a_kill(slurm: Slurm, tmp_path: Path) -> None:
    """The sweeper is killed while two jobs run; the same command then reads their results and submits the others."""
    before = slurm.read_jobs().keys()
    words = [
        "-m", f"hydra.sweep.dir={tmp_path}/runs/search", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=2", *TINY, *LAUNCH, "evaluation.tokens=64", "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    ]  # fmt: skip
    with run_program("-m", "titan.train", *words, env=slurm.env) as process:
        wait_until(lambda: len(slurm.read_jobs().keys() - before) >= 2, "the jobs of two trials", 120.0)
        process.send_signal(signal.SIGKILL)
        wait_for_end(process)
    code, out, err = titan(tmp_path, *words)
    assert (code, err) == (0, "")
    found = points(tmp_path, "search")
    jobs = slurm.read_jobs().keys() - before
    assert len(jobs) == len(found) == 4, "no trial was submitted twice"
    assert {slurm.read_jobs()[job] for job in jobs} == {"COMPLETED"}
    losses = [json.loads(f.read_text())["validation_loss"] for f in (tmp_path / "runs/search").glob("*/result.json")]
    best = yaml.safe_load((tmp_path / "runs/search/optimization_results.yaml").read_text())
    assert len(losses) == 4 and best["best_value"] == min(losses)
    assert "study: 4 complete" in out
