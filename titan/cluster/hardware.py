"""The hardware of a cluster, as planning needs it: speeds of a device, its memory and its links. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.settings import setting
from titan.errors import ConfigError


def _figure_setting(help: str, cap: float = 1e9) -> float | None:
    figure: float | None = setting(None, help, above=0, cap=cap, in_ids=False)
    return figure


def _host_time_setting(cause: str) -> float | None:
    figure: float | None = setting(
        None, f"host time that {cause}; null: not counted", at_least=0, cap=1e9, in_ids=False
    )
    return figure


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of one device and its links: from data sheets, or measured by `titan.calibrate`."""

    bf16_tflops: float | None = _figure_setting("dense bf16 matmul peak of a device in TFLOP/s; null: of known devices")
    fp8_tflops: float | None = _figure_setting("dense 8-bit matmul peak in TFLOP/s; null: the device has none")
    fp32_tflops: float | None = _figure_setting("fp32 matmul peak in TFLOP/s; null: of known devices")
    memory_gb_per_second: float | None = _figure_setting(
        "bandwidth of a device's memory in GB/s, reads and writes together"
    )
    units: int | None = setting(
        None,
        "compute units (streaming multiprocessors) that share a matmul's tiles; null: they share its work evenly",
        at_least=1,
        in_ids=False,
    )
    watts: float | None = _figure_setting("power limit of a device in W; null: no limit below its reference power")
    reference_watts: float | None = _figure_setting("power in W at which the device reaches its peak")
    link_gb_per_second: float | None = _figure_setting(
        "collective bandwidth between devices of a node, GB/s per device"
    )
    link_microseconds: float | None = _figure_setting("latency of a collective within a node in microseconds")
    network_gb_per_second: float | None = _figure_setting("network bandwidth between nodes, GB/s per device")
    network_microseconds: float | None = _figure_setting("latency of a collective between nodes, per doubling of nodes")
    launch_microseconds: float | None = _figure_setting("host time per kernel launch in microseconds; null: 6")
    matmul_efficiency: float | None = _figure_setting("fraction of the peak of a large matmul; null: fitted", cap=1)
    matmul_prologue: float | None = setting(
        None, "start-up of a tile, as additional inner size; null: that of Hopper", at_least=0, cap=1e9, in_ids=False
    )
    attention_tflops: float | None = _figure_setting("speed of attention forward in TFLOP/s; null: fitted")
    attention_backward_tflops: float | None = _figure_setting("speed of attention backward in TFLOP/s; null: fitted")
    attention_short_rows: float | None = setting(
        None,
        "length of rows at which attention reaches half of its speed; null: 512",
        at_least=0,
        cap=1e9,
        in_ids=False,
    )
    attention_backward_short_rows: float | None = setting(
        None, "the same for its backward pass; null: 512", at_least=0, cap=1e9, in_ids=False
    )
    attention_head_power: float | None = setting(
        None,
        "power of the head size that attention's speed follows below 128; null: 0.5",
        at_least=0,
        cap=9,
        in_ids=False,
    )
    memory_efficiency: float | None = _figure_setting("fraction of the bandwidth of fused elementwise work", cap=1)
    eager_factor: float | None = _figure_setting("memory traffic of uncompiled elementwise work, relative to compiled")
    loss_factor: float | None = _figure_setting(
        "memory traffic of the loss, relative to compiled; null: by eager_factor"
    )
    update_factor: float | None = _figure_setting(
        "memory traffic of clipping and update, relative to one pass; null: 1"
    )
    reduce_gb_per_second: float | None = _figure_setting(
        "bandwidth of a reduce-scatter within a node; null: that of the link"
    )
    sum_gb_per_second: float | None = _figure_setting(
        "bandwidth of an all-reduce within a node; null: that of a reduce-scatter"
    )
    cores: int | None = setting(
        None,
        "cores that compute, launch and communicate, one after the other; null: the device computes beside its host",
        at_least=1,
        in_ids=False,
    )
    process_gib: float | None = _figure_setting("memory of a CPU rank before it has tensors in GiB; null: 0.42")
    rank_speed: float | None = _figure_setting(
        "speed of one of several ranks on a CPU, relative to its equal part; null: 1"
    )
    step_microseconds: float | None = _host_time_setting("a step takes")
    replicate_block_microseconds: float | None = _host_time_setting("DDP adds to a block")
    replicate_step_microseconds: float | None = _host_time_setting("DDP adds to a step")
    shard_block_microseconds: float | None = _host_time_setting("FSDP adds to a block")
    shard_step_microseconds: float | None = _host_time_setting("FSDP adds to a step")
    tensor_block_microseconds: float | None = _host_time_setting("tensor parallelism adds to a block")
    tensor_step_microseconds: float | None = _host_time_setting("tensor parallelism adds to a step")
    context_block_microseconds: float | None = _host_time_setting("context parallelism adds to a block")
    context_step_microseconds: float | None = _host_time_setting("context parallelism adds to a step")
    pipeline_action_microseconds: float | None = _host_time_setting(
        "a pipeline adds to each forward or backward of a micro-batch"
    )
    pipeline_step_microseconds: float | None = _host_time_setting("a pipeline adds to a step")

    def require_figure(self, name: str, purpose: str) -> float:
        """Return a figure.

        Raises:
            ConfigError: when it is not given.
        """
        value = getattr(self, name)
        if value is None:
            raise ConfigError(
                f"cluster.hardware.{name}=null: {purpose} needs it; give the figure, choose a cluster that has it, "
                "such as cluster=h100, or measure this machine with python -m titan.calibrate."
            )
        return float(value)
