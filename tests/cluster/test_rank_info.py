"""Which rank a launcher's environment says this process is."""

from __future__ import annotations

import os

import pytest

from titan.cluster.rank_info import RankInfo, from_environment

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
}


@pytest.mark.parametrize(
    ("env", "rank_info"),
    [
        pytest.param({}, None, id="alone"),
        pytest.param(TORCHRUN, RankInfo(3, 8, 1, "env://"), id="torchrun"),
        pytest.param(
            {k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, RankInfo(3, 8, 0, "env://"), id="by-hand"
        ),
        pytest.param({**TORCHRUN, **SRUN}, RankInfo(3, 8, 1, "env://"), id="torchrun-under-srun"),
        pytest.param({"RANK": "3", "WORLD_SIZE": "8"}, None, id="no-meeting-place"),
        pytest.param({**SRUN, "SLURM_STEP_NODELIST": "n1"}, RankInfo(5, 8, 1, "tcp://n1:21203"), id="srun"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NODELIST": "gpu[003-006,9],login1"},
            RankInfo(5, 8, 1, "tcp://gpu003:21203"),
            id="node-range",
        ),
        pytest.param({**SRUN, "SLURM_STEP_NODELIST": "b,a[1-2]"}, RankInfo(5, 8, 1, "tcp://b:21203"), id="node-list"),
        pytest.param(
            {**SRUN, "SLURM_NODELIST": "n[7]x,m"}, RankInfo(5, 8, 1, "tcp://n7x:21203"), id="job-nodes-and-suffix"
        ),
        pytest.param(
            {**SRUN, "MASTER_ADDR": "m", "MASTER_PORT": "77"},
            RankInfo(5, 8, 1, "tcp://m:77"),
            id="srun-told-where-to-meet",
        ),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None, id="a-step-of-one-task"),
        pytest.param({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, id="batch-script"),
    ],
)
def test_found(env: dict[str, str], rank_info: RankInfo | None) -> None:
    assert from_environment(env) == rank_info


def test_srun_without_node_names_meets_here() -> None:
    rank_info = from_environment(SRUN)
    assert rank_info is not None
    assert rank_info.init_method == f"tcp://{os.uname().nodename}:21203"
