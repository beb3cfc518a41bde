"""Sets the region of a trace by hooks on the blocks of a model and on the actions of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

from torch import Tensor
from torch.utils import checkpoint

from titan.estimate.traced.events import AFTER, BEFORE, NONE, Region
from titan.parallelism.pipeline import runtime
from titan.training.trace.recorder import OUTSIDE
from titan.training.train_step import GradAccumulation, Stage


class Follower(Protocol):
    """What learns where a step is.

    Attributes:
        region: what the step does.
        recomputing: whether a checkpointed block is computed again.
    """

    region: Region
    recomputing: bool


class Regions:
    """Follows one stage through its micro-batches."""

    def __init__(self, recorder: Follower, stage: Stage, number: int, split: bool) -> None:
        """Set hooks on a stage.

        Args:
            recorder: whose region is set.
            stage: of this rank.
            number: of the stage.
            split: whether the schedule separates backward for inputs and for weights.
        """
        self.recorder, self.number, self.split = recorder, number, split
        self.microbatch = -1
        self.undo = ExitStack()
        self._around(stage, self._begins, self._ends)
        if stage._compiled_call_impl is None:  # else what is inside is compiled with it, hooks too
            self._follow_blocks(stage)

    def _follow_blocks(self, stage: Stage) -> None:
        """Set hooks on the blocks and the head."""
        first = int(next(iter(stage.model.layers)))
        for index, block in enumerate(stage.model.blocks(), first):
            self._around(block, self._enters(index, first), self._leaves(index))
        if stage.model.head is not None:
            self._around(stage.model.head, self._head)

    def _around(self, module: Any, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
        """Call functions before and after a module; of a compiled one outside of its compiled code."""
        compiled = module._compiled_call_impl
        if compiled is None:
            self.undo.callback(module.register_forward_pre_hook(before).remove)
            if after is not None:
                self.undo.callback(module.register_forward_hook(after).remove)
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args)
            out = compiled(*args, **kwargs)
            if after is not None:
                after(module, args, out)
            return out

        self.undo.enter_context(mock.patch.object(module, "_compiled_call_impl", call))

    def remove(self) -> None:
        """Remove the hooks."""
        self.undo.close()

    def _set(self, action: str, microbatch: int, block: int) -> None:
        self.recorder.region = Region(action, self.number, microbatch, block)

    def _backward(self, microbatch: int, block: int) -> Callable[[Tensor], None]:
        def reached(grad: Tensor) -> None:
            if not self.split:
                self._set("B", microbatch, block)

        return reached

    def _begins(self, *_: Any) -> None:
        self.microbatch += 1
        self._set("F", self.microbatch, BEFORE)

    def _enters(self, index: int, first: int) -> Callable[..., None]:
        def enter(_: Any, args: Any) -> None:
            self._set("F", self.microbatch, index)
            if index == first and args[0].requires_grad:
                _on_gradient(args[0], self._backward(self.microbatch, BEFORE))

        return enter

    def _leaves(self, index: int) -> Callable[..., None]:
        def leave(_: Any, __: Any, out: Any) -> None:
            hidden: Tensor = out[0] if isinstance(out, tuple) else out  # without loss terms
            if hidden.requires_grad:
                _on_gradient(hidden, self._backward(self.microbatch, index))

        return leave

    def _head(self, *_: Any) -> None:
        self._set("F", self.microbatch, AFTER)

    def _ends(self, _: Any, __: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad and out.dim() < 2:
            _on_gradient(out, self._backward(self.microbatch, AFTER))


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call a hook when the gradient of a tensor has been computed."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


@contextmanager
def followed(recorder: Follower, stages: dict[int, Stage], split: bool) -> Iterator[None]:
    """Set the region while a step runs.

    Args:
        recorder: whose region is set.
        stages: of this rank, by their number.
        split: see `Regions`.
    """

    def action(kind: Callable[[dict[str, Any]], str], function: Any) -> Any:
        def run(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            recorder.region = Region(kind(kwargs), stage.stage_index, chunk, NONE)
            try:
                return function(stage, chunk, *args, **kwargs)
            finally:
                recorder.region = OUTSIDE

        return run

    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "forward_one_chunk": lambda given: "F",
        "backward_one_chunk": lambda given: "B" if given.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda given: "W",
    }
    with ExitStack() as stack:
        for number, stage in stages.items():
            stack.callback(Regions(recorder, stage, number, split).remove)
        runner = GradAccumulation.backward
        stack.enter_context(mock.patch.object(GradAccumulation, "backward", _then_outside(recorder, runner)))
        stack.enter_context(mock.patch.object(checkpoint, "_recomputation_hook", _recomputing(recorder)))
        for name, kind in kinds.items():
            original = getattr(runtime._Stage, name)
            stack.enter_context(mock.patch.object(runtime._Stage, name, action(kind, original)))
        yield


def _then_outside(recorder: Follower, function: Any) -> Any:
    """Return a function after which the region is that of no block: gradients of all blocks are summed then."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        recorder.region = OUTSIDE
        return result

    return run


def _recomputing(recorder: Follower) -> type:
    """Return the context in which torch computes a checkpointed block again, which says so to the recorder."""
    original: Any = checkpoint._recomputation_hook

    class Recomputing(original):  # type: ignore[misc]
        def __enter__(self) -> Any:
            recorder.recomputing = True
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            recorder.recomputing = False
            return super().__exit__(*args)

    return Recomputing
