"""Streams that are recorded, in place of a device's, for FSDP: its own code then says what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan.estimate.traced.events import NONE
from titan.training.trace.recorder import Recorder

COLLECTIVES = {
    "_allgather_base": "all-gather", "all_gather_single": "all-gather", "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter", "allreduce": "all-reduce", "broadcast": "all-gather",
    "alltoall_base": "all-to-all", "all_to_all_single": "all-to-all", "send": "send", "recv": "send",
}  # fmt: skip
"""The kinds of collectives, by the names of a process group's methods in any release of torch since 2.11."""
NAMES = ("copy-in", "all-gather", "reduce-scatter", "all-reduce")
"""The streams that FSDP creates, in this order."""


class Marker:
    """Records when a stream reaches a point, as an event of a device."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.key = recorder, -1

    def record(self, stream: _Stream | None = None) -> None:
        """Record a marker on a stream; by default on the present one."""
        if not self.recorder.active:
            return
        self.key = self.recorder.next_key()
        self.recorder.add("record", key=self.key, stream=stream.name if stream else self.recorder.stream)


class _Stream:
    """A stream whose waits are recorded."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record_event(self) -> Marker:
        """Record a marker on this stream."""
        marker = Marker(self.recorder)
        marker.record(self)
        return marker

    def wait_event(self, marker: Marker) -> None:
        """Let this stream wait for a marker."""
        if marker.key >= 0:
            self.recorder.add("wait", key=marker.key, stream=self.name)

    def wait_stream(self, other: _Stream) -> None:
        """Let this stream wait for all that was issued on another."""
        if other.name != self.name:
            self.wait_event(other.record_event())


class Device:
    """What FSDP takes from `torch.cuda`: streams and events, recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.names = recorder, iter(NAMES)

    def Stream(self, priority: int = 0) -> _Stream:
        """Return a new stream."""
        return _Stream(self.recorder, next(self.names, "other"))

    def Event(self, *args: Any, **kwargs: Any) -> Marker:
        """Return a new event."""
        return Marker(self.recorder)

    def current_stream(self, *args: Any) -> _Stream:
        """Return the stream on which operations run now."""
        return _Stream(self.recorder, self.recorder.stream)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Run operations on a stream."""
        before, self.recorder.stream = self.recorder.stream, stream.name
        try:
            yield
        finally:
            self.recorder.stream = before


@contextmanager
def recorded(recorder: Recorder, block_of: dict[int, int]) -> Iterator[None]:
    """Record FSDP's streams, its exchanges by block, and the storages that it resizes.

    Args:
        recorder: gets the events.
        block_of: the block of each module, by its id.
    """
    device = Device(recorder)
    gather, reduce = _fsdp_collectives.foreach_all_gather, _fsdp_collectives.foreach_reduce

    def gathers(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _labelled(recorder, "gathered", block_of.get(id(params[0]._module_info.module), NONE)):
            return gather(params, *args, **kwargs)

    def reduces(params: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for grad in grads:
            recorder.label(grad, "gradients")
        with _labelled(recorder, "communication", block_of.get(id(params[0]._module_info.module), NONE)):
            result = reduce(params, grads, *args, **kwargs)
        for param in params:
            if param.sharded_param.grad is not None:
                recorder.label(param.sharded_param.grad, "gradients")
        return result

    def resizing(function: Any) -> Any:
        def resize(tensor: Tensor) -> None:
            before, recorder.category = recorder.category, "gathered"
            function(tensor)
            recorder.see(tensor)
            recorder.category = before

        return resize

    def in_block(method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            region = recorder.region
            if region.block == NONE:  # a pipeline gathers and reduces one block after another outside of its actions
                recorder.region = region._replace(block=block_of.get(id(group.modules[0]), NONE))
            try:
                return method(group, *args, **kwargs)
            finally:
                recorder.region = region

        return call

    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # the whole-sized tensors with which DTensor derives shapes
            return propagate(self, *args, **kwargs)

    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", lambda kind: device))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathers))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_reduce", reduces))
        for function in ("alloc_storage", "free_storage"):
            patched = resizing(getattr(_fsdp_param, function))
            stack.enter_context(mock.patch.object(_fsdp_param, function, patched))
        for method in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
            patched = in_block(getattr(_fsdp_param_group.FSDPParamGroup, method))
            stack.enter_context(mock.patch.object(_fsdp_param_group.FSDPParamGroup, method, patched))
        stack.enter_context(mock.patch.object(ShardingPropagator, name, unseen))
        for method, call in _collectives(recorder):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, method, call))
        yield


def _collectives(recorder: Recorder) -> Iterator[tuple[str, Any]]:
    """Yield the methods of process groups, recorded, by name."""
    for name, kind in COLLECTIVES.items():
        if hasattr(dist.ProcessGroup, name):
            yield name, _collective(recorder, getattr(dist.ProcessGroup, name), kind)


def _collective(recorder: Recorder, method: Any, kind: str) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            done = recorder.collective(kind, group, tensors)
            if kind != "send" and done >= 0:
                recorder.add("wait", key=done)
        return method(group, *args, **kwargs)

    return call


@contextmanager
def _labelled(recorder: Recorder, category: str, block: int) -> Iterator[None]:
    before = recorder.category, recorder.owner
    recorder.category, recorder.owner = category, block
    try:
        yield
    finally:
        recorder.category, recorder.owner = before
