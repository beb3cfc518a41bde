"""The cluster axis: the number and kind of devices of a run, and its Slurm job. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titan.cluster.hardware import Hardware
from titan.config.settings import setting
from titan.config.text_kinds import Account, Code, Label

LONGEST_SECONDS = 30 * 86400.0
"""The longest accepted timeout."""
STEP_SECONDS = 600.0
"""Default timeout of collectives within a step: torch's default for NCCL."""


def _job_setting(default: Any, help: str, **options: Any) -> Any:
    """Return a setting of the Slurm job; no id depends on it."""
    return setting(default, help, in_ids=False, **options)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run; no setting here is science."""

    devices: int | str = setting(
        "auto",
        "total number of ranks; auto: the layout's degrees on CPU, all devices on GPUs",
        at_least=1,
        words=("auto",),
    )
    nodes: int = setting(1, "number of machines", at_least=1)
    devices_per_node: int | str = setting(
        "auto", "ranks per machine; auto: its number of devices", at_least=1, words=("auto",)
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: GPUs if there are any and torch is built for them, else the CPU"
    )
    restarts: int = setting(
        0,
        "restarts of all ranks after one of them fails; on Slurm without the failed node, a second time only from a "
        "newer checkpoint; here not again after the same error from the same checkpoint",
        at_least=0,
        cap=10_000,
    )
    timeout: float = setting(
        1800.0,
        "timeout in seconds of collectives outside of steps: at start, compilation, evaluation and saving",
        at_least=1,
        unit="seconds",
        cap=LONGEST_SECONDS,
    )
    hook_timeout: float = setting(
        1800.0,
        "timeout in seconds of a hook of one's own for which other ranks wait, but for before_optimizer, which is part "
        "of its step",
        at_least=1,
        unit="seconds",
        cap=LONGEST_SECONDS,
    )
    step_timeout: float | str = setting(
        "auto",
        "timeout in seconds of collectives within a step, after the first step of a batch size; auto: 600, at most "
        "cluster.timeout",
        at_least=1,
        cap=LONGEST_SECONDS,
        words=("auto",),
        unit="seconds",
    )
    memory_gib: float | None = setting(None, "memory of one device in GiB; null: detect it", above=0, cap=1e9)
    peak_tflops: float | None = setting(
        None,
        "dense bf16 peak of one device in TFLOP/s, for MFU; null: from the table of known devices",
        above=0,
        cap=1e9,
    )
    device_name: Label | None = setting(None, "name of the GPUs of another machine, such as NVIDIA H100; null: unknown")
    hardware: Hardware = field(default=Hardware(), metadata={"in_ids": False})
    certificate: Literal["off", "required"] = _job_setting(
        "off", "required: start only layouts that titan.prove has proven, with this code and recipe"
    )
    price: float | None = _job_setting(None, "price of a device-hour, for the planned cost of a run", above=0, cap=1e6)
    partition: Label | None = _job_setting(None, "Slurm partition")
    account: Account | None = _job_setting(None, "Slurm account")
    qos: Label | None = _job_setting(None, "Slurm quality of service")
    reservation: Label | None = _job_setting(None, "Slurm reservation")
    constraint: Label | None = _job_setting(None, "required node features")
    exclude: Label | None = _job_setting(None, "nodes to exclude")
    exclude_bad: int | None = _job_setting(
        None,
        "exclude nodes from later submissions that made jobs of this sweep fail this many times",
        at_least=1,
    )
    gres: Label | None = _job_setting(
        None, "generic resources per node instead of a number of GPUs, such as gpu:h100:8"
    )
    exclusive: bool | str = _job_setting(
        False,
        "allocate whole nodes with all their memory; auto: if the job uses all devices of its nodes",
        words=("auto",),
    )
    time: Label | None = _job_setting(
        None, "time limit of a job: minutes (at most 3599), 12h, HH:MM:SS or D-HH:MM:SS; null: the partition's limit"
    )
    signal_seconds: int = _job_setting(
        120, "seconds before the time limit at which a run gets the signal to save and stop", at_least=1, at_most=65535
    )
    node_memory_gib: float | None = _job_setting(
        None,
        "memory per node that a job requests; null: all of a whole node, else by cluster.rank_memory_gib",
        at_least=1,
        cap=1e6,
    )
    rank_memory_gib: float | None = _job_setting(
        None, "memory that a job requests per rank; null: Slurm's default", above=0, cap=1e6
    )
    cpus_per_rank: int | None = _job_setting(None, "CPU cores per rank; null: Slurm's default", at_least=1, cap=65535)
    tasks: Literal["rank", "node"] = _job_setting(
        "rank", "what one Slurm task runs: a rank, or a program per node that starts its ranks"
    )
    srun: tuple[Code, ...] = _job_setting((), "additional arguments of srun, such as [--cpu-bind=cores]")
    sbatch: Mapping[str, Code] | None = _job_setting(None, "additional options of sbatch, such as {mail-type:END}")
    modules: tuple[Code, ...] = _job_setting((), "environment modules to load")
    setup: tuple[Code, ...] = _job_setting((), "shell commands to run before the ranks start", any_text=True)
    environment: Mapping[str, Code] | None = _job_setting(
        None, "environment variables of the ranks, such as {NCCL_DEBUG:WARN}", any_text=True
    )
    container: Literal["none", "pyxis", "apptainer"] = _job_setting("none", "container runtime of the ranks")
    image: Code | None = _job_setting(None, "container image")
    mounts: tuple[Code, ...] = _job_setting((), "bind mounts of the container, as SOURCE:TARGET")
    python: Code | None = _job_setting(None, "Python interpreter on the nodes; null: that of the submitting process")
    requeues: int = _job_setting(
        10, "how often Slurm may requeue a job after preemption, a time limit or a node failure", at_least=0, cap=10_000
    )
    chain: int = _job_setting(
        0,
        "number of jobs that each depend on the one before, for sites that forbid requeueing; 0: requeue",
        at_least=0,
        at_most=100,
    )

    @property
    def step_seconds(self) -> float:
        """The timeout within a step in seconds."""
        return min(STEP_SECONDS, self.timeout) if self.step_timeout == "auto" else float(self.step_timeout)
