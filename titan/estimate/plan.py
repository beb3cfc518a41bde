"""The plan of a run: predicted memory and step time with their intervals, and what follows from them. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.cluster.known_devices import look_up_peak_tflops
from titan.cluster.schema import Hardware
from titan.console.notebook import Shown
from titan.console.numbers import format_rounded
from titan.errors import ConfigError
from titan.estimate import memory, operations, overhead
from titan.estimate.constants import Constants, load_constants
from titan.estimate.memory import Usage
from titan.estimate.operations import Speeds
from titan.estimate.rank_sizes import GIB
from titan.estimate.step_time import StepTime, estimate_step
from titan.model.built_counts import list_own_modules
from titan.parallelism.schema import Layout

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.cluster.schema import Cluster
    from titan.model.schema import Decoder
    from titan.run.schema import Recipe

HOPPER = 9.0
"""The compute capability from which `training.attention=auto` takes cuDNN's kernel."""
PUBLISHED = "ranges cover 90 % of published runs not used in the fit"
MEASURED = "nine in ten small runs on a measured CPU lie within"
"""What the interval of a figure is: on GPUs, and on CPUs; `describe_experts` on GPUs with experts."""
Fit = Literal["", "fits", "fits closely", "does not fit"]
"""Whether memory suffices."""
SECONDS_PER_DAY, SECONDS_PER_HOUR = 86400.0, 3600.0


class PredictedValue(NamedTuple):
    """A predicted value, and its interval: the error that nine in ten published runs stay below, both ways."""

    value: float
    low: float
    high: float

    def scale(self, factor: float) -> PredictedValue:
        """Return the figure in another unit."""
        return PredictedValue(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What a run is predicted to take.

    Attributes:
        memory: of the fullest moment of each pipeline rank, in order.
        step: the time of a step by cause.
        error: the 90th percentile of the relative error of step times; see `intervals`.
        memory_error: the 90th percentile of the relative error of peak memory.
        memory_gib: of one device; None if unknown.
        peak_tflops: of one device in the compute type; None if unknown.
        flops_per_token: as model FLOPs utilisation counts them.
        steps: of the run.
        checkpoint_bytes: of one checkpoint.
        price: of a device-hour; None if not given.
        microbatches: of a rank in a step.
        intervals: says which runs these percentiles are of.
    """

    memory: tuple[Usage, ...]
    step: StepTime
    error: float
    memory_error: float
    memory_gib: float | None
    peak_tflops: float | None
    flops_per_token: float
    steps: int
    checkpoint_bytes: float
    price: float | None = None
    microbatches: int = 1
    intervals: str = PUBLISHED

    def list_facts(self) -> dict[str, str]:
        """Return the predictions that a reader wants to know first, by name, for notebooks."""
        device = "" if self.memory_gib is None else f" of {self.memory_gib:.1f}"
        fit = f", {self.fit}" if self.fit else ""
        return {
            "step": _format_predicted(self.step_seconds, "s"),
            "speed": _format_predicted(self.tokens_per_second_per_device, "tokens/s per device"),
            **({} if self.mfu is None else {"MFU": _format_predicted(self.mfu.scale(100), "%")}),
            "memory": f"{_format_predicted(self.memory_gib_needed, 'GiB')}{device}{fit}",
            "device-hours": _format_predicted(self.device_hours),
        }

    @property
    def fit(self) -> Fit:
        """Whether the memory suffices: with its interval, up to it, or not; empty where either is unknown."""
        if self.memory_gib is None:
            return ""
        if self.memory_gib_needed.high <= self.memory_gib:
            return "fits" if self.memory_error else ""
        return "fits closely" if self.fullest.gib <= self.memory_gib else "does not fit"

    @property
    def fullest(self) -> Usage:
        """The memory of the rank that needs most."""
        return max(self.memory, key=lambda usage: usage.bytes)

    @property
    def step_seconds(self) -> PredictedValue:
        """The time of a step."""
        return build_interval(self.step.seconds, self.error)

    @property
    def memory_gib_needed(self) -> PredictedValue:
        """The memory of the fullest rank in GiB."""
        return build_interval(self.fullest.gib, self.memory_error)

    @property
    def tokens_per_second_per_device(self) -> PredictedValue:
        """The throughput of a device."""
        value, low, high = self.step_seconds
        tokens = self.step.tokens / self.step.devices
        return PredictedValue(tokens / value, tokens / high, tokens / low)

    @property
    def tflops(self) -> PredictedValue:
        """Model FLOPs of a device in TFLOP/s."""
        return self.tokens_per_second_per_device.scale(self.flops_per_token / 1e12)

    @property
    def mfu(self) -> PredictedValue | None:
        """Model FLOPs utilisation; None without a known peak."""
        return None if self.peak_tflops is None else self.tflops.scale(1 / self.peak_tflops)

    @property
    def days(self) -> PredictedValue:
        """The time of the whole run in days."""
        return self.step_seconds.scale(self.steps / SECONDS_PER_DAY)

    @property
    def device_hours(self) -> PredictedValue:
        """Device-hours of the whole run."""
        return self.step_seconds.scale(self.steps * self.step.devices / SECONDS_PER_HOUR)

    @property
    def cost(self) -> PredictedValue | None:
        """The cost of the whole run; None without a price."""
        return None if self.price is None else self.device_hours.scale(self.price)


def _format_predicted(figure: PredictedValue, unit: str = "") -> str:
    low, high = format_rounded(figure.low), format_rounded(figure.high)
    return f"{format_rounded(figure.value)} {unit}".rstrip() + f" ({low} to {high})"


def build_interval(value: float, error: float) -> PredictedValue:
    """Return a predicted value with the interval of a relative error."""
    return PredictedValue(value, value / (1 + error), value * (1 + error))


def check_sharding(recipe: Recipe) -> None:
    """Raise ConfigError where a strategy shards the model in another way than FSDP, which alone is estimated."""
    if (sharding := recipe.parallelism.model_sharding) is not None:
        raise ConfigError(
            f"parallelism.groups: titan.plan estimates FSDP, and {sharding._target_} shards the model; leave the group "
            "out for the figures of FSDP."
        )


def build_plan(recipe: Recipe, layout: Layout, microbatches: int, machine: Machine) -> Plan:
    """Return the plan of a recipe.

    Raises:
        ConfigError: when a figure of the hardware is missing, or the sharding is not estimated.
    """
    check_sharding(recipe)
    hardware = resolve_hardware(recipe.cluster, machine)
    speeds = derive_device_speeds(recipe, hardware, machine, layout)
    constants = load_constants()
    usages = [
        overhead.add_overhead(recipe, layout, microbatches, usage, machine.device, overhead.load_fragments(layout))
        for usage in memory.estimate_peaks(recipe, layout, microbatches, machine.device)
    ]
    dtype, cpu = recipe.precision.compute, machine.device == "cpu"
    experts = takes_longer(recipe, layout)
    own = list_own_modules(recipe.model)
    memory_gib = recipe.cluster.memory_gib or machine.memory_gib
    planned = Plan(
        memory=tuple(usages),
        step=estimate_step(recipe, layout, microbatches, speeds),
        error=constants.cpu_error if cpu else constants.experts_error if experts else constants.error,
        memory_error=constants.cpu_memory_error if cpu else constants.memory_error,
        memory_gib=memory_gib / layout.devices if memory_gib and cpu else memory_gib,
        peak_tflops=hardware.bf16_tflops if dtype == "bf16" else hardware.fp32_tflops,
        flops_per_token=recipe.model.flops_per_token(recipe.training.seq_len),
        steps=recipe.training.steps,
        checkpoint_bytes=sum(memory.count_checkpoint_bytes(recipe)),
        price=recipe.cluster.price,
        microbatches=microbatches,
        intervals=(MEASURED if cpu else describe_experts(constants) if experts else PUBLISHED)
        + describe_unmeasured(hardware, machine.device, experts),
    )
    if not own:
        return planned
    intervals = (
        f"none, because {' and '.join(own)} {'is' if len(own) == 1 else 'are'} not titan's: memory and time are those "
        "of titan's own attention and blocks; plan.trace=true traces the step"
    )
    return replace(planned, error=0.0, memory_error=0.0, intervals=intervals)


@lru_cache(64)
def has_experts(model: Decoder) -> bool:
    """Return whether a block of the model has experts."""
    return model.sum_over_blocks(model.expert_parameters) > 0


def takes_longer(recipe: Recipe, layout: Layout) -> bool:
    """Return whether a step takes longer than the fit on dense models predicts: one with experts, unless on one GPU."""
    return has_experts(recipe.model) and layout.devices > 1


def describe_experts(constants: Constants) -> str:
    """Return what the estimate and the interval of a model with experts on GPUs are."""
    least, most = f"{constants.experts_least:.1f}", f"{constants.experts_most:.1f}"
    return (
        f"published models with experts take {least} to {most} times as long as the fit on dense ones predicts; "
        f"step times are {constants.experts:.2g} times the fit's, the mean, and their ranges cover each published "
        "model when the others predict it"
    )


def resolve_hardware(cluster: Cluster, machine: Machine) -> Hardware:
    """Return the figures of a cluster's hardware, with peaks of known devices where it gives none."""
    hardware = cluster.hardware
    dtypes: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
    for dtype in dtypes:
        name = f"{dtype}_tflops"
        peak = cluster.peak_tflops if dtype == "bf16" else None
        peak = peak or look_up_peak_tflops(machine.name, dtype)
        if getattr(hardware, name) is None and peak is not None:
            change: Any = {name: peak}
            hardware = replace(hardware, **change)
    return hardware


def derive_device_speeds(recipe: Recipe, hardware: Hardware, machine: Machine, layout: Layout) -> Speeds:
    """Return the speeds of a device.

    The ranks of a CPU share its cores, so each has its part of the measured speed.
    """
    per_node = count_ranks_per_node(recipe.cluster, machine, layout.devices)
    if layout.devices > 1:
        hardware.require_figure("link_gb_per_second", "communication between devices of a node")
    if layout.devices > per_node:
        hardware.require_figure("network_gb_per_second", "communication between nodes")
    dtype: Literal["bf16", "fp32"] = "bf16" if recipe.precision.compute == "bf16" else "fp32"
    if machine.device == "cpu":
        machine_speeds = operations.derive_speeds(hardware, per_node, dtype=dtype, kernel="flash")
        return _share_cpu(machine_speeds, min(per_node, layout.devices), hardware)
    kernel = choose_attention_kernel(recipe, machine)
    speeds = operations.derive_speeds(hardware, per_node, dtype=dtype, kernel=kernel)
    return replace(speeds, slowdown=load_constants().experts) if takes_longer(recipe, layout) else speeds


def count_ranks_per_node(cluster: Cluster, machine: Machine, devices: int) -> int:
    """Return the ranks on each node: one for each GPU; a CPU has as many as the layout needs."""
    if cluster.devices_per_node != "auto":
        return int(cluster.devices_per_node)
    return machine.count if machine.device == "cuda" else math.ceil(devices / cluster.nodes)


def _share_cpu(speeds: Speeds, ranks: int, hardware: Hardware) -> Speeds:
    """Return the speeds of one of several ranks on a CPU: their computation, and where they are more than cores, their
    launches and communication too."""
    share = (hardware.rank_speed or 1.0) / ranks if ranks > 1 else 1.0
    wait_factor = max(1.0, ranks / (hardware.cores or ranks))
    changes: Any = {
        name: share * getattr(speeds, name)
        for name in ("matmul", "matmul_8bit", "attention", "attention_backward", "memory")
    }
    changes |= {name: getattr(speeds, name) / wait_factor for name in ("link", "reduce", "sum")}
    changes |= {name: wait_factor * getattr(speeds, name) for name in ("launch", "link_latency", "step")}
    changes["host"] = {
        name: (wait_factor * per_unit, wait_factor * per_step) for name, (per_unit, per_step) in speeds.host.items()
    }
    return replace(speeds, turns=wait_factor, **changes)


def choose_attention_kernel(recipe: Recipe, machine: Machine) -> str:
    """Return the attention kernel of a run on a GPU."""
    kernel = recipe.training.attention
    if kernel != "auto":
        return kernel
    return "cudnn" if (machine.capability or 0) >= HOPPER else "flash"


def list_memory_parts(plan: Plan) -> Mapping[str, float]:
    """Return the bytes of the fullest rank by category, without those that are zero."""
    return {name: size / GIB for name, size in plan.fullest.parts.items() if size > 0}


_H100 = Hardware(
    bf16_tflops=989, fp8_tflops=1979, fp32_tflops=67, memory_gb_per_second=3350, units=132, watts=700,
    reference_watts=700, link_gb_per_second=340, link_microseconds=12, network_gb_per_second=42.5,
    network_microseconds=35,
)  # fmt: skip
PUBLISHED_HARDWARE = (_H100, replace(_H100, watts=500, memory_gb_per_second=2400))
"""The hardware of the published runs of dense models: 80 GB, and 96 GB with less power."""
_B200 = Hardware(
    bf16_tflops=2250, fp8_tflops=4500, fp32_tflops=75, memory_gb_per_second=7700, units=148, watts=1000,
    reference_watts=1000, link_gb_per_second=680, link_microseconds=12, network_gb_per_second=42.5,
    network_microseconds=35,
)  # fmt: skip
EXPERTS_HARDWARE = (_H100, _B200)
"""The hardware of the published runs of models with experts."""
CALIBRATED_FIGURES = (
    "attention_tflops", "attention_backward_tflops", "eager_factor", "loss_factor", "update_factor",
    "step_microseconds",
)  # fmt: skip
"""Figures of a CPU that no data sheet has, and `titan.calibrate` measures."""


def describe_unmeasured(hardware: Hardware, device: str, experts: bool = False) -> str:
    """Return the end of the sentence on a plan's intervals where no runs were measured on such hardware; else empty."""
    if device == "cpu":
        is_calibrated = all(getattr(hardware, name) is not None for name in CALIBRATED_FIGURES)
        return "" if is_calibrated else "; titan.calibrate has not measured this one, so errors may be larger"
    if hardware in (EXPERTS_HARDWARE if experts else PUBLISHED_HARDWARE):
        return ""
    names = "H100 and B200" if experts else "H100"
    return f"; they ran on {names}, not on hardware with these figures, so errors may be larger"
