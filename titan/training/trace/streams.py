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
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan.estimate.traced.events import NONE
from titan.training.trace.recorder import EventRecorder

COLLECTIVES = {
    "_allgather_base": "all-gather", "all_gather_single": "all-gather", "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter", "allreduce": "all-reduce", "broadcast": "all-gather",
    "alltoall_base": "all-to-all", "all_to_all_single": "all-to-all", "send": "send", "recv": "send",
}  # fmt: skip
"""The kinds of collectives, by the names of a process group's methods in any release of torch since 2.11."""
_BATCH_P2P = torch_schedules._batch_p2p
Patch = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and what replaces it while a step is recorded."""
FSDP_STREAMS = ("copy-in", "all-gather", "reduce-scatter", "all-reduce")
"""The streams that FSDP creates, in this order."""


class Marker:
    """Records when a stream reaches a point, as an event of a device."""

    def __init__(self, recorder: EventRecorder) -> None:
        self.recorder, self.key = recorder, -1

    def record(self, stream: _RecordedStream | None = None) -> None:
        """Record a marker on a stream; by default on the present one."""
        if not self.recorder.active:
            return
        self.key = self.recorder.next_key()
        self.recorder.add_event("record", key=self.key, stream=stream.name if stream else self.recorder.stream)


class _RecordedStream:
    """A stream whose waits are recorded."""

    def __init__(self, recorder: EventRecorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record_event(self) -> Marker:
        """Record a marker on this stream."""
        marker = Marker(self.recorder)
        marker.record(self)
        return marker

    def wait_event(self, marker: Marker) -> None:
        """Let this stream wait for a marker."""
        if marker.key >= 0:
            self.recorder.add_event("wait", key=marker.key, stream=self.name)

    def wait_stream(self, stream: _RecordedStream) -> None:
        """Let this stream wait for all that was issued on another."""
        if stream.name != self.name:
            self.wait_event(stream.record_event())


class RecordedDevice:
    """What FSDP takes from `torch.cuda`: streams and events, recorded."""

    def __init__(self, recorder: EventRecorder) -> None:
        self.recorder, self.names = recorder, iter(FSDP_STREAMS)

    def Stream(self, priority: int = 0) -> _RecordedStream:  # noqa: N802 torch.cuda.Stream
        """Return a new stream."""
        return _RecordedStream(self.recorder, next(self.names, "other"))

    def Event(self, *args: Any, **kwargs: Any) -> Marker:  # noqa: N802 torch.cuda.Event
        """Return a new event."""
        return Marker(self.recorder)

    def current_stream(self, *args: Any) -> _RecordedStream:
        """Return the stream on which operations run now."""
        return _RecordedStream(self.recorder, self.recorder.stream)

    @contextmanager
    def stream(self, stream: _RecordedStream) -> Iterator[None]:
        """Run operations on a stream."""
        previous, self.recorder.stream = self.recorder.stream, stream.name
        try:
            yield
        finally:
            self.recorder.stream = previous


@contextmanager
def record_streams(recorder: EventRecorder, block_of: Mapping[int, int]) -> Iterator[None]:
    """Record FSDP's streams, its exchanges by block, the storages that it resizes, and collectives.

    Args:
        block_of: the block of each module, by its id.
    """
    patches = (
        _patch_devices(recorder), _patch_exchanges(recorder, block_of), _patch_groups(recorder, block_of),
        _patch_storages(recorder), _patch_shapes(), _patch_collectives(recorder),
    )  # fmt: skip
    with ExitStack() as stack:
        for patch in chain.from_iterable(patches):
            stack.enter_context(mock.patch.object(*patch))
        yield


def _patch_devices(recorder: EventRecorder) -> Iterator[Patch]:
    """Yield recorded streams and events in place of a device's."""
    device = RecordedDevice(recorder)
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        yield module, "_get_device_handle", lambda kind: device


def _patch_exchanges(recorder: EventRecorder, block_of: Mapping[int, int]) -> Iterator[Patch]:
    """Yield all-gathers of weights and reductions of gradients whose tensors are labelled."""
    gather, reduce = _fsdp_collectives.foreach_all_gather, _fsdp_collectives.foreach_reduce
    copy_out = _fsdp_collectives.foreach_all_gather_copy_out

    def find_block(params: Any) -> int:
        return block_of.get(id(params[0]._module_info.module), NONE)

    def gather_labelled(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _label_allocations(recorder, "gathered", find_block(params)):
            return gather(params, *args, **kwargs)

    def copy_labelled(result: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with _label_allocations(recorder, "gathered", find_block(params)):  # created here in the first step
            return copy_out(result, params, *args, **kwargs)

    def reduce_labelled(params: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for grad in grads:
            recorder.label_tensor(grad, "gradients")
        with _label_allocations(recorder, "communication", find_block(params)):
            result = reduce(params, grads, *args, **kwargs)
        for param in params:
            if param.sharded_param.grad is not None:
                recorder.label_tensor(param.sharded_param.grad, "gradients")
        return result

    yield _fsdp_param_group, "foreach_all_gather", gather_labelled
    yield _fsdp_param_group, "foreach_all_gather_copy_out", copy_labelled
    yield _fsdp_param_group, "foreach_reduce", reduce_labelled


@contextmanager
def _label_allocations(recorder: EventRecorder, category: str, block: int) -> Iterator[None]:
    previous = recorder.category, recorder.owner
    recorder.category, recorder.owner = category, block
    try:
        yield
    finally:
        recorder.category, recorder.owner = previous


def _patch_groups(recorder: EventRecorder, block_of: Mapping[int, int]) -> Iterator[Patch]:
    """Yield methods of FSDP's groups that set the block where a pipeline calls them outside of its actions."""

    def set_block(method: Any) -> Any:
        def call_method(group: Any, *args: Any, **kwargs: Any) -> Any:
            region = recorder.region
            if region.block == NONE:
                recorder.region = region._replace(block=block_of.get(id(group.modules[0]), NONE))
            try:
                return method(group, *args, **kwargs)
            finally:
                recorder.region = region

        return call_method

    group = _fsdp_param_group.FSDPParamGroup
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        yield group, name, set_block(getattr(group, name))


class _HeldMessage:
    """A message that gloo sends: it holds its tensor until it is waited for."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.work, self.tensors = work, [tensor]

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return not self.tensors

    def wait(self, *arguments: Any) -> Any:
        """Wait for it, and drop its tensor."""
        self.tensors.clear()
        return self.work.wait(*arguments)


def hold_messages(ops: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Send and receive as torch's schedules do, with messages that hold what they send, as gloo's."""
    works = _BATCH_P2P(ops, *arguments, **options)
    if len(works) != len(ops):  # a group that batches messages has one work for all
        return works
    return [_HeldMessage(work, op.tensor) for work, op in zip(works, ops, strict=True)]


def _patch_storages(recorder: EventRecorder) -> Iterator[Patch]:
    """Yield functions that resize the storages of gathered weights, which no operation does."""

    def wrap_resize(function: Any) -> Any:
        def resize_storage(tensor: Tensor) -> None:
            previous, recorder.category = recorder.category, "gathered"
            function(tensor)
            recorder.record_allocation(tensor)
            recorder.category = previous

        return resize_storage

    for name in ("alloc_storage", "free_storage"):
        yield _fsdp_param, name, wrap_resize(getattr(_fsdp_param, name))


def _patch_shapes() -> Iterator[Patch]:
    """Yield the function with which DTensor derives shapes from whole-sized tensors, which is not recorded."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def propagate_unrecorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, *args, **kwargs)

    yield ShardingPropagator, name, propagate_unrecorded


def _patch_collectives(recorder: EventRecorder) -> Iterator[Patch]:
    """Yield recorded methods of process groups."""
    for name, kind in COLLECTIVES.items():
        if hasattr(dist.ProcessGroup, name):
            yield dist.ProcessGroup, name, _wrap_collective(recorder, getattr(dist.ProcessGroup, name), kind)


def _wrap_collective(recorder: EventRecorder, method: Any, kind: str) -> Any:
    def call_recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            end_key = recorder.record_collective(kind, group, tensors)
            if kind != "send" and end_key >= 0:
                recorder.add_event("wait", key=end_key)
        return method(group, *args, **kwargs)

    return call_recorded
