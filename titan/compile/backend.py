"""Compile the stages of a model, with per-call values of torch settings that are otherwise global.

torch shares graphs between equal parts, blocks, stages and builds of a process, so the calls of graphs are counted for
the whole process too; `GraphWatch` compares the counts before and after a step. The calls are counted by the part that
runs, and not by the part that a graph was compiled for: a backend for each part would keep torch from sharing them.

The compiler's modules are imported inside functions, because importing them takes seconds that eager runs do not need.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from titan.compile.schema import Compile
from titan.model.experts import Experts
from titan.model.parts import Part, is_one_part

_NUMBERS = count()
_CALLS: Counter[tuple[GraphLabel, int]] = Counter()


class GraphLabel(NamedTuple):
    """What a graph is of.

    Attributes:
        kind: of block, as the model names it, or another part of the model; empty: all blocks are of one kind.
        part: of a block that is compiled in parts; empty: all of it.
    """

    kind: str = ""
    part: str = ""

    @property
    def name(self) -> str:
        """The kind in a word: of blocks of one's own, whose kind lists their modules, the class."""
        return self.kind[1:].partition(",")[0].partition(" ")[0] if self.kind.startswith(":") else self.kind or "blocks"

    def __str__(self) -> str:
        return f"{self.name} ({self.part})" if self.part else self.name


WHOLE = GraphLabel()
_RUNNING: ContextVar[GraphLabel] = ContextVar("running", default=WHOLE)
"""What runs in this thread."""


def label_calls(label: GraphLabel, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function whose graphs are counted by what it is."""

    def call_labelled(*args: Any, **kwargs: Any) -> Any:
        token = _RUNNING.set(label)
        try:
            return compiled(*args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return call_labelled


def count_calls(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new graph's function that counts its calls by what runs."""
    number = next(_NUMBERS)

    def call_graph(*args: Any) -> Any:
        _CALLS[_RUNNING.get(), number] += 1
        return graph(*args)

    return call_graph


@dataclass(frozen=True)
class ConfiguredBackend:
    """A torch.compile backend that sets torch's configuration during its call only.

    The settings matter where AOTAutograd partitions the joint graph into forward and backward, which is within the
    call. Backends that compare equal share cached graphs, so stages compiled one after the other share theirs.

    Attributes:
        name: torch's backend.
        share: activation memory budget, see `titan.memory.schema.Memory.share`.
        keep_buffers: whether backward leaves saved activations intact for a second backward pass.
        inductor: names and values of `torch._inductor.config`, for forward and backward; no effect with another
            backend.
    """

    name: str
    share: float | None = None
    keep_buffers: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable[..., Any]:
        """Compile a graph with the settings."""
        from torch._dynamo import lookup_backend

        with ExitStack() as stack:
            stack.enter_context(_without_rng_state())
            if self.share is not None:
                stack.enter_context(_set_activation_budget(self.share))
            if self.keep_buffers:
                stack.enter_context(_without_donated_buffers())
            if self.name == "inductor" and self.inductor:
                kwargs["config_patches"] = {**dict(self.inductor), **(kwargs.get("config_patches") or {})}
            compiled: Callable[..., Any] = lookup_backend(self.name)(graph, inputs, **kwargs)
        return count_calls(compiled)


@contextmanager
def _set_activation_budget(share: float) -> Iterator[None]:
    """Set torch's activation memory budget."""
    from torch._functorch import config

    settings: dict[str, Any] = {"activation_memory_budget": share}
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        settings["unsafe_treat_script_objects_as_zero_size"] = True  # a DTensor's mesh has no tensor
    with config.patch(settings):
        yield


@contextmanager
def _without_donated_buffers() -> Iterator[None]:
    """Compile backward graphs that do not reuse the memory of saved activations (donated buffers).

    torch's setting `donated_buffer` is not enough: it is read again when backward runs, possibly in a thread where it
    is not set, and Inductor's disk cache returns graphs that were compiled without it, whose second run is silently
    wrong. So the function that collects donated buffers returns none, and the cache key gets a tag; for the tag to
    apply, backward is compiled eagerly.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile
    from torch.compiler import config as caching

    lowering_option = "force_non_lazy_backward_lowering"
    with (
        config.patch({lowering_option: True} if hasattr(config, lowering_option) else {}),
        caching.patch(cache_key_tag=f"{caching.cache_key_tag} buffers kept"),  # type: ignore[attr-defined]
        patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *args: []),
    ):
        yield


@contextmanager
def _without_rng_state() -> Iterator[None]:
    """Save no random state for recomputation, as `checkpoint(preserve_rng_state=False)` does in eager mode.

    The compiler ignores that argument: it treats attention as random, because of its dropout argument, and saves the
    generator's state for each call. If a weight is a DTensor, whose mesh is saved too, torch 2.13 confuses the two.
    """
    from torch._functorch import partitioners

    name = "has_recomputable_rng_ops"
    with patch.object(partitioners, name, lambda graph: False) if hasattr(partitioners, name) else nullcontext():
        yield


def compile_stage(
    stage: Any,
    settings: Compile,
    *,
    fullgraph: bool = False,
    fullgraph_blocks: bool = True,
    share: float | None = None,
    keep_buffers: bool = False,
    parts: Sequence[Sequence[Part]] | None = None,
    inductor: Mapping[str, Any] | None = None,
) -> list[GraphLabel]:
    """Compile a stage in place: parameter names stay, and hooks registered later run outside of the compiled code.

    With scope "block" equal blocks, also of other stages, share one graph, or one for each of their parts; the head
    with the loss has another. So it is with scope "model", where a block has several parts. Evaluation compiles one
    more graph each.

    Args:
        stage: a module with a `model`, a `titan.model.decoder.DecoderModel` or a part of one.
        fullgraph: with scope "model", require one graph (fullgraph); else torch may break it, as it must where FSDP
            all-gathers weights inside.
        fullgraph_blocks: with scope "block", likewise of each part of a block.
        share: activation memory budget of the blocks (with scope "model", of the model) from 0, as with full
            checkpointing, to 1, the fastest. None: torch's default. No effect with backend "eager".
        keep_buffers: leave saved activations intact in backward, for schedules that compute the gradients of inputs
            and of weights in two passes.
        parts: of each block, see `titan.model.parts`; None: each is one part.
        inductor: settings of `torch._inductor.config`, by name, for these graphs.

    Returns:
        What is compiled.
    """
    if settings.scope == "off":
        return []
    backend = ConfiguredBackend(settings.backend, share, keep_buffers, tuple(sorted((inductor or {}).items())))
    blocks = [[Part(block)] for block in stage.model.blocks()] if parts is None else parts
    if settings.scope == "model" and all(map(is_one_part, blocks)):
        label = GraphLabel("model")
        _compile_module(stage, label, backend=backend, fullgraph=fullgraph, **_isolate_recompiles())
        return [label]
    labels = []
    for number, block_parts in zip(stage.model.layers, blocks, strict=True):
        kind = stage.model.config.kind(int(number))
        labels += [GraphLabel(kind, part.name) for part in block_parts] or [GraphLabel(kind)]
        for part in block_parts:
            _compile_part(part, GraphLabel(kind, part.name), backend, fullgraph_blocks)
    if stage.model.head is not None:
        labels.append(GraphLabel("head"))
        _compile_module(stage.model.head, labels[-1], backend=replace(backend, share=None), fullgraph=True)
    return labels


def _compile_part(part: Part, label: GraphLabel, backend: ConfiguredBackend, fullgraph: bool) -> None:
    """Compile a part of a block.

    Experts get another number of rows in each call, which the 8-bit kernels of other libraries may not let torch trace.
    """
    options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph}
    if isinstance(part.module, Experts) and part.name:
        options |= {"dynamic": True, "fullgraph": False}
    if part.method == "forward":
        _compile_module(part.module, label, **options)
    else:
        part.replace(lambda method: label_calls(label, torch.compile(method, **options)))


def _compile_module(module: Any, label: GraphLabel, **options: Any) -> None:
    """Compile the calls of a module in place."""
    module.compile(**options)
    module._compiled_call_impl = label_calls(label, module._compiled_call_impl)


def _isolate_recompiles() -> dict[str, bool]:
    """Return the argument that counts recompilations per module, if this version of torch has it.

    torch stops compiling a function after eight graphs, and a rank may have more than four stages.
    """
    parameters = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in parameters else {}


class GraphWatch:
    """Counts the graphs of each part that ran since it was made."""

    def __init__(self, labels: Sequence[GraphLabel]) -> None:
        """Take the parts that are compiled."""
        self.labels = list(dict.fromkeys(labels))
        self.earlier_calls = Counter(_CALLS)

    def count_graphs(self) -> dict[GraphLabel, int]:
        """Return how many different graphs of each part ran."""
        graphs = Counter(key[0] for key, calls in _CALLS.items() if calls > self.earlier_calls[key])
        return {label: graphs[label] for label in self.labels}

    def describe(self) -> str:
        """Return the graphs of each kind of block; empty where nothing is compiled."""
        kinds: dict[str, list[str]] = {}
        for label, graphs in self.count_graphs().items():
            part = f"{label.part} {graphs}" if label.part else str(graphs)
            kinds.setdefault(label.kind, []).append(part)
        return "; ".join(f"{GraphLabel(kind).name}: {', '.join(parts)}" for kind, parts in kinds.items())

    def list_missing(self) -> list[GraphLabel]:
        """Return the parts of which no graph ran, though they are compiled."""
        return [label for label, graphs in self.count_graphs().items() if graphs == 0]
