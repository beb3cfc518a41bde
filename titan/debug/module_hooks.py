"""Hooks on the modules of a rank's stages for one step, which know the stage and the micro-batch of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan.model.parts import Part


@dataclass
class StageCall:
    """The micro-batch that a stage computes."""

    stage: int  # index of the stage on this rank
    microbatch: int = -1  # its number in the step
    args: tuple[Any, ...] = ()  # positional arguments of the stage's `forward`
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the stage's `forward`
    # modules that were called; a checkpointed block calls them again in the backward pass
    called: set[tuple[str, nn.Module]] = field(default_factory=set)

    def get_argument(self, position: int, name: str) -> Any:
        """Return an argument of the stage's `forward`, given by place or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


BeforeHook = Callable[[StageCall, nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]
"""Called before a module with the call, the module and its arguments; may return others."""
AfterHook = Callable[[StageCall, nn.Module, tuple[Any, ...], Tensor], Tensor | None]
"""Called after a module with the call, the module, its arguments and its output; may return another one."""


class ModuleHooks:
    """Hooks that are removed at the end of a context. Each is called once for each micro-batch.

    No mode sees what a hook computes: selective checkpointing counts the matmuls of a block in both of its passes.

    Compiled modules ignore hooks: run the step within `force_eager`, or have the hooks run around the compiled code,
    as far as it has outputs (`find_compiled_parts`).
    """

    stays_in_modes = False  # whether hooks run within the modes after all, such as those that begin or end one

    def __init__(self, stages: Sequence[nn.Module], *, around_compiled: bool = False) -> None:
        """Count the micro-batches of these stages.

        Args:
            stages: of this rank.
            around_compiled: whether compiled modules run compiled; hooks see what goes in and comes out.
        """
        self.stages, self.around_compiled = stages, around_compiled
        self.calls = [StageCall(index) for index in range(len(stages))]
        self._handles: list[Any] = []
        for call, stage in zip(self.calls, stages, strict=True):
            self._register(stage, "before", _make_counter(call), prepend=True, with_kwargs=True)

    def _register(self, module: nn.Module, side: str, hook: Callable[..., Any], **options: bool) -> None:
        """Have a hook called before or after a module, around its compiled code where that runs."""
        if self.around_compiled and module._compiled_call_impl is not None:
            self._handles.append(CompiledHook(module, **{side: hook}))
        else:
            register: Any = module.register_forward_pre_hook if side == "before" else module.register_forward_hook
            self._handles.append(register(hook, **options))

    def _leave_modes(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stays_in_modes else _disable_current_modes()

    def add_before(self, stage: int, module: nn.Module, hook: BeforeHook) -> None:
        """Call `hook` before a module of a stage, after the hooks that it has already."""
        call = self.calls[stage]

        def call_hook(module: nn.Module, args: tuple[Any, ...], *kwargs: Any) -> Any:
            if not _is_first_call(call, "before", module):
                return None
            with self._leave_modes():
                return hook(call, module, args)

        self._register(module, "before", call_hook)

    def add_after(self, stage: int, module: nn.Module, hook: AfterHook, *, first: bool = False) -> None:
        """Call `hook` after a module of a stage and the hooks that it has already; with `first` before those.

        Of a block that returns loss terms too it gets the hidden states.
        """
        call = self.calls[stage]

        def call_hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not _is_first_call(call, "after", module):
                return None
            hidden, *losses = out if isinstance(out, tuple) else (out,)
            with self._leave_modes():
                replacement = hook(call, module, args, hidden)
            return replacement if replacement is None or not losses else (replacement, *losses)

        self._register(module, "after", call_hook, prepend=first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in reversed(self._handles):
            handle.remove()


class CompiledHook:
    """A hook around the compiled call of a module: within it, torch would compile the hook too."""

    def __init__(
        self, module: nn.Module, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        self.module, self.compiled = module, module._compiled_call_impl
        compiled: Any = self.compiled

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            changed_args = before(module, args, kwargs) if before is not None else None
            out = compiled(*(args if changed_args is None else changed_args), **kwargs)
            replacement = after(module, args, out) if after is not None else None
            return out if replacement is None else replacement

        module._compiled_call_impl = call_compiled

    def remove(self) -> None:
        """Restore the compiled call; hooks are removed in the opposite order."""
        self.module._compiled_call_impl = self.compiled


def _make_counter(call: StageCall) -> Callable[..., None]:
    def count_call(stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.microbatch += 1
        call.args, call.kwargs = args, kwargs
        call.called.clear()

    return count_call


def _is_first_call(call: StageCall, side: str, module: nn.Module) -> bool:
    """Whether this is the first call of a module in a micro-batch, not its recomputation."""
    is_repeated = (side, module) in call.called
    call.called.add((side, module))
    return not is_repeated


def force_eager(compiled: bool) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are written, with their hooks."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def find_compiled_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside of compiled code, whose outputs no hook sees while they run compiled."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module._compiled_call_impl is not None:
            inside.update(other for other in module.modules() if other is not module)
        if "attend" in vars(module):  # the method of this block is compiled by itself
            inside.update(Part(module, "attend").list_modules())
    return inside
