"""The operations inside of one module: what they are, and how large their results are. Built on torch's DebugMode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan.debug.module_hooks import ModuleHooks, StageCall
from titan.training.replay.observation import Operation
from titan.training.train_step import TrainStep

LARGEST_COUNT = 10_000
"""Operations that are recorded of a module."""


class OperationWatch(ModuleHooks):
    """Records the operations of one module's first forward pass.

    Attributes:
        operations: in their order.
    """

    stays_in_modes = True

    def __init__(self, train_step: TrainStep, name: str) -> None:
        super().__init__(train_step.stages)
        self.operations: list[Operation] = []
        self._stack: ExitStack | None = None
        self._paths: list[str] = []
        for index, stage in enumerate(train_step.stages):
            for path, module in _iterate_inside(stage.model, name):
                self._watch(index, path, module, is_root=path == name)

    def _watch(self, stage: int, path: str, module: nn.Module, is_root: bool) -> None:
        def enter(call: StageCall, module: nn.Module, args: tuple[Any, ...]) -> None:
            if call.microbatch == 0:
                self._paths.append(path)
                if is_root:
                    self._begin()

        def leave(call: StageCall, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if call.microbatch == 0:
                if is_root:
                    self._end()
                self._paths.pop()

        self.add_before(stage, module, enter)
        self.add_after(stage, module, leave)

    def _begin(self) -> None:
        from torch.utils._debug_mode import DebugMode  # only here: it imports much

        self._stack = ExitStack()
        self._stack.enter_context(DebugMode())
        self._stack.enter_context(DebugMode.dispatch_hooks(record_hook=self._record))

    def _end(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def __exit__(self, *error: Any) -> None:
        self._end()
        super().__exit__(*error)

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, Any]:
        """Record what an operation returns; DebugMode calls it."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if tensors and len(self.operations) < LARGEST_COUNT:
            sums = [number for x in tensors for number in _measure(x)]
            path = self._paths[-1] if self._paths else ""
            shapes = tuple(tuple(x.shape) for x in tensors)
            self.operations.append(Operation(path, str(func), shapes, tuple(sums)))
        return {}


def _iterate_inside(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it that compute something, with their names in the model."""
    for path, module in model.named_modules():
        if (path == name or path.startswith(f"{name}.")) and type(module).forward is not nn.Module.forward:
            yield path, module


@torch.no_grad()
def _measure(x: Tensor) -> tuple[float, float]:
    """Return a sum of the elements, with weights by which it changes with their order, and one of absolute values."""
    values = x.detach().to(torch.float64).flatten()
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    return float((values * weights).sum()), float((values.abs() * weights).sum())
