"""What a job asks Slurm for, and the script that it runs; without a Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import state
from launchers.slurm.script import EPILOGUE, PROLOGUE, Submission, build_parameters, build_script, derive_job_shape
from launchers.slurm.state import Lanes
from launchers.slurm.sweep import SlurmSweep, _check_controller
from launchers.trials import Trial
from tests.support.composing import compose_test_run
from tests.support.tiers import full
from titan.cluster import rank_error
from titan.cluster.checks import parse_minutes
from titan.cluster.rank_error import RankError
from titan.cluster.signals import PREEMPT
from titan.errors import EXIT_REQUEUE, ConfigError, RunError
from titan.run.compose import compose_run
from titan.run.run import Run
from titan.sweep import job_exit
from titan.sweep.ledger import SLURM, State, SweepSpec, TrialState
from titan.sweep.schema import SlurmLaunch
from titan.training.signals import StopSignals


def job(*overrides: str) -> Run:
    return compose_test_run(["name=x", *overrides], remote=True)


def work(folder: Path, count: int = 1, after: str | None = None) -> Submission:
    return Submission(folder, folder / "t.json", "grid", "titan-1", folder / "code", count, None, after)


@pytest.mark.parametrize(
    ("overrides", "nodes", "ranks", "gpus"),
    [
        pytest.param(["cluster=cpu"], 1, 1, 0, id="one"),
        full(["cluster=cpu", "parallelism=3d"], 1, 8, 0, id="as-the-layout-asks"),
        full(["cluster=cpu", "parallelism=3d", "cluster.nodes=2"], 2, 4, 0, id="spread"),
        full(["cluster=cpu", "parallelism=single", "cluster.nodes=2"], 1, 1, 0, id="too-few-to-spread"),
        full(["cluster=cpu", "parallelism=fsdp", "cluster.devices_per_node=2"], 1, 2, 0, id="open-fills-nodes"),
        pytest.param(["cluster=h100", "parallelism=single"], 1, 1, 1, id="one-gpu"),
        full(["cluster=h100", "cluster.nodes=2", "parallelism=fsdp"], 2, 8, 8, id="all-gpus"),
        full(["cluster=h100", "parallelism=ddp", "parallelism.replicate=16"], 2, 8, 8, id="gpus-given"),
    ],
)
def test_shapes(overrides: list[str], nodes: int, ranks: int, gpus: int) -> None:
    found = derive_job_shape(job(*overrides))
    assert (found.nodes, found.ranks, found.gpus, found.devices) == (nodes, ranks, gpus, nodes * ranks)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        full("90", 90), full("1:30", 2), full("10:00", 10), ("1:30:00", 90), full("1-0", 1440),
        full("1-12:30", 2190), full("0-0:0:30", 1), full(None, None), ("90min", 90),
        full("12h", 720), full("5d", 7200), full("61s", 2),
    ],
)  # fmt: skip
def test_time_limits(time: str | None, expected: int | None) -> None:
    assert parse_minutes(time) == expected


@pytest.mark.parametrize("written", ["24:00:00", "1:00:00"])
def test_a_time_limit_that_yaml_reads_as_a_number_is_rejected(written: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/site.yaml").write_text(f"defaults: [h100, _self_]\ntime: {written}\n")
    with pytest.raises(ConfigError, match="between quotes"):
        compose_run(["cluster=site", f"hydra.searchpath=[file://{tmp_path}]", "parallelism=ddp"], remote=True)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        full("parallelism=3d cluster.nodes=3", r"8 ranks .* don't spread evenly over 3 nodes", id="uneven"),
        full("cluster.time=soon", "cluster.time=soon: not understood", id="words"),
        full("cluster.time=0", "must be above zero", id="zero"),
        full("cluster.time=2", "no longer than cluster.signal_seconds=120", id="shorter-than-the-signal"),
        full("cluster.container=pyxis", "needs an image", id="no-image"),
        full("cluster.image=x", "no container is chosen", id="no-container"),
        full("cluster.sbatch={output:x}", "titan sets output itself", id="taken"),
        full("cluster.exclusive=maybe", "expected true, false or auto", id="exclusive"),
        full("cluster.partition='a\nb'", "has a control character", id="line-in-a-name"),
        pytest.param("cluster.modules=['a\nb']", "has a control character", id="line-in-a-module"),
    ],
)
def test_jobs_that_no_site_can_run(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        derive_job_shape(job("cluster=cpu", *([override] if "\n" in override else override.split())))


@pytest.mark.full
def test_what_is_asked_for_is_said_to_sbatch(tmp_path: Path) -> None:
    site = {
        "partition": "p", "account": "a", "qos": "q", "reservation": "r", "constraint": "c", "exclude": "n1",
        "gres": "gpu:h100:8", "exclusive": "true", "time": "2:00:00", "node_memory_gib": "64", "cpus_per_rank": "4",
        "sbatch": "{mail-type:END}", "signal_seconds": "300",
    }  # fmt: skip
    run = job("cluster=h100", "parallelism=fsdp", *(f"cluster.{name}={value}" for name, value in site.items()))
    script = build_script(derive_job_shape(run), work(tmp_path, count=3, after="7"))
    for line in (
        "partition=p", "account=a", "qos=q", "reservation=r", "constraint=c", "exclude=n1", "gres=gpu:h100:8",
        "exclusive", "time=120", "mem=65536M", "cpus-per-task=4", "mail-type=END", "signal=USR2@300", "array=0-2%3",
        "nodes=1", "ntasks-per-node=8", "dependency=afterany:7", "comment=titan-1", "requeue",
        f"output={tmp_path}/%A_%a.out",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in script
    assert "gpus-per-node" not in script and "wckey" not in script


ASKED = {
    "whole-nodes": (["parallelism=fsdp"], {"exclusive", "cpus-per-task=12", "mem=0"}),
    "one-gpu-of-eight": (["parallelism=single"], {"cpus-per-task=12", "mem=131072M"}),
    "told": (["parallelism=single", "cluster.exclusive=true"], {"exclusive", "cpus-per-task=12", "mem=0"}),
    "taken-back": (
        ["parallelism=fsdp", "cluster.cpus_per_rank=null", "cluster.rank_memory_gib=null", "cluster.exclusive=false"],
        set(),
    ),
    "memory-given": (
        ["parallelism=fsdp", "cluster.node_memory_gib=64"], {"exclusive", "cpus-per-task=12", "mem=65536M"}
    ),
    "a-program": (["parallelism=fsdp", "cluster.tasks=node"], {"exclusive", "cpus-per-task=96", "mem=0"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("a100", "one-gpu-of-eight"), ("a100", "memory-given"), ("h100", "one-gpu-of-eight"), ("h200", "whole-nodes"),
        ("h200", "taken-back"), full("h100", "told"), full("h100", "a-program"),
    ],
)  # fmt: skip
def test_nodes_of_gpus_are_asked_for_with_cores_and_memory(tmp_path: Path, cluster: str, name: str) -> None:
    overrides, asked = ASKED[name]
    script = build_script(derive_job_shape(job(f"cluster={cluster}", *overrides)), work(tmp_path))
    lines = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {line for line in lines if re.match("exclusive|cpus|mem", line)} == asked


def test_a_comment_is_the_users_own_and_the_name_finds_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job("cluster=cpu", "cluster.sbatch={comment:'team|a b'}")
    odd = Submission(tmp_path, tmp_path / "t.json", "a|b\nc", "titan-0123456789ab", tmp_path / "code", 1)
    script = build_script(derive_job_shape(run), odd)
    assert "#SBATCH --comment='team|a b'\n" in script and script.count("--comment=") == 1
    (name,) = (line.partition("=")[2] for line in script.splitlines() if line.startswith("#SBATCH --job-name="))
    assert name == "a-b-c-titan-0123456789ab"
    line = f"7|PENDING|None||{name}|team|a b\n8|RUNNING|None|n1|other|x|titan-0123456789ab\n9|RUNNING|None|n1|other|\n"
    monkeypatch.setattr(state, "run_command", lambda *command: line)
    assert [found.id for found in state.find_sent_jobs("titan-0123456789ab")] == ["7"]
    assert state.list_own_jobs()[0] == state.SlurmJob("7", "PENDING", "None", "", "team|a b", name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "variable", "name", "code"),
    [
        pytest.param([], None, "USR2", 140, id="titan's own"),
        pytest.param([], "USR1", "USR1", 138, id="environment"),
        pytest.param([], "SIGUSR1", "USR1", 138, id="long name"),
        pytest.param(["cluster.environment={SUBMITIT_PREEMPT_SIGNAL:USR1}"], "USR2", "USR1", 138, id="cluster"),
    ],
)
def test_the_signal_before_preemption_is_one_for_sbatch_script_and_ranks(
    overrides: list[str], variable: str | None, name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREEMPT, variable) if variable else monkeypatch.delenv(PREEMPT, raising=False)
    script = build_script(derive_job_shape(job("cluster=cpu", *overrides)), work(tmp_path))
    assert f"#SBATCH --signal={name}@120\n" in script
    assert f"case $code in {code}) code={EXIT_REQUEUE}" in script
    assert script.rindex(f"export {PREEMPT}={name}\n") > script.rfind("export SUBMITIT_PREEMPT_SIGNAL=USR1\n") - 1
    monkeypatch.setenv(PREEMPT, name)
    with StopSignals(scheduled=True) as stop:
        signal.raise_signal(signal.Signals[f"SIG{name}"])
        assert stop.requested and stop.requeue


def test_a_signal_that_means_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREEMPT, "TERM")
    with pytest.raises(ConfigError, match="SUBMITIT_PREEMPT_SIGNAL=TERM: only USR1 and USR2"):
        build_script(derive_job_shape(job("cluster=cpu")), work(tmp_path))


def test_what_is_not_asked_for_is_left_to_the_site(tmp_path: Path) -> None:
    script = build_script(derive_job_shape(job("cluster=cpu")), work(tmp_path))
    asked = {line.removeprefix("#SBATCH --").partition("=")[0] for line in script.splitlines() if "#SBATCH" in line}
    assert asked == {"comment", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "requeue", "signal"}


def test_a_node_s_program_is_one_task_with_the_cores_of_its_ranks(tmp_path: Path) -> None:
    asked = build_parameters(
        derive_job_shape(job("cluster=h100", "parallelism=fsdp", "cluster.tasks=node")), work(tmp_path)
    )
    assert (asked["ntasks_per_node"], asked["cpus_per_task"], asked["gpus_per_node"]) == (1, 96, 8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        full(["cluster.container=pyxis"], ["--container-image=a b", "--container-mounts=/d:/d,/e"], id="pyxis"),
        pytest.param(["cluster.container=apptainer"], ["exec", "--bind", "/e", "a b", "/opt/python"], id="apptainer"),
    ],
)
def test_containers_and_quoting(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    """The script is run by bash, with an srun that tells its arguments and its environment."""
    own = ["cluster.image='a b'", "cluster.mounts=['/d:/d','/e']", "cluster.python=/opt/python"]
    odd = "cluster.environment={ODD:'a \"b\" c'}"
    folder = tmp_path / "with space"
    done = ran(folder, job(*own, *overrides, odd, "cluster.srun=['--cpu-bind=cores']"), "exit 0")
    said = (tmp_path / "said").read_text().splitlines()
    assert set(words) <= set(said) and "--cpu-bind=cores" in said and "--export=ALL" in said
    assert f"{folder}/9.0" in said and 'ODD=a "b" c' in said and "PYTHONSAFEPATH=1" in said
    assert done == {"code": 0, "again": False, "state": "RUNNING", "why": "", "note": ""}


def test_ranks_find_a_folder_for_each_node_and_an_empty_file_for_rank_0_s_address(tmp_path: Path) -> None:
    """srun makes no folders, and a file that is missed once a shared folder's client may go on missing for a while."""
    folder, run = tmp_path / "with space", job("cluster=cpu", "parallelism=3d", "cluster.nodes=2")
    there = f'(cd {ATTEMPT}" && find . | sort) > "$HOME/there"; echo x >{ATTEMPT}/1/7.out"; echo x >{ATTEMPT}/meet"'
    ran(folder, run, f'{there}; touch {ATTEMPT}/0/0.out"; exit 0', nodes=2)
    assert (tmp_path / "there").read_text().split() == [".", "./0", "./1", "./meet"]
    assert f"--output={folder}/9.0/%n/%t.out" in (tmp_path / "said").read_text().splitlines()
    left = sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))
    assert left == ["9.0", "9.0.end", "9.0/1", "9.0/1/7.out"], "what is empty goes, as does the address"


ATTEMPT = '"$HOME/with space/9.0'


@pytest.mark.parametrize(
    ("ranks", "state", "restarts", "code", "again"),
    [
        pytest.param("exit 0", "RUNNING", 0, 0, False, id="done"),
        full("exit 1", "RUNNING", 0, 1, False, id="failed"),
        pytest.param(f"touch {ATTEMPT}/again\"; exit 0", "RUNNING", 0, EXIT_REQUEUE, True, id="told-to-save-and-end"),
        full(f"touch {ATTEMPT}/again\"; exit 137", "RUNNING", 0, EXIT_REQUEUE, True, id="one-killed-for-it"),
        full(f"touch {ATTEMPT}/again\"; exit 0", "", 0, EXIT_REQUEUE, True, id="told-and-squeue-silent"),
        full("exit 140", "RUNNING", 0, EXIT_REQUEUE, True, id="told-before-it-listened"),
        pytest.param(f"touch {ATTEMPT}/again\"; exit 0", "RUNNING", 3, EXIT_REQUEUE, False, id="too-often"),
        full(f"touch {ATTEMPT}/stop\"; exit 0", "RUNNING", 0, 130, True, id="preempted-by-sigterm"),
        pytest.param(f"touch {ATTEMPT}/stop\"; exit 0", "COMPLETING", 0, 130, False, id="cancelled"),
        pytest.param("exit 143", "", 0, 130, False, id="ended-and-squeue-silent"),
        full(f"touch {ATTEMPT}/0/0.error\"; exit 130", "RUNNING", 0, 1, False, id="failed-and-others-ended"),
        pytest.param('echo "srun: error: n1: task 1: Killed" >&2; exit 143', "RUNNING", 0, 1, False, id="killed"),
    ],
)  # fmt: skip
def test_how_a_job_s_end_is_judged(
    tmp_path: Path, ranks: str, state: str, restarts: int, code: int, again: bool
) -> None:
    done = ran(tmp_path / "with space", job("cluster.requeues=3"), ranks, state, restarts)
    assert (done["code"], done["again"]) == (code, again)
    assert (tmp_path / "requeued").exists() == again
    end = job_exit.read_last_exit(tmp_path / "with space", "9")
    assert end is not None and end.stopped == (code in (EXIT_REQUEUE, 130))


def test_a_chain_leaves_word_for_those_that_follow(tmp_path: Path) -> None:
    run = job("cluster.chain=2")
    assert ran(tmp_path / "with space", run, f'touch {ATTEMPT}/again"; exit 0')["again"]
    assert not (tmp_path / "requeued").exists() and not list(tmp_path.glob("*/*.over"))
    assert ran(tmp_path / "with space", run, "exit 0")["code"] == 0
    assert list(tmp_path.glob("*/*.over"))
    (tmp_path / "with space" / "9.0.end").unlink()
    assert ran(tmp_path / "with space", run, "exit 1") == {}, "the next one has nothing to do"


def _error(code: int, node: str, time: float = 2.0, lost: bool = False) -> str:
    """A shell command that leaves a rank's error as `launchers.slurm.job` does."""
    content = {"lost": lost, "killed": False, "time": time, "node": node, "code": code, "rank": 0, "plain": False}
    said = json.dumps(content | {"text": 'x "code": 2, y'})
    return f'echo {shlex.quote(said)} >{ATTEMPT}/0/{code}{node}.error"'


KILLED = 'echo "srun: error: n1: task 1: Killed" >&2; exit 137'
AFTERWARDS = 'echo "srun: Terminating StepId=9.0" >&2; echo "srun: error: n1: task 1: Killed" >&2'
LOST = f"{_error(1, 'n2', lost=True)}; {AFTERWARDS}; exit 137"
DIFFER = f"{_error(1, 'n1,n2')}; exit 1"
FIRST = f"{_error(1, 'n2')}; {_error(1, 'n3', 1.0)}; {AFTERWARDS}; exit 137"


@pytest.mark.parametrize(
    ("ranks", "record", "unfit", "note", "node"),
    [
        full(KILLED, "", "", "restart 1 of 2 without n1", "n1", id="a-rank-is-killed"),
        pytest.param(FIRST, "", "", "restart 1 of 2 without n3", "n3", id="the-first-to-fail"),
        full(LOST, "", "", "restart 1 of 2 without n1", "n1", id="others-had-lost-it"),
        pytest.param(DIFFER, "", "", "restart 1 of 2 without n1,n2", "n1,n2", id="replicas-differ"),
        pytest.param(KILLED, "4\n", "", "restart 2 of 2 without n1", "n1", id="with-a-newer-checkpoint"),
        full(KILLED, "6\n", "", "not restarted, since no checkpoint was saved", None, id="a-loop"),
        pytest.param(KILLED, "2\n4\n", "", "cluster.restarts=2 is used up", None, id="too-often"),
        pytest.param(KILLED, "", "configuration is not available", "restart 1 of 2", None, id="no-other-node"),
        full(f"{_error(2, 'n1')}; exit 2", "", "", "", None, id="refused"),
        pytest.param("exit 143", "", "", "", None, id="stopped"),
    ],
)
def test_a_job_whose_rank_died_is_restarted_elsewhere_while_it_gets_on(
    tmp_path: Path, ranks: str, record: str, unfit: str, note: str, node: str | None
) -> None:
    folder, attempt = tmp_path / "with space", record.count("\n")
    folder.mkdir()
    (tmp_path / "unfit").write_text(unfit)
    for step in (2, 6):
        (tmp_path / f"run/checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step-{step}/manifest.json").touch()
    (tmp_path / "run/checkpoints/step-8").mkdir()
    (folder / "t.runs").write_text(f"{tmp_path}/run\n")
    (folder / "9.restarts").write_text(record)
    done = ran(
        folder, job("cluster.restarts=2", "cluster.requeues=0"), ranks, "" if "143" in ranks else "RUNNING", attempt
    )
    said = (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
    assert done["note"].startswith(note) and done["again"] == note.startswith("restart") == ("requeue 9" in said)
    assert (f"update JobId=9 ExcNodeList=n9,{node}\n" in said) if node else "ExcNodeList" not in said
    left = (folder / "9.restarts").read_text() if (folder / "9.restarts").exists() else ""
    assert left == record + "6\n" * note.startswith("restart")


@pytest.mark.full
def test_the_script_reads_what_ranks_write(tmp_path: Path) -> None:
    """Several errors, of which the one on n3 came first; a rank on n1 had only lost the connection to it."""
    errors = (("n1", 0.5, True), ("n2", 2.0, False), ("n3", 1.0, False), ("n4", 3.0, False))
    for rank, (node, time, lost) in enumerate(errors):
        error = RankError(rank=rank, text='E: x "code": 2, y', time=time, node=node, lost=lost)
        rank_error.write(tmp_path / "errors" / f"{rank}.error", error)
    ranks = f'cp {tmp_path}/errors/* {ATTEMPT}/0/"; exit 1'
    done = ran(tmp_path / "with space", job("cluster.restarts=1", "cluster.requeues=0"), ranks)
    assert done["note"] == "restart 1 of 1 without n3"
    rank_error.write(tmp_path / "errors" / "2.error", rank_error.describe_error(ConfigError("a=b: wrong."), 2))
    (tmp_path / "with space" / "9.restarts").unlink()
    assert not ran(tmp_path / "with space", job("cluster.restarts=1", "cluster.requeues=0"), ranks)["again"]


def ran(
    folder: Path, run: Run, ranks: str, state: str = "RUNNING", restarts: int = 0, nodes: int = 1
) -> dict[str, Any]:
    """Run a job's script with stand-ins for Slurm's commands; gives what it left of its end."""
    home = folder.parent
    (home / "bin").mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    attempt = folder / f"9.{restarts}"
    ranks = ranks.replace("9.0", f"9.{restarts}")
    commands = {
        "srun": f'printf "%s\\n" "$@" > "$HOME/said"; env >> "$HOME/said"; {ranks}',
        "squeue": f"echo {state}",
        "scontrol": 'echo "$@" >> "$HOME/scontrol"; [ "$1" != requeue ] || touch "$HOME/requeued"; '
        'echo "JobId=9 ReqNodeList=(null) ExcNodeList=n9 Requeue=1"',
        "sbatch": 'echo "$@" >> "$HOME/sbatch"; cat "$HOME/unfit"',
    }
    for name, body in commands.items():
        (home / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (home / "bin" / name).chmod(0o755)
    env = {"PATH": f"{home}/bin:{os.environ['PATH']}", "HOME": str(home), "SLURM_JOB_ID": "9"}
    env["SLURM_JOB_NUM_NODES"] = str(nodes)
    env |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    script = build_script(derive_job_shape(run), work(folder))
    subprocess.run(["bash", "-c", script], env=env, capture_output=True, timeout=300, check=False)
    end = attempt.with_name(f"{attempt.name}.end")
    return json.loads(end.read_text()) if end.exists() else {}


def test_the_script_is_bash() -> None:
    for part in (PROLOGUE, EPILOGUE):
        assert subprocess.run(["bash", "-n"], input=part, text=True, timeout=300, check=False).returncode == 0


REJECTED = [
    pytest.param(
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition "
        "name specified", ["cluster.partition=x"],
        "cluster.partition=x: sbatch rejects the job (Batch job submission failed: Invalid partition name specified); "
        "correct it.", id="partition",
    ),
    pytest.param(
        "sbatch: error: Batch job submission failed: Invalid feature specification", ["cluster.constraint=x"],
        "cluster.constraint=x: sbatch rejects the job", id="constraint",
    ),
    pytest.param(
        "sbatch: unrecognized option '--nonsense=x'\nTry \"sbatch --help\"", ["+cluster.sbatch.nonsense=x"],
        "cluster.sbatch.nonsense=x: sbatch rejects the job (unrecognized option '--nonsense=x'); correct it.",
        id="option",
    ),
    pytest.param("sbatch: error: No", [], "cluster: sbatch rejects the job (No); correct it.", id="else"),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "overrides", "sentence"), REJECTED)
def test_a_rejected_submission_is_one_sentence(
    printed: str,
    overrides: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{printed}\nEND\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sweep = SlurmSweep(tmp_path, [], SlurmLaunch(), SweepSpec())
    with pytest.raises(ConfigError) as rejected:
        sweep._run_sbatch(derive_job_shape(job("cluster=cpu", *overrides)), work(tmp_path))
    assert str(rejected.value).startswith(sentence) and capfd.readouterr() == ("", "")


# --- nodes that make jobs fail: the state of a trial names them, and later submissions are without them


def ended(folder: Path, attempt: str, error: RankError | None = None, code: int = 1, srun: str = "") -> None:
    """Write what an attempt of a job leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    if error is not None:
        rank_error.write(folder / attempt / "0" / f"{error.rank}.error", error)
    (folder / f"{attempt}.out").write_text(srun)
    (folder / f"{attempt}.end").write_text(json.dumps({"code": code, "again": False, "state": "RUNNING"}))


def fails(node: str, **more: int | bool) -> RankError:
    return RankError(rank=3, text="CUDA error", node=node, **more)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two failures of gpu1 and of gpu2, one of which srun reports; others that say nothing of a node."""
    folder = tmp_path / SLURM
    ended(folder, "7_0.0", fails("gpu1"))
    ended(folder, "7_0.1", fails("gpu1"))
    ended(folder, "7_1.0", fails("gpu2"))
    ended(folder, "8.0", fails("gpu4", lost=True), srun="srun: error: gpu2: task 3: Killed\n")
    ended(folder, "9.0", fails("gpu3"))
    ended(folder, "9.1", fails("gpu3", code=2), code=2)
    ended(folder, "9.2", fails("gpu3"), code=130)
    return folder


def test_the_reason_of_a_failure_names_the_node(folder: Path) -> None:
    assert job_exit.find_error(folder, "7_0.0") == "rank 3 on gpu1: CUDA error"


@pytest.mark.parametrize(("times", "bad"), [(1, ["gpu1", "gpu2", "gpu3"]), (2, ["gpu1", "gpu2"]), (3, [])])
def test_nodes_that_failed_so_many_times_are_bad(times: int, bad: list[str], folder: Path) -> None:
    assert job_exit.find_bad_nodes(folder, times) == bad


def test_nodes_that_differ_are_counted_one_by_one(folder: Path) -> None:
    ended(folder, "7_2.0", fails("gpu3,gpu4"))
    assert job_exit.find_bad_nodes(folder, 2) == ["gpu1", "gpu2", "gpu3"]


@pytest.mark.parametrize(
    ("settings", "excluded"),
    [
        pytest.param(["cluster.exclude_bad=2", "cluster.exclude=old"], "old,gpu1,gpu2", id="asked-for"),
        pytest.param(["cluster.exclude=old"], "old", id="not-asked-for"),
        pytest.param(["cluster.exclude_bad=3"], None, id="none-is-bad"),
    ],
)
def test_bad_nodes_are_excluded_from_what_is_submitted(
    settings: list[str], excluded: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial("a", (), compose_test_run(["name=x", "cluster=cpu", *settings], remote=True))
    sweep = SlurmSweep(folder.parent, [trial], SlurmLaunch(), SweepSpec())
    script = build_script(sweep.shapes["a"], sweep._build_submission([trial], "titan-1", folder / "t.json", None))
    found = re.search("^#SBATCH --exclude=(.*)$", script, flags=re.M)
    assert (found and found[1]) == excluded
    assert ("without gpu1, gpu2" in capsys.readouterr().out) == ("gpu1" in (excluded or ""))


# --- limits of running jobs, as dependencies, and a controller that does not answer


def point(jobs: str, lane: int | None, state: State = "running") -> TrialState:
    return TrialState(jobs, "", (), state, jobs=tuple(jobs.split()), lane=lane)


@pytest.mark.parametrize(
    ("count", "there", "expected"),
    [
        pytest.param(2, [], [None, None, "x0", "x1", "x0:x2"], id="nothing-before"),
        pytest.param(2, [point("1", 0)], [None, "1", "x0", "1:x1", "x0:x2"], id="one-lane-is-free"),
        pytest.param(2, [point("1 2", 1)], [None, "x0", "x0:x1", "1:2"], id="a-chain"),
        pytest.param(1, [point("1", 0), point("2", 3)], ["1:2", "1:2:x0"], id="fewer-lanes-than-before"),
        pytest.param(2, [point("7_0", None), point("7_1", None)], ["7", "7", "7:x0"], id="an-array-is-before-all"),
        pytest.param(1, [point("1", 0, "failed"), point("", None, "planned")], [None, "x0"], id="ended"),
    ],
)
def test_what_comes_after_what(count: int, there: list[TrialState], expected: list[str | None]) -> None:
    lanes, found = Lanes(count, there), []
    for number in range(len(expected)):
        lane, after = lanes.take_lane()
        lanes.add_jobs(lane, [f"x{number}"])
        found.append(after)
    assert found == expected


def test_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*command: str) -> str:
        raise RunError(f"{command[0]}: Unable to contact slurm controller (connect failure)")

    monkeypatch.setattr(state, "run_command", unreachable)
    with pytest.raises(ConfigError, match=r"hydra/launcher=slurm: no Slurm controller answers .*; run this on a login"):
        _check_controller()
