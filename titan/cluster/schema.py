"""The cluster axis: on how many devices, of which kind, a run takes place. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan.config.settings import setting, show
from titan.errors import ConfigError

TAKEN = {
    "array",
    "dependency",
    "job-name",
    "output",
    "open-mode",
    "signal",
    "requeue",
    "no-requeue",
    "parsable",
}
"""Options of sbatch that titan gives itself, or that change what it reads."""


LONGEST_DAYS = 3650
"""A time limit above it is a slip."""
LONGEST_SECONDS = 30 * 86400.0
"""What waits longer than a month waits for nothing."""
STEP_SECONDS = 600.0
"""How long ranks wait for each other within a step, by default: what torch gives NCCL."""


def _job(default: Any, help: str, **more: Any) -> Any:
    """A setting of what Slurm is asked for: no id depends on it."""
    return setting(default, help, told=False, **more)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run; nothing here changes what is learned."""

    devices: int | str = setting(
        "auto",
        "ranks in all; auto: what the layout asks for on CPU, all devices on GPUs",
        at_least=1,
        words=("auto",),
    )
    nodes: int = setting(1, "machines", at_least=1)
    devices_per_node: int | str = setting(
        "auto", "ranks on each machine; auto: as many as it has devices", at_least=1, words=("auto",)
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: GPUs where there are any and torch is built for them, else the CPU"
    )
    restarts: int = setting(
        0,
        "restarts of all ranks after one of them died; through Slurm without the node that failed, and a second time "
        "only from a newer checkpoint",
        at_least=0,
        cap=10_000,
    )
    timeout: float = setting(
        1800.0,
        "seconds that ranks wait for each other before they give up: while they start, compile, validate and save",
        at_least=1,
        cap=LONGEST_SECONDS,
    )
    step_timeout: float | str = setting(
        "auto",
        "the same within a step after the first one of a batch size; auto: 600, at most cluster.timeout",
        at_least=1,
        cap=LONGEST_SECONDS,
        words=("auto",),
    )
    memory_gib: float | None = setting(None, "memory of one device in GiB; null: read it", above=0, cap=1e9)
    peak_tflops: float | None = setting(
        None,
        "dense bf16 peak of one device in TFLOP/s, for MFU; null: from the table of known devices",
        above=0,
        cap=1e9,
    )
    device_name: str | None = setting(
        None, "the GPUs of a machine that is not this one, such as NVIDIA H100; null: unknown"
    )
    partition: str | None = _job(None, "Slurm's partition")
    account: str | None = _job(None, "Slurm's account")
    qos: str | None = _job(None, "Slurm's quality of service")
    reservation: str | None = _job(None, "Slurm's reservation")
    constraint: str | None = _job(None, "features that nodes must have")
    exclude: str | None = _job(None, "nodes to avoid")
    gres: str | None = _job(None, "generic resources of a node, in place of GPUs by number, such as gpu:h100:8")
    exclusive: bool | str = _job(
        False,
        "take whole nodes, with all their memory; auto: where the job takes all devices of its nodes",
        words=("auto",),
    )
    time: str | None = _job(None, "time limit of a job: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's")
    signal_seconds: int = _job(
        120, "how long before the time limit a run is told to save and end", at_least=1, at_most=65535
    )
    node_memory_gib: float | None = _job(
        None,
        "memory of a node that a job asks for; null: all of a whole node, else by cluster.rank_memory_gib",
        at_least=1,
        cap=1e6,
    )
    rank_memory_gib: float | None = _job(
        None, "memory of its node that a job asks for with each rank; null: Slurm's default", above=0, cap=1e6
    )
    cpus_per_rank: int | None = _job(None, "CPU cores of a rank; null: Slurm's default", at_least=1, cap=65535)
    tasks: Literal["rank", "node"] = _job(
        "rank", "what a Slurm task is: a rank, or a node's program that starts its ranks"
    )
    srun: tuple[str, ...] = _job((), "further arguments of srun, such as [--cpu-bind=cores]")
    sbatch: Mapping[str, str] | None = _job(None, "further options of sbatch, such as {mail-type:END}")
    modules: tuple[str, ...] = _job((), "environment modules to load")
    setup: tuple[str, ...] = _job((), "lines of shell to run before the ranks start", any_text=True)
    environment: Mapping[str, str] | None = _job(
        None, "environment variables of the ranks, such as {NCCL_DEBUG:WARN}", any_text=True
    )
    container: Literal["none", "pyxis", "apptainer"] = _job("none", "what runs the ranks in an image")
    image: str | None = _job(None, "the container's image")
    mounts: tuple[str, ...] = _job((), "paths that the container sees, as SOURCE:TARGET")
    python: str | None = _job(None, "the nodes' Python; null: the one that submits")
    requeues: int = _job(
        10, "how often Slurm may start a job again: preempted, out of time, or its node lost", at_least=0, cap=10_000
    )
    chain: int = _job(
        0,
        "for sites that forbid requeueing: so many jobs, each after the one before; 0: requeue",
        at_least=0,
        at_most=100,
    )

    @property
    def step_seconds(self) -> float:
        """`step_timeout` as a number."""
        return min(STEP_SECONDS, self.timeout) if self.step_timeout == "auto" else float(self.step_timeout)

    def check(self) -> None:
        """Refuse what no job can have.

        Raises:
            ConfigError: naming the setting to change.
        """
        if self.step_seconds > self.timeout:
            raise ConfigError(
                f"cluster.step_timeout={self.step_timeout:g}: longer than cluster.timeout={self.timeout:g}, which is "
                "for what takes longer than a step; give a smaller one, or a larger cluster.timeout."
            )
        limit = minutes(self.time)
        if limit is not None and 60 * limit <= self.signal_seconds:
            raise ConfigError(
                f"cluster.time={self.time}: no longer than cluster.signal_seconds={self.signal_seconds}, so a run "
                "would be told to end as it begins; give more time, or a smaller cluster.signal_seconds."
            )
        if odd := [name for name in self.environment or {} if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
            raise ConfigError(
                f"cluster.environment={show(self.environment)}: no variable can be named {odd[0]}; correct it."
            )
        if taken := sorted(set(self.sbatch or {}) & TAKEN):
            raise ConfigError(f"cluster.sbatch={show(self.sbatch)}: titan gives {taken[0]} itself; leave it out.")
        if self.container != "none" and self.image is None:
            raise ConfigError(f"cluster.container={self.container}: needs an image; give cluster.image=IMAGE.")
        if self.container == "none" and (self.image or self.mounts):
            raise ConfigError(
                f"cluster.image={self.image}: no container is chosen; give cluster.container=pyxis or apptainer."
            )


def minutes(time: str | None) -> int | None:
    """A time limit in minutes, rounded up; None where there is none.

    Takes what sbatch takes: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS (its manual, --time).

    Raises:
        ConfigError: where it is none of these.
    """
    if time is None:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise ConfigError(f"cluster.time={time}: not understood; give minutes, HH:MM:SS or D-HH:MM:SS.")
    days, *rest = (None if g is None else int(g) for g in match.groups())
    given = [part for part in rest if part is not None]
    if any(part > 59 for part in given[1:]) or (days is not None and given[0] > 23):
        raise ConfigError(f"cluster.time={time}: hours end at 23 after days, minutes and seconds at 59; correct it.")
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = (days or 0) * 86400 + sum(n * unit for n, unit in zip(given, units, strict=False))
    if seconds > LONGEST_DAYS * 86400:
        raise ConfigError(
            f"cluster.time={time}: must be at most {LONGEST_DAYS} days; give minutes, HH:MM:SS or D-HH:MM:SS."
        )
    if seconds == 0:
        raise ConfigError(f"cluster.time={time}: must be above zero; give minutes, HH:MM:SS or D-HH:MM:SS.")
    return -(-seconds // 60)
