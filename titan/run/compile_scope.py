"""What `compile=auto` chooses for a run. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from titan.compile.compiler import missing_compiler, torch_version

if TYPE_CHECKING:
    from titan.run.run import Run


WORTH_SECONDS = 300
"""Seconds of work, not compiled, from which on compiling pays on a CPU; see docs/benchmarks.md."""


CORE_FLOPS = 55e9
"""FLOPs that a CPU core does in a second of training."""


FAST_CORE_FLOPS = 90e9
"""The same in bf16, on a core that is fast at it."""


MOST_LAYERS = 12
"""Up to so many layers are compiled at once: compiling takes the longer the more there are, see docs/benchmarks.md."""


MOST_PARAMETERS = 50e6
"""From so many parameters on compiling all at once gains nothing over blocks on a CPU."""


EMULATION_FACTOR = 10
"""So many times slower are products in eight bits that are emulated."""


def choose_scope(run: Run, elsewhere: bool = False) -> tuple[Literal["off", "block", "model"], str]:
    """What `compile=auto` comes to, and why, in a few words.

    Args:
        run: with all that a machine decides; its own scope does not matter.
        elsewhere: its machine is a node of those that a scheduler will give, where other programs may be installed.
    """
    if run.debug.detect_anomaly:
        return "off", "debug.detect_anomaly"
    if run.staging.splits_backward and not elsewhere and () < torch_version() < (2, 13):
        return "off", f"{run.staging.schedule} before torch 2.13"
    if run.memory.checkpointing == "budget" or run.parallelism.async_tensor:
        return "block", "memory=budget" if run.memory.checkpointing == "budget" else "parallelism.async_tensor"
    if lacking := missing_compiler(run.machine, run.compile.backend, elsewhere):
        return "off", lacking
    if run.machine.device == "cuda":
        return "block", "on a GPU"
    if keeps_scales(run):
        return "off", "Inductor has no kernels for MXFP8's scales on CPUs"
    seconds, pays = eager_seconds(run), WORTH_SECONDS * max(1.0, run.layout.devices / _cores(run))
    if seconds < pays:
        return "off", f"about {_span(seconds)} of work, and it pays from {_span(pays)} on"
    if why := why_blocks(run):
        return "block", f"about {_span(seconds)} of work; {why}"
    return "model", f"about {_span(seconds)} of work on one CPU device"


def why_blocks(run: Run) -> str | None:
    """Why a CPU compiles blocks for themselves; None where all from tokens to loss is compiled at once.

    At once, what is between blocks is fused, too. But where blocks are to compute again, or ranks coordinator to each
    other, it is what is around blocks that matters, and a graph of each is what was measured.
    """
    if run.layout.devices > 1:
        return f"blocks, for {run.layout.devices} ranks"
    if run.memory.checkpointing != "none":
        return f"blocks, for memory={run.memory.checkpointing}"
    if run.dataset.mask_documents:
        return "blocks, for dataset.mask_documents"
    if run.precision.small:
        return f"blocks, for precision={run.precision.products}"
    if run.model.parameters() >= MOST_PARAMETERS:
        return "blocks, since all at once would be no faster for a model of this size"
    if run.model.layers > MOST_LAYERS:
        return f"blocks, for {run.model.layers} layers, which take long to compile at once"
    return None


def keeps_scales(run: Run) -> bool:
    """Whether compiled blocks would keep MXFP8's scales, a type that Inductor (torch 2.13) has no CPU kernels for."""
    kept = run.memory.checkpointing == "selective" and run.precision.products == "mxfp8"
    return kept and run.machine.device == "cpu" and run.compile.backend == "inductor"


def eager_seconds(run: Run) -> float:
    """About how long the whole run computes on a CPU if nothing is compiled, whose cores its ranks share."""
    how, flops = run.precision, run.training.tokens * run.model.flops_per_token(run.training.seq_len)
    pace = FAST_CORE_FLOPS if how.compute == "bf16" and run.machine.bf16_fast else CORE_FLOPS
    return flops * (EMULATION_FACTOR if how.small and how.emulate else 1) / pace / _cores(run)


def _cores(run: Run) -> int:
    """Cores of all nodes, which are taken to be as this one."""
    return run.machine.cores * run.cluster.nodes


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
