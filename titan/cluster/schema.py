"""The cluster axis: the number and kind of devices, their speeds for planning, and the Slurm job. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titan.config.settings import setting
from titan.config.text_kinds import Account, Code, Label
from titan.errors import ConfigError


def _figure(help: str, cap: float | None = 1e9, **bounds: Any) -> Any:
    """Return a setting of the hardware, above 0 unless `bounds` say otherwise; no id depends on it."""
    return setting(None, help, cap=cap, in_ids=False, **(bounds or {"above": 0}))


def _host_time(cause: str) -> Any:
    return _figure(f"host time that {cause}; null: not counted", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of one device and its links: from data sheets, or measured by `titan.calibrate`."""

    bf16_tflops: float | None = _figure("dense bf16 matmul peak of a device in TFLOP/s; null: of known devices")
    fp8_tflops: float | None = _figure("dense 8-bit matmul peak in TFLOP/s; null: the device has none")
    fp32_tflops: float | None = _figure("fp32 matmul peak in TFLOP/s; null: of known devices")
    memory_gb_per_second: float | None = _figure("bandwidth of a device's memory in GB/s, reads and writes together")
    units: int | None = _figure(
        "compute units (streaming multiprocessors) that share a matmul's tiles; null: they share its work evenly",
        at_least=1,
        cap=None,
    )
    watts: float | None = _figure("power limit of a device in W; null: no limit below its reference power")
    reference_watts: float | None = _figure("power in W at which the device reaches its peak")
    link_gb_per_second: float | None = _figure("collective bandwidth between devices of a node, GB/s per device")
    link_microseconds: float | None = _figure("latency of a collective within a node in microseconds")
    network_gb_per_second: float | None = _figure("network bandwidth between nodes, GB/s per device")
    network_microseconds: float | None = _figure("latency of a collective between nodes, per doubling of nodes")
    launch_microseconds: float | None = _figure("host time per kernel launch in microseconds; null: 6")
    matmul_efficiency: float | None = _figure("fraction of the peak of a large matmul; null: fitted", cap=1)
    matmul_prologue: float | None = _figure(
        "start-up of a tile, as additional inner size; null: that of Hopper", at_least=0
    )
    attention_tflops: float | None = _figure("speed of attention forward in TFLOP/s; null: fitted")
    attention_backward_tflops: float | None = _figure("speed of attention backward in TFLOP/s; null: fitted")
    attention_short_rows: float | None = _figure(
        "length of rows at which attention reaches half of its speed; null: 512", at_least=0
    )
    attention_backward_short_rows: float | None = _figure("the same for its backward pass; null: 512", at_least=0)
    attention_head_power: float | None = _figure(
        "power of the head size that attention's speed follows below 128; null: 0.5", at_least=0, cap=9
    )
    memory_efficiency: float | None = _figure("fraction of the bandwidth of fused elementwise work", cap=1)
    eager_factor: float | None = _figure("memory traffic of uncompiled elementwise work, relative to compiled")
    loss_factor: float | None = _figure("memory traffic of the loss, relative to compiled; null: by eager_factor")
    update_factor: float | None = _figure("memory traffic of clipping and update, relative to one pass; null: 1")
    reduce_gb_per_second: float | None = _figure("bandwidth of a reduce-scatter within a node; null: that of the link")
    sum_gb_per_second: float | None = _figure(
        "bandwidth of an all-reduce within a node; null: that of a reduce-scatter"
    )
    cores: int | None = _figure(
        "cores that compute, launch and communicate, one after the other; null: the device computes beside its host",
        at_least=1,
        cap=None,
    )
    process_gib: float | None = _figure("memory of a CPU rank before it has tensors in GiB; null: 0.42")
    rank_speed: float | None = _figure("speed of one of several ranks on a CPU, relative to its equal part; null: 1")
    step_microseconds: float | None = _host_time("a step takes")
    replicate_block_microseconds: float | None = _host_time("DDP adds to a block")
    replicate_step_microseconds: float | None = _host_time("DDP adds to a step")
    shard_block_microseconds: float | None = _host_time("FSDP adds to a block")
    shard_step_microseconds: float | None = _host_time("FSDP adds to a step")
    tensor_block_microseconds: float | None = _host_time("tensor parallelism adds to a block")
    tensor_step_microseconds: float | None = _host_time("tensor parallelism adds to a step")
    context_block_microseconds: float | None = _host_time("context parallelism adds to a block")
    context_step_microseconds: float | None = _host_time("context parallelism adds to a step")
    pipeline_action_microseconds: float | None = _host_time(
        "a pipeline adds to each forward or backward of a micro-batch"
    )
    pipeline_step_microseconds: float | None = _host_time("a pipeline adds to a step")

    def require_figure(self, name: str, purpose: str) -> float:
        """Return a figure."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(
                f"cluster.hardware.{name}=null: {purpose} needs it; give the figure, choose a cluster that has it, "
                "such as cluster=h100, or measure this machine with python -m titan.calibrate."
            )
        return float(value)


LONGEST_SECONDS = 30 * 86400.0  # the longest accepted timeout
STEP_SECONDS = 600.0  # default timeout of collectives within a step: torch's default for NCCL


def _job(default: Any, help: str, **options: Any) -> Any:
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
    certificate: Literal["off", "required"] = _job(
        "off", "required: start only layouts that titan.prove has proven, with this code and recipe"
    )
    price: float | None = _job(None, "price of a device-hour, for the planned cost of a run", above=0, cap=1e6)
    partition: Label | None = _job(None, "Slurm partition")
    account: Account | None = _job(None, "Slurm account")
    qos: Label | None = _job(None, "Slurm quality of service")
    reservation: Label | None = _job(None, "Slurm reservation")
    constraint: Label | None = _job(None, "required node features")
    exclude: Label | None = _job(None, "nodes to exclude")
    exclude_bad: int | None = _job(
        None,
        "exclude nodes from later submissions that made jobs of this sweep fail this many times",
        at_least=1,
    )
    gres: Label | None = _job(None, "generic resources per node instead of a number of GPUs, such as gpu:h100:8")
    exclusive: bool | str = _job(
        False,
        "allocate whole nodes with all their memory; auto: if the job uses all devices of its nodes",
        words=("auto",),
    )
    time: Label | None = _job(
        None, "time limit of a job: minutes (at most 3599), 12h, HH:MM:SS or D-HH:MM:SS; null: the partition's limit"
    )
    signal_seconds: int = _job(
        120, "seconds before the time limit at which a run gets the signal to save and stop", at_least=1, at_most=65535
    )
    node_memory_gib: float | None = _job(
        None,
        "memory per node that a job requests; null: all of a whole node, else by cluster.rank_memory_gib",
        at_least=1,
        cap=1e6,
    )
    rank_memory_gib: float | None = _job(
        None, "memory that a job requests per rank; null: Slurm's default", above=0, cap=1e6
    )
    cpus_per_rank: int | None = _job(None, "CPU cores per rank; null: Slurm's default", at_least=1, cap=65535)
    tasks: Literal["rank", "node"] = _job(
        "rank", "what one Slurm task runs: a rank, or a program per node that starts its ranks"
    )
    srun: tuple[Code, ...] = _job((), "additional arguments of srun, such as [--cpu-bind=cores]")
    sbatch: Mapping[str, Code] | None = _job(None, "additional options of sbatch, such as {mail-type:END}")
    modules: tuple[Code, ...] = _job((), "environment modules to load")
    setup: tuple[Code, ...] = _job((), "shell commands to run before the ranks start", any_text=True)
    environment: Mapping[str, Code] | None = _job(
        None, "environment variables of the ranks, such as {NCCL_DEBUG:WARN}", any_text=True
    )
    container: Literal["none", "pyxis", "apptainer"] = _job("none", "container runtime of the ranks")
    image: Code | None = _job(None, "container image")
    mounts: tuple[Code, ...] = _job((), "bind mounts of the container, as SOURCE:TARGET")
    python: Code | None = _job(None, "Python interpreter on the nodes; null: that of the submitting process")
    requeues: int = _job(
        10, "how often Slurm may requeue a job after preemption, a time limit or a node failure", at_least=0, cap=10_000
    )
    chain: int = _job(
        0,
        "number of jobs that each depend on the one before, for sites that forbid requeueing; 0: requeue",
        at_least=0,
        at_most=100,
    )

    @property
    def step_seconds(self) -> float:
        """The timeout within a step in seconds."""
        return min(STEP_SECONDS, self.timeout) if self.step_timeout == "auto" else float(self.step_timeout)
