"""Choose what `compile=auto` compiles. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from titan.cluster.compiler import find_missing_compiler, read_torch_version
from titan.console.numbers import format_plural

if TYPE_CHECKING:
    from titan.run.run import Run


WORTH_SECONDS = 300
"""The estimated run time in seconds, without compiling, above which compiling pays on a CPU; see docs/benchmarks.md."""


CORE_FLOPS = 55e9
"""FLOP/s of a CPU core in training."""


FAST_CORE_FLOPS = 90e9
"""FLOP/s of a CPU core in training in bf16, if it has instructions for that."""


MOST_LAYERS = 12
"""The most layers that are compiled at once: the more there are, the longer that takes; see docs/benchmarks.md."""


MOST_PARAMETERS = 50e6
"""From so many parameters on, compiling all at once gains nothing over blocks on a CPU."""


EMULATION_FACTOR = 10
"""How many times slower emulated 8-bit matmuls are."""


def choose_scope(run: Run, remote: bool = False) -> tuple[Literal["off", "block", "model"], str]:
    """Return the scope that `compile=auto` means for a run, and the reason in a few words.

    Args:
        remote: its machine is a node that a scheduler will provide, where other programs may be installed.
    """
    if run.debug.detect_anomaly:
        return "off", "debug.detect_anomaly"
    if run.staging.splits_backward and not remote and () < read_torch_version() < (2, 13):
        return "off", f"{run.staging.schedule} before torch 2.13"
    if run.memory.checkpointing == "budget" or run.parallelism.async_tensor:
        return "block", "memory=budget" if run.memory.checkpointing == "budget" else "parallelism.async_tensor"
    if lacking := find_missing_compiler(run.machine, run.compile.backend, remote):
        return "off", lacking
    if run.machine.device == "cuda":
        return "block", "on a GPU"
    if keeps_scales(run):
        return "off", "Inductor has no kernels for MXFP8's scales on CPUs"
    seconds, break_even = estimate_eager_seconds(run), WORTH_SECONDS * max(1.0, run.layout.devices / _count_cores(run))
    if seconds < break_even:
        return "off", f"the FLOPs take {_format_span(seconds)}; compiling pays above {_format_span(break_even)}"
    if reason := find_block_reason(run):
        return "block", f"the FLOPs take {_format_span(seconds)}; {reason}"
    return "model", f"the FLOPs take {_format_span(seconds)} on one CPU device"


def find_block_reason(run: Run) -> str | None:
    """Return why a CPU compiles blocks one by one; None where all from tokens to loss is compiled at once.

    At once, what is between blocks is fused, too. But where blocks are recomputed, or ranks communicate, what is around
    blocks decides, and one graph per block is what was measured.
    """
    if run.layout.devices > 1:
        return f"blocks, for {run.layout.devices} ranks"
    if run.memory.checkpointing != "none":
        return f"blocks, for memory={run.memory.checkpointing}"
    if run.dataset.mask_documents:
        return "blocks, for dataset.mask_documents"
    if run.precision.eight_bit:
        return f"blocks, for precision={run.precision.matmuls}"
    if run.model.parameters() >= MOST_PARAMETERS:
        return "blocks, since compiling all at once is no faster for a model of this size"
    if run.model.layers > MOST_LAYERS:
        return f"blocks, since {run.model.layers} layers take long to compile at once"
    return None


def keeps_scales(run: Run) -> bool:
    """Return whether compiled blocks would save MXFP8's scales, for which Inductor (torch 2.13) has no CPU kernels."""
    saves_scales = run.memory.checkpointing == "selective" and run.precision.matmuls == "mxfp8"
    return saves_scales and run.machine.device == "cpu" and run.compile.backend == "inductor"


def estimate_eager_seconds(run: Run) -> float:
    """Return the estimated run time on a CPU, whose cores the ranks share, if nothing is compiled."""
    precision, flops = run.precision, run.training.total_tokens * run.model.flops_per_token(run.training.seq_len)
    flops_per_second = FAST_CORE_FLOPS if precision.compute == "bf16" and run.machine.bf16_fast else CORE_FLOPS
    factor = EMULATION_FACTOR if precision.eight_bit and precision.emulate else 1
    return flops * factor / flops_per_second / _count_cores(run)


def _count_cores(run: Run) -> int:
    """Return the cores of all nodes, assuming that they are like this one."""
    return run.machine.cores * run.cluster.nodes


def _format_span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return format_plural(round(seconds), "second")
