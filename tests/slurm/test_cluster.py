"""The Slurm that other tests use leaves nothing behind; grids show that it counts GPUs, requeues and preempts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, read_command, wait_until
from tests.support.slurm_cluster import Slurm, SlurmError, find_processes

STARTER = """\
import sys, time; from pathlib import Path; from tests.support.slurm_cluster import Slurm
slurm = Slurm.start(Path(sys.argv[1]), nodes=1)
slurm.run('sbatch', '--output=/dev/null', '--wrap', 'srun env -i sleep 600')
print(slurm.conf, flush=True); time.sleep(600)
"""
"""A task without its environment, so one that only its parent leads to."""


def test_a_step_runs_on_two_nodes(slurm: Slurm) -> None:
    said = slurm.run("srun", "-N2", "--ntasks-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID")
    assert sorted(said.splitlines()) == ["node1 0", "node1 1", "node2 2", "node2 3"]
    with pytest.raises(SlurmError, match="configuration is not available"):
        slurm.run("srun", "--gpus-per-node=9", "true")


@pytest.mark.full
def test_nothing_outlives_a_killed_process(slurm_folder: Path) -> None:
    argv = [sys.executable, "-c", STARTER, str(slurm_folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            conf = Path(starter.stdout.readline().strip())
            wait_until(lambda: "sleep\0600\0" in map(read_command, find_processes(conf)), "its task runs")
        finally:
            starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not slurm_folder.exists(), "all of it is gone")
    assert not find_processes(conf)
    slurm_folder.mkdir()
