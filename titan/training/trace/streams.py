"""Streams that are recorded, in place of a device's, for FSDP: its own code then says what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
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
Patch = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and what replaces it while a step is recorded."""
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
def recorded(recorder: Recorder, block_of: Mapping[int, int]) -> Iterator[None]:
    """Record FSDP's streams, its exchanges by block, the storages that it resizes, and collectives.

    Args:
        recorder: gets the events.
        block_of: the block of each module, by its id.
    """
    groups = (
        _devices(recorder), _exchanges(recorder, block_of), _groups_in_blocks(recorder, block_of), _storages(recorder),
        _shapes(), _collectives(recorder),
    )  # fmt: skip
    with ExitStack() as stack:
        for patch in chain.from_iterable(groups):
            stack.enter_context(mock.patch.object(*patch))
        yield


def _devices(recorder: Recorder) -> Iterator[Patch]:
    """Yield recorded streams and events in place of a device's."""
    device = Device(recorder)
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        yield module, "_get_device_handle", lambda kind: device


def _exchanges(recorder: Recorder, block_of: Mapping[int, int]) -> Iterator[Patch]:
    """Yield all-gathers of weights and reductions of gradients whose tensors are labelled."""
    gather, reduce = _fsdp_collectives.foreach_all_gather, _fsdp_collectives.foreach_reduce

    def block(params: Any) -> int:
        return block_of.get(id(params[0]._module_info.module), NONE)

    def gathers(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _labelled(recorder, "gathered", block(params)):
            return gather(params, *args, **kwargs)

    def reduces(params: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for grad in grads:
            recorder.label(grad, "gradients")
        with _labelled(recorder, "communication", block(params)):
            result = reduce(params, grads, *args, **kwargs)
        for param in params:
            if param.sharded_param.grad is not None:
                recorder.label(param.sharded_param.grad, "gradients")
        return result

    yield _fsdp_param_group, "foreach_all_gather", gathers
    yield _fsdp_param_group, "foreach_reduce", reduces


@contextmanager
def _labelled(recorder: Recorder, category: str, block: int) -> Iterator[None]:
    before = recorder.category, recorder.owner
    recorder.category, recorder.owner = category, block
    try:
        yield
    finally:
        recorder.category, recorder.owner = before


def _groups_in_blocks(recorder: Recorder, block_of: Mapping[int, int]) -> Iterator[Patch]:
    """Yield methods of FSDP's groups that set the block where a pipeline calls them outside of its actions."""

    def in_block(method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            region = recorder.region
            if region.block == NONE:
                recorder.region = region._replace(block=block_of.get(id(group.modules[0]), NONE))
            try:
                return method(group, *args, **kwargs)
            finally:
                recorder.region = region

        return call

    group = _fsdp_param_group.FSDPParamGroup
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        yield group, name, in_block(getattr(group, name))


def _storages(recorder: Recorder) -> Iterator[Patch]:
    """Yield functions that resize the storages of gathered weights, which no operation does."""

    def resizing(function: Any) -> Any:
        def resize(tensor: Tensor) -> None:
            before, recorder.category = recorder.category, "gathered"
            function(tensor)
            recorder.see(tensor)
            recorder.category = before

        return resize

    for name in ("alloc_storage", "free_storage"):
        yield _fsdp_param, name, resizing(getattr(_fsdp_param, name))


def _shapes() -> Iterator[Patch]:
    """Yield the function with which DTensor derives shapes from whole-sized tensors, which is not recorded."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, *args, **kwargs)

    yield ShardingPropagator, name, unseen


def _collectives(recorder: Recorder) -> Iterator[Patch]:
    """Yield recorded methods of process groups."""
    for name, kind in COLLECTIVES.items():
        if hasattr(dist.ProcessGroup, name):
            yield dist.ProcessGroup, name, _collective(recorder, getattr(dist.ProcessGroup, name), kind)


def _collective(recorder: Recorder, method: Any, kind: str) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            done = recorder.collective(kind, group, tensors)
            if kind != "send" and done >= 0:
                recorder.add("wait", key=done)
        return method(group, *args, **kwargs)

    return call
