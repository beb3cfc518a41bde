"""Sets the region of a trace by hooks on the blocks of a model and on the actions of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol
from unittest import mock

from torch import Tensor, nn
from torch.utils import checkpoint

from titan.debug.module_hooks import ModuleHooks, StageCall
from titan.estimate.traced.events import AFTER, BEFORE, NONE, OUTSIDE, Region
from titan.parallelism.pipeline import runtime
from titan.training.train_step import GradAccumulation, ModelStage


class RegionListener(Protocol):
    """What learns where a step is, and whether a checkpointed block is computed again."""

    region: Region
    recomputing: bool


class StageRegions(ModuleHooks):
    """Follows stages through their micro-batches; see `follow_regions`."""

    stays_in_modes = True

    def __init__(self, listener: RegionListener, stages: dict[int, ModelStage], split_backward: bool) -> None:
        """Set hooks on the stages; where a whole one is compiled, its blocks' would be compiled with it."""
        super().__init__([*stages.values()], around_compiled=True)
        self.listener, self.split_backward = listener, split_backward
        for index, (number, stage) in enumerate(stages.items()):
            parts: list[tuple[int, nn.Module]] = []
            if stage._compiled_call_impl is None:
                parts += enumerate(stage.model.blocks(), int(next(iter(stage.model.layers))))
            for block, module in parts:
                enter = self._enter_first_block if block == parts[0][0] else self._enter_forward
                self.add_before(index, module, partial(enter, number, block))
                self.add_after(index, module, partial(self._watch_output, number, block))
            if parts and stage.model.head is not None:
                self.add_before(index, stage.model.head, partial(self._enter_forward, number, AFTER))
            self.add_before(index, stage, partial(self._enter_forward, number, BEFORE))
            self.add_after(index, stage, partial(self._leave_stage, number))

    def _enter_forward(self, stage: int, block: int, call: StageCall, *_: Any) -> None:
        self.listener.region = Region("F", stage, call.microbatch, block)

    def _enter_first_block(self, stage: int, block: int, call: StageCall, _: Any, args: tuple[Any, ...]) -> None:
        self._enter_forward(stage, block, call)
        self._watch_gradient(args[0], Region("B", stage, call.microbatch, BEFORE))

    def _watch_output(self, stage: int, block: int, call: StageCall, _: Any, __: Any, out: Tensor) -> None:
        self._watch_gradient(out, Region("B", stage, call.microbatch, block))

    def _leave_stage(self, stage: int, call: StageCall, _: Any, __: Any, out: Tensor) -> None:
        call.args, call.kwargs = (), {}  # or a trace would have them in memory until the next micro-batch
        if out.dim() < 2:
            self._watch_gradient(out, Region("B", stage, call.microbatch, AFTER))

    def _watch_gradient(self, tensor: Tensor, region: Region) -> None:
        """Enter a region of the backward pass when a tensor's gradient is there."""

        def enter_backward(gradient: Tensor) -> None:
            self.listener.region = region

        if tensor.requires_grad and not self.split_backward:
            tensor.register_hook(enter_backward)  # type: ignore[no-untyped-call]


Patch = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its functions, and what is called in its place, with the function and its arguments."""


@contextmanager
def change_functions(patches: Iterable[Patch]) -> Iterator[None]:
    """Call something else in place of functions while the block runs."""

    def wrap_function(original: Any, change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: change(original, *args, **kwargs)

    with ExitStack() as stack:
        for owner, name, change in patches:
            stack.enter_context(mock.patch.object(owner, name, wrap_function(getattr(owner, name), change)))
        yield


@contextmanager
def follow_regions(listener: RegionListener, stages: dict[int, ModelStage], split_backward: bool) -> Iterator[None]:
    """Set the region while a step runs.

    Args:
        stages: of this rank, by their number.
        split_backward: whether the schedule separates backward for inputs and for weights.
    """

    def run_action(
        kind: Callable[[dict[str, Any]], str], original: Any, stage: Any, chunk: int, *args: Any, **kwargs: Any
    ) -> Any:
        listener.region = Region(kind(kwargs), stage.stage_index, chunk, NONE)
        try:
            return original(stage, chunk, *args, **kwargs)
        finally:
            listener.region = OUTSIDE

    def leave_regions_after(original: Any, *args: Any, **kwargs: Any) -> Any:  # gradients of all blocks are summed then
        result = original(*args, **kwargs)
        listener.region = OUTSIDE
        return result

    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "forward_one_chunk": lambda arguments: "F",
        "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda arguments: "W",
    }
    patches: list[Patch] = [(runtime._Stage, name, partial(run_action, kind)) for name, kind in kinds.items()]
    patches += [(GradAccumulation, "backward", leave_regions_after)]
    with ExitStack() as stack:
        stack.enter_context(StageRegions(listener, stages, split_backward))
        stack.enter_context(mock.patch.object(checkpoint, "_recomputation_hook", _build_recomputation_hook(listener)))
        stack.enter_context(change_functions(patches))
        yield


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
