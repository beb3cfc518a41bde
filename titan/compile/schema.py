"""The compile axis: torch.compile of each block, or of the whole model; `choose` is what `compile=auto` comes to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from titan.config.settings import setting

if TYPE_CHECKING:
    import torch

    from titan.cluster.devices import Machine
    from titan.run.recipe import Run

PAYS = 300
"""Seconds of work, not compiled, from which on compiling pays on a CPU; see docs/benchmarks.md."""
CORE_FLOPS = 55e9
"""FLOPs that a CPU core does in a second of training."""
FAST = 90e9
"""The same in bf16, on a core that is fast at it."""
DEEP = 12
"""Up to so many layers are compiled at once: compiling takes the longer the more there are, see docs/benchmarks.md."""
LARGE = 50e6
"""From so many parameters on compiling all at once gains nothing over blocks on a CPU."""
EMULATED = 10
"""So many times slower are products in eight bits that are emulated."""
TRITON = 7.0
"""The least compute capability of a GPU that triton makes kernels for."""


@dataclass(frozen=True)
class Compile:
    """What torch.compile compiles."""

    scope: Literal["auto", "off", "block", "model"] = setting(
        "auto",
        "auto: where it works and pays block, on one CPU device model, else off; block: each block as one graph that "
        "all share, and the head with the loss; model: all from tokens to loss at once; off",
    )
    backend: Literal["inductor", "aot_eager", "eager"] = setting(
        "inductor", "the compiler: inductor, or aot_eager and eager to look for errors"
    )


def choose(run: Run, elsewhere: bool = False) -> tuple[Literal["off", "block", "model"], str]:
    """What `compile=auto` comes to, and why, in a few words.

    Args:
        run: with all that a machine decides; its own scope does not matter.
        elsewhere: its machine is a node of those that a scheduler will give, where other programs may be installed.
    """
    if run.debug.detect_anomaly:
        return "off", "debug.detect_anomaly"
    if run.staging.splits_backward and not elsewhere and () < _torch() < (2, 13):
        return "off", f"{run.staging.schedule} before torch 2.13"
    if run.memory.checkpointing == "budget" or run.parallelism.async_tensor:
        return "block", "memory=budget" if run.memory.checkpointing == "budget" else "parallelism.async_tensor"
    if lacking := why_not(run.machine, run.compile.backend, elsewhere):
        return "off", lacking
    if run.machine.device == "cuda":
        return "block", "on a GPU"
    if keeps_scales(run):
        return "off", "Inductor has no kernels for MXFP8's scales on CPUs"
    seconds, pays = eager_seconds(run), PAYS * max(1.0, run.layout.devices / _cores(run))
    if seconds < pays:
        return "off", f"about {_span(seconds)} of work, and it pays from {_span(pays)} on"
    if why := why_blocks(run):
        return "block", f"about {_span(seconds)} of work; {why}"
    return "model", f"about {_span(seconds)} of work on one CPU device"


def why_blocks(run: Run) -> str | None:
    """Why a CPU compiles blocks for themselves; None where all from tokens to loss is compiled at once.

    At once, what is between blocks is fused, too. But where blocks are to compute again, or ranks talk to each other,
    it is what is around blocks that matters, and a graph of each is what was measured.
    """
    if run.layout.devices > 1:
        return f"blocks, for {run.layout.devices} ranks"
    if run.memory.checkpointing != "none":
        return f"blocks, for memory={run.memory.checkpointing}"
    if run.dataset.mask_documents:
        return "blocks, for dataset.mask_documents"
    if run.precision.small:
        return f"blocks, for precision={run.precision.products}"
    if run.model.parameters() >= LARGE:
        return "blocks, since all at once would be no faster for a model of this size"
    if run.model.layers > DEEP:
        return f"blocks, for {run.model.layers} layers, which take long to compile at once"
    return None


def keeps_scales(run: Run) -> bool:
    """Whether compiled blocks would keep MXFP8's scales, a type that Inductor (torch 2.13) has no CPU kernels for."""
    kept = run.memory.checkpointing == "selective" and run.precision.products == "mxfp8"
    return kept and run.machine.device == "cpu" and run.compile.backend == "inductor"


def eager_seconds(run: Run) -> float:
    """About how long the whole run computes on a CPU if nothing is compiled, whose cores its ranks share."""
    how, flops = run.precision, run.training.tokens * run.model.flops_per_token(run.training.seq_len)
    pace = FAST if how.compute == "bf16" and run.machine.bf16_fast else CORE_FLOPS
    return flops * (EMULATED if how.small and how.emulate else 1) / pace / _cores(run)


def _cores(run: Run) -> int:
    """Cores of all nodes, which are taken to be as this one."""
    return run.machine.cores * run.cluster.nodes


def why_not(machine: Machine, backend: str, elsewhere: bool = False) -> str | None:
    """What keeps a backend from making kernels here; None where nothing does, or nothing is known.

    Args:
        machine: where it would compile.
        backend: as in `Compile`; only inductor makes kernels.
        elsewhere: `machine` is a node that a scheduler will give, with programs of its own.
    """
    if elsewhere or backend != "inductor":
        return None
    if machine.device == "cuda":
        return _why_no_triton(machine)
    return _missing("C++", os.environ.get("CXX", "g++"))  # all that it looks for


def _why_no_triton(machine: Machine) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if machine.capability is not None and machine.capability < TRITON:
        return f"{machine.name} has compute capability {machine.capability:g}, and triton takes {TRITON} or more"
    named = os.environ.get("CC")
    return _missing("C", named) if named else _missing("C", "gcc", "clang")


def _missing(language: str, *programs: str) -> str | None:
    """That none of these compilers is there; None where one is."""
    if any(map(shutil.which, programs)):
        return None
    return f"no {language} compiler in PATH, which would be {' or '.join(programs)}"


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _torch() -> tuple[int, ...]:
    """The installed torch's version, without loading it; nothing where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ()


@dataclass(frozen=True)
class Configured:
    """A backend that compiles under settings of torch which are otherwise global.

    They matter where autograd's graph is cut into forward and backward, which is within the call. Equal ones are the
    same to torch's cache: stages that are compiled one after the other share graphs.

    Attributes:
        name: of torch's backend.
        share: of activations to keep, see `titan.memory.schema.Memory.share`.
        keep_buffers: whether a backward pass leaves intact what the forward pass has kept, for a second one.
    """

    name: str
    share: float | None = None
    keep_buffers: bool = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable[..., Any]:
        """Compile a graph."""
        from torch._dynamo import lookup_backend

        with ExitStack() as stack:
            stack.enter_context(_nothing_random())
            if self.share is not None:
                stack.enter_context(_budget(self.share))
            if self.keep_buffers:
                stack.enter_context(_nothing_donated())
            compiled: Callable[..., Any] = lookup_backend(self.name)(graph, inputs, **kwargs)
        return compiled


@contextmanager
def _budget(share: float) -> Iterator[None]:
    from torch._functorch import config

    settings: dict[str, Any] = {"activation_memory_budget": share}
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        settings["unsafe_treat_script_objects_as_zero_size"] = True  # the mesh of a DTensor holds no tensor
    with config.patch(settings):
        yield


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """Let backward graphs overwrite nothing that was kept for them.

    torch's own setting for it, `donated_buffer`, is not enough: it is asked again when backward runs, maybe by a thread
    for which it was not set, and Inductor's cache on disk gives out graphs that were compiled without it, whose second
    run is silently wrong. So nothing is found that could be donated, and the cache gets a name of its own; for that,
    backward has to be compiled now.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile
    from torch.compiler import config as caching

    now = "force_non_lazy_backward_lowering"
    with (
        config.patch({now: True} if hasattr(config, now) else {}),
        caching.patch(cache_key_tag=f"{caching.cache_key_tag} buffers kept"),  # type: ignore[attr-defined]
        _replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *args: []),
    ):
        yield


@contextmanager
def _nothing_random() -> Iterator[None]:
    """Let recomputation leave the random generator alone, as in eager, where titan tells `checkpoint` so.

    The compiler does not hear that. It takes attention for random, for the dropout that it might have, and keeps the
    generator's state for each; where a weight is a DTensor, whose mesh is kept too, torch 2.13 mixes up the two.
    """
    from torch._functorch import partitioners

    name = "has_recomputable_rng_ops"
    with _replaced(partitioners, name, lambda graph: False) if hasattr(partitioners, name) else nullcontext():
        yield


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within this context `function` is what `module` knows under `name`."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def apply(
    stage: Any, settings: Compile, *, whole: bool = False, share: float | None = None, keep_buffers: bool = False
) -> None:
    """Compile a stage in place: parameter names stay, and hooks that come later are around what is compiled.

    With scope "block" equal blocks, also those of other stages, share one graph; the head with the loss is another.
    What torch compiles anew for evaluation is another graph each, once.

    Args:
        stage: a module with a `model`, a `titan.model.decoder.Decoder` or a part of one.
        settings: what to compile, by which backend.
        whole: with scope "model", make it one graph, or raise where that can't be; else torch may cut it, as it has to
            where FSDP gathers weights inside.
        share: of the blocks' activations to keep (with scope "model", of all), between 0: as with full checkpointing,
            and 1: what is fastest. None: what torch thinks best. Without effect with backend "eager".
        keep_buffers: let backward passes leave intact what was kept, as schedules need that compute the gradients of
            inputs and of weights in two passes.
    """
    backend = Configured(settings.backend, share, keep_buffers)
    if settings.scope == "block":
        for block in stage.model.blocks():
            block.compile(backend=backend, fullgraph=True)
        if stage.model.head is not None:
            stage.model.head.compile(backend=replace(backend, share=None), fullgraph=True)
    elif settings.scope == "model":
        stage.compile(backend=backend, fullgraph=whole, **_apart())


def _apart() -> dict[str, bool]:
    """What makes torch count the graphs of one module apart from those of others, where it can.

    It gives up compiling after eight graphs of one function, and a rank may have more stages than four.
    """
    import torch

    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
