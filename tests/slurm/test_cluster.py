"""The Slurm that other tests use is one: it runs, counts GPUs, requeues, preempts, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, wait_until
from tests.support.slurm_cluster import Slurm, SlurmError, find_processes

SLEEP = ("--wrap", "srun env -i sleep 600")
"""A task without its environment, so one that only its parent leads to."""


def submit(slurm: Slurm, *argv: str) -> str:
    """The id of a job that is submitted and runs; it writes nothing."""
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", *argv).strip()
    wait_until(lambda: slurm.read_jobs()[job] == "RUNNING", "the job runs")
    return job


def sleeping(slurm: Slurm) -> list[int]:
    """Processes of this Slurm that sleep for ten minutes."""
    return [pid for pid in find_processes(slurm.conf) if words(pid) == ["sleep", "600"]]


def words(pid: int) -> list[str]:
    """The command line of a process; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def test_a_step_runs_on_two_nodes(slurm: Slurm) -> None:
    said = slurm.run("srun", "-N2", "--ntasks-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID")
    assert sorted(said.splitlines()) == ["node1 0", "node1 1", "node2 2", "node2 3"]


@pytest.mark.full
def test_nodes_have_gpus(slurm: Slurm) -> None:
    said = slurm.run("srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert said.split() == ["0,1", "0,1"]
    with pytest.raises(SlurmError, match="configuration is not available"):
        slurm.run("srun", "--gpus-per-node=9", "true")


@pytest.mark.full
def test_names_of_nodes_lead_here(slurm: Slurm) -> None:
    if not os.access("/etc/hosts", os.W_OK):
        pytest.skip("/etc/hosts is not ours")
    assert slurm.run("getent", "hosts", "node1", "node4").split()[::2] == ["127.0.0.1"] * 2


@pytest.mark.full
def test_a_killed_node_takes_its_job_along_and_comes_back(slurm: Slurm) -> None:
    job = submit(slurm, "--nodelist=node1,node2", "--ntasks-per-node=1", *SLEEP)
    wait_until(lambda: len(sleeping(slurm)) == 2, "both tasks run")
    slurm.kill_node("node2")
    assert not find_processes(slurm.conf, "SLURMD_NODENAME=node2")
    wait_until(lambda: slurm.read_jobs()[job] == "PENDING", "it is requeued")
    assert slurm.read_states()["node2"].startswith("down")
    slurm.revive_node("node2")
    wait_until(lambda: slurm.read_jobs()[job] == "RUNNING", "it runs again")


@pytest.mark.full
def test_a_node_may_be_lost_before_slurm_knows(slurm: Slurm) -> None:
    job = submit(slurm, "--nodelist=node3", *SLEEP)
    wait_until(lambda: len(sleeping(slurm)) == 1, "its task runs")  # Slurm ends a job whose launch fails
    slurm.kill_node("node3", notify=False)
    assert slurm.read_jobs()[job] == "RUNNING"
    assert not sleeping(slurm)


@pytest.mark.full
def test_a_partition_preempts_the_other_after_a_signal(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "listens"
    script.write_text(f"#!/bin/sh\ntrap 'echo heard >> {tmp_path}/said; exit 0' USR2\ntouch {tmp_path}/ready\n"
                      "while :; do sleep 0.1; done\n")  # fmt: skip
    low = submit(slurm, "-N4", "--exclusive", "--requeue", "--signal=B:USR2@1", str(script))
    wait_until((tmp_path / "ready").exists, "it listens")
    high = submit(slurm, "--partition=high", "-N4", "--exclusive", "--wrap", "sleep 1")
    assert (tmp_path / "said").read_text() == "heard\n"
    assert slurm.read_jobs()[low] != "RUNNING"
    wait_until(lambda: slurm.read_jobs()[high] == "COMPLETED", "the other ends")


@pytest.mark.full
def test_ids_of_array_elements(slurm: Slurm) -> None:
    job = slurm.run("sbatch", "--parsable", "--array=0-2", "--output=/dev/null", "--wrap", "true").strip()
    ids = {f"{job}_{element}" for element in range(3)}
    wait_until(lambda: {slurm.read_jobs().get(one) for one in ids} == {"COMPLETED"}, "all elements end")


@pytest.mark.full
def test_a_command_that_fails_says_why(slurm: Slurm) -> None:
    with pytest.raises(SlurmError, match="invalid partition"):
        slurm.run("sbatch", "--partition=none", "--wrap", "true")


@pytest.mark.full
def test_two_clusters_at_once_and_stop_leaves_nothing(slurm: Slurm, slurm_folder: Path) -> None:
    other = Slurm.start(slurm_folder, nodes=1)
    job = submit(other, *SLEEP)
    wait_until(lambda: sleeping(other), "its task runs")
    assert job not in slurm.read_jobs()
    other.stop()
    assert not find_processes(other.conf)
    assert len(slurm.read_states()) == 4


@pytest.mark.full
def test_nothing_outlives_a_killed_process(slurm_folder: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.support.slurm_cluster import Slurm\n"
        "slurm = Slurm.start(Path(sys.argv[1]), nodes=1)\n"
        "slurm.run('sbatch', '--output=/dev/null', '--wrap', 'srun env -i sleep 600')\n"
        "print(slurm.conf, flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-c", program, str(slurm_folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            conf = Path(starter.stdout.readline().strip())
            wait_until(lambda: ["sleep", "600"] in [words(pid) for pid in find_processes(conf)], "its task runs")
        finally:
            starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not slurm_folder.exists(), "all of it is gone")
    assert not find_processes(conf)
    slurm_folder.mkdir()


@pytest.mark.full
def test_it_does_not_come_up_with_programs_that_end(slurm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.slurm_cluster.shutil.which", lambda name, path: "/bin/false")
    with pytest.raises(SlurmError, match="munged gives no socket; ended"):
        Slurm.start(slurm_folder)
    assert sorted(one.name for one in slurm_folder.iterdir()) == ["1", "2", "3"]


@pytest.mark.full
def test_a_folder_too_long_for_sockets_is_named() -> None:
    with pytest.raises(ValueError, match="more than 73 characters"):
        Slurm.start(Path("/" + 73 * "x"))
