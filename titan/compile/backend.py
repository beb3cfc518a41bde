"""Compile the stages of a model, under settings of torch that are otherwise global."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan.compile.schema import Compile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ConfiguredBackend:
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


def compile_stage(
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
    backend = ConfiguredBackend(settings.backend, share, keep_buffers)
    if settings.scope == "block":
        for block in stage.model.blocks():
            block.compile(backend=backend, fullgraph=True)
        if stage.model.head is not None:
            stage.model.head.compile(backend=replace(backend, share=None), fullgraph=True)
    elif settings.scope == "model":
        stage.compile(backend=backend, fullgraph=whole, **_own_cache())


def _own_cache() -> dict[str, bool]:
    """What makes torch count the graphs of one module apart from those of others, where it can.

    It gives up compiling after eight graphs of one function, and a rank may have more stages than four.
    """
    import torch

    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
