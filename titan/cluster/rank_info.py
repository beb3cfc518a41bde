"""Which rank this process is, by the environment of its launcher. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One rank among all."""

    rank: int = 0  # this rank
    world_size: int = 1  # the number of ranks
    local_rank: int = 0  # this rank's number on its machine
    # torch's init_method, the URL at which the ranks rendezvous; "meet://FILE" where rank 0 writes its address into a
    # shared file; empty for a single rank
    init_method: str = ""
    scheduled: bool = False  # whether a scheduler sends it signals: see `titan.training.signals`
    supervised: bool = False  # whether titan's own launcher started it, which shows what ranks say about a hang


def from_environment(env: Mapping[str, str]) -> RankInfo | None:
    """Return the rank info that torchrun or srun gave this process, or None when it was started alone.

    torchrun sets RANK, LOCAL_RANK and WORLD_SIZE. srun sets SLURM_PROCID and SLURM_STEP_NUM_TASKS for each task of a
    step; the shell of a batch script or an allocation has no step of several tasks and counts as alone.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return RankInfo(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), "env://")
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in env:
        size, local = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_LOCALID", 0))
        return RankInfo(int(env["SLURM_PROCID"]), size, local, f"tcp://{_slurm_address(env)}")
    return None


def _slurm_address(env: Mapping[str, str]) -> str:
    """Return the address of rank 0 of a Slurm step: the step's first node, and a port by job and step."""
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    step = int(env.get("SLURM_STEP_ID", 0)) % 100
    port = env.get("MASTER_PORT") or str(20000 + (int(env.get("SLURM_JOB_ID", 0)) * 100 + step) % 40000)
    return f"{address}:{port}"


def _first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list such as "gpu[003-006,9],login1"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if not match:
        return os.uname().nodename
    return match[1] + (match[2] or "") + (match[3] or "")
