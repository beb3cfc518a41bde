"""Hooks on the modules of a rank's stages for one step, which know the stage and the micro-batch of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """The micro-batch that a stage computes.

    Attributes:
        stage: index of the stage on this rank.
        microbatch: its number in the step.
        args, kwargs: of the stage's `forward`.
        seen: modules that were called; a checkpointed block calls them again in the backward pass.
    """

    stage: int
    microbatch: int = -1
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    seen: set[tuple[str, nn.Module]] = field(default_factory=set)

    def argument(self, place: int, name: str) -> Any:
        """Return an argument of the stage's `forward`, given by place or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


Before = Callable[[Call, nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]
"""Called before a module with the call, the module and its arguments; may return others."""
After = Callable[[Call, nn.Module, tuple[Any, ...], Tensor], Tensor | None]
"""Called after a module with the call, the module, its arguments and its output; may return another one."""


class Hooks:
    """Hooks that are removed at the end of a context. Each is called once for each micro-batch.

    Compiled modules ignore hooks: run the step within `eagerly`.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        """Count the micro-batches of these stages."""
        self.stages = stages
        self.calls = [Call(index) for index in range(len(stages))]
        self._handles: list[Any] = []
        for call, stage in zip(self.calls, stages, strict=True):
            hook = _counting(call)
            self._handles.append(stage.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def before(self, stage: int, module: nn.Module, hook: Before) -> None:
        """Call `hook` before a module of a stage, after the hooks that it has already."""
        call = self.calls[stage]

        def run(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return hook(call, module, args) if _first(call, "before", module) else None

        self._handles.append(module.register_forward_pre_hook(run))

    def after(self, stage: int, module: nn.Module, hook: After, *, first: bool = False) -> None:
        """Call `hook` after a module of a stage and the hooks that it has already; with `first` before those.

        Of a block that returns loss terms too it gets the hidden states.
        """
        call = self.calls[stage]

        def run(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not _first(call, "after", module):
                return None
            hidden, *losses = out if isinstance(out, tuple) else (out,)
            other = hook(call, module, args, hidden)
            return other if other is None or not losses else (other, *losses)

        self._handles.append(module.register_forward_hook(run, prepend=first))

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()


def _counting(call: Call) -> Callable[..., None]:
    def hook(stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.microbatch += 1
        call.args, call.kwargs = args, kwargs
        call.seen.clear()

    return hook


def _first(call: Call, when: str, module: nn.Module) -> bool:
    """Whether this is the first call of a module in a micro-batch, not its recomputation."""
    known = (when, module) in call.seen
    call.seen.add((when, module))
    return not known


def eagerly(compiled: bool) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are written, with their hooks."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def submodules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules of a model that compute something, with their names."""
    return ((n, m) for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleDict | nn.ModuleList))
