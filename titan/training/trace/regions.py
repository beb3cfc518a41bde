"""Sets the region of a trace by hooks on the blocks of a model and on the actions of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

from torch import Tensor
from torch.utils import checkpoint

from titan.debug.module_hooks import CompiledHook
from titan.estimate.traced.events import AFTER, BEFORE, NONE, OUTSIDE, Region
from titan.parallelism.pipeline import runtime
from titan.training.train_step import GradAccumulation, ModelStage


class RegionListener(Protocol):
    """What learns where a step is, and whether a checkpointed block is computed again."""

    region: Region
    recomputing: bool


class StageRegions:
    """Follows one stage through its micro-batches."""

    def __init__(self, listener: RegionListener, stage: ModelStage, number: int, split_backward: bool) -> None:
        """Set hooks on a stage.

        Args:
            split_backward: whether the schedule separates backward for inputs and for weights.
        """
        self.listener, self.number, self.split_backward = listener, number, split_backward
        self.microbatch = -1
        self.exit_stack = ExitStack()
        self._wrap_module(stage, self._begin_stage, self._end_stage)
        if stage._compiled_call_impl is None:  # else what is inside is compiled with it, hooks too
            first = int(next(iter(stage.model.layers)))
            for index, block in enumerate(stage.model.blocks(), first):
                self._wrap_module(block, self._build_enter_hook(index, first), self._build_leave_hook(index))
            if stage.model.head is not None:
                self._wrap_module(stage.model.head, lambda *_: self._set_region("F", self.microbatch, AFTER))

    def _wrap_module(
        self, module: Any, pre_hook: Callable[..., None], post_hook: Callable[..., None] | None = None
    ) -> None:
        """Call functions before and after a module; of a compiled one outside of its compiled code."""
        if module._compiled_call_impl is not None:
            hook = CompiledHook(module, lambda module, args, kwargs: pre_hook(module, args), post_hook)
            self.exit_stack.callback(hook.remove)
            return
        self.exit_stack.callback(module.register_forward_pre_hook(pre_hook).remove)
        if post_hook is not None:
            self.exit_stack.callback(module.register_forward_hook(post_hook).remove)

    def remove(self) -> None:
        """Remove the hooks."""
        self.exit_stack.close()

    def _set_region(self, action: str, microbatch: int, block: int) -> None:
        self.listener.region = Region(action, self.number, microbatch, block)

    def _build_gradient_hook(self, microbatch: int, block: int) -> Callable[[Tensor], None]:
        def enter_backward(grad: Tensor) -> None:
            if not self.split_backward:
                self._set_region("B", microbatch, block)

        return enter_backward

    def _begin_stage(self, *_: Any) -> None:
        self.microbatch += 1
        self._set_region("F", self.microbatch, BEFORE)

    def _build_enter_hook(self, index: int, first: int) -> Callable[..., None]:
        def enter_block(_: Any, args: Any) -> None:
            self._set_region("F", self.microbatch, index)
            if index == first and args[0].requires_grad:
                _on_gradient(args[0], self._build_gradient_hook(self.microbatch, BEFORE))

        return enter_block

    def _build_leave_hook(self, index: int) -> Callable[..., None]:
        def leave_block(_: Any, __: Any, out: Any) -> None:
            hidden: Tensor = out[0] if isinstance(out, tuple) else out  # without loss terms
            if hidden.requires_grad:
                _on_gradient(hidden, self._build_gradient_hook(self.microbatch, index))

        return leave_block

    def _end_stage(self, _: Any, __: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad and out.dim() < 2:
            _on_gradient(out, self._build_gradient_hook(self.microbatch, AFTER))


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


@contextmanager
def follow_regions(listener: RegionListener, stages: dict[int, ModelStage], split_backward: bool) -> Iterator[None]:
    """Set the region while a step runs.

    Args:
        stages: of this rank, by their number.
        split_backward: see `StageRegions`.
    """

    def wrap_action(kind: Callable[[dict[str, Any]], str], function: Any) -> Any:
        def run_action(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            listener.region = Region(kind(kwargs), stage.stage_index, chunk, NONE)
            try:
                return function(stage, chunk, *args, **kwargs)
            finally:
                listener.region = OUTSIDE

        return run_action

    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "forward_one_chunk": lambda arguments: "F",
        "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda arguments: "W",
    }
    with ExitStack() as stack:
        for number, stage in stages.items():
            stack.callback(StageRegions(listener, stage, number, split_backward).remove)
        runner = GradAccumulation.backward
        stack.enter_context(mock.patch.object(GradAccumulation, "backward", _leave_region_after(listener, runner)))
        stack.enter_context(mock.patch.object(checkpoint, "_recomputation_hook", _build_recomputation_hook(listener)))
        for name, kind in kinds.items():
            original = getattr(runtime._Stage, name)
            stack.enter_context(mock.patch.object(runtime._Stage, name, wrap_action(kind, original)))
        yield


def _leave_region_after(listener: RegionListener, function: Any) -> Any:
    """Return a function after which the region is that of no block: gradients of all blocks are summed then."""

    def run_function(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        listener.region = OUTSIDE
        return result

    return run_function


def _build_recomputation_hook(listener: RegionListener) -> type:
    """Return the context in which torch computes a checkpointed block again, which says so to the recorder."""
    original: Any = checkpoint._recomputation_hook

    class Recomputing(original):  # type: ignore[misc]
        def __enter__(self) -> Any:
            listener.recomputing = True
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            listener.recomputing = False
            return super().__exit__(*args)

    return Recomputing
