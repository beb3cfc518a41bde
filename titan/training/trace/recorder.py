"""Records every operation, collective and allocation of a rank, as events."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan.estimate.traced.events import AFTER, BEFORE, COMPUTE, NONE, OUTSIDE, Event, Kind
from titan.parallelism.norms import local_tensor
from titan.training.trace.regions import Patch, change_functions

_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
"""Operations that allocate memory and compute nothing."""
MATMULS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_scaled_mm": 0,
           "titan::float32_product": 0}  # fmt: skip
"""Matmuls, with the position of their first factor."""
GROUPED = ("titan::grouped_product", "titan::low_grouped_product", "titan::grouped_weight_grad")
"""Products of rows with the weights of their experts, and the gradients of these."""
COLLECTIVES = {
    "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all", "broadcast": "all-gather",
}  # fmt: skip
"""The kinds of functional collectives, by the names of their operations."""
COPIED = ("all-gather", "reduce-scatter")
"""Kinds of collectives of which gloo makes a copy while it exchanges: of what is gathered, or of what is reduced."""
WAIT = "_c10d_functional::wait_tensor"
NO_KERNEL = ("prim", "profiler")
"""Libraries of operations that compute nothing."""
GROUP_METHODS = {
    "_allgather_base": "all-gather", "all_gather_single": "all-gather", "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter", "allreduce": "all-reduce", "broadcast": "all-gather",
    "alltoall_base": "all-to-all", "all_to_all_single": "all-to-all", "send": "send", "recv": "send",
}  # fmt: skip
"""The kinds of collectives, by the names of a process group's methods in any release of torch since 2.11."""
_BATCH_P2P = torch_schedules._batch_p2p
FSDP_STREAMS = ("copy-in", "all-gather", "reduce-scatter", "all-reduce")
"""The streams that FSDP creates, in this order."""


class EventRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the events of all operations on local tensors.

    Attributes:
        events: what was recorded.
        region: of what is recorded next.
        owner: the block whose weights are exchanged, while FSDP does so.
        category: of tensors that are allocated next; empty: by region.
        stream: on which operations run.
        recomputing: whether a checkpointed block is computed again.
        active: whether a step is recorded.
    """

    def __init__(self, groups: Mapping[str, str], device: str = "cpu") -> None:
        """Take the stream of each process group, by the list of its ranks as text, and the device of the ranks."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups, self.has_copies = groups, device == "cpu"
        self.events: list[Event] = []
        self.region, self.owner, self.category, self.stream = OUTSIDE, NONE, "", COMPUTE
        self.recomputing = self.active = False
        self.sizes: dict[int, tuple[int, int]] = {}
        self.blocks: dict[int, int] = {}
        self.categories: dict[int, str] = {}
        self.arrivals: dict[int, int] = {}
        self.sharers: Counter[int] = Counter()
        self.count = 0

    # ---- what is recorded ----

    def add_event(self, kind: Kind, **fields: Any) -> None:
        """Record an event of the present region."""
        fields.setdefault("owner", self.owner)
        fields.setdefault("stream", self.stream)
        self.events.append(Event(kind, self.region, recomputed=self.recomputing, **fields))

    def next_key(self) -> int:
        """Return a new number for a tensor or marker."""
        self.count += 1
        return self.count

    def label_tensor(self, tensor: Tensor, category: str) -> None:
        """Set the category of a tensor."""
        entry = self.sizes.get(local_tensor(tensor).untyped_storage()._cdata)
        if entry is not None:
            self.categories[entry[0]] = category

    def hold_tensors(self, tensors: Iterable[tuple[Tensor, int]], category: str) -> None:
        """Record tensors that exist already, each with its block."""
        for tensor, block in tensors:
            self.owner, self.category = block, category
            self.record_allocation(local_tensor(tensor))
        self.owner, self.category = NONE, ""

    def list_events(self) -> list[Event]:
        """Return the events with the final categories of tensors."""
        return [e._replace(name=self.categories[e.key]) if e.kind == "alloc" else e for e in self.events]

    # ---- tensors ----

    def record_allocation(self, tensor: Tensor) -> None:
        """Record the allocation of a tensor's storage, if it is new or was resized."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        cdata, size = storage._cdata, storage.nbytes()
        previous = self.sizes.get(cdata)
        if previous is not None and previous[1] == size:
            return
        if previous is None:
            weakref.finalize(storage, self._record_collected, cdata)
        elif previous[1]:
            self._record_free(previous[0])
        key = self.next_key()
        self.sizes[cdata] = (key, size)
        by_region = (
            "optimizer" if self.region.action == "U" else "logits" if self.region.block == AFTER else "activations"
        )
        self.categories[key] = self.category or by_region
        self.blocks[key] = self.region.block if self.region.block != NONE else self.owner
        if size:
            self.add_event("alloc", key=key, size=size)

    def _share_allocation(self, pending: Tensor, result: Tensor) -> None:
        """Let the result of waiting be in the memory of the pending tensor, as on a device; fake tensors are two."""
        storage = result.untyped_storage()
        entry = self.sizes.get(pending.untyped_storage()._cdata)
        if entry is None or storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = entry
        self.sharers[entry[0]] += 1
        weakref.finalize(storage, self._record_collected, storage._cdata)

    def _record_collected(self, cdata: int) -> None:
        key, size = self.sizes.pop(cdata)
        if self.sharers[key]:
            self.sharers[key] -= 1
        elif size:
            self._record_free(key)

    def _record_free(self, key: int) -> None:
        self.arrivals.pop(key, None)
        self.add_event("free", key=key, owner=self.blocks[key])

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {t.untyped_storage()._cdata for t in inputs}
        view = not func._schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in outputs)
        if self.owner == NONE and self.region.block == NONE and not view:
            self._record_by_block(name, args, inputs, outputs)
            return out
        if name == WAIT:
            self._share_allocation(inputs[0], outputs[0])
        for tensor in outputs:
            self.record_allocation(tensor)
        if name == WAIT or (not view and name not in ALLOCATIONS):
            self._record_operation(name, args, inputs, outputs)
        return out

    def _record_by_block(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record an operation outside of all blocks: on lists, as one operation for each tensor of the lists."""
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        parts = [(inputs, outputs)]
        if lists and all(len(a) == len(lists[0]) for a in lists):
            results = outputs if len(outputs) == len(lists[0]) else []
            parts = [([a[i] for a in lists], results[i : i + 1]) for i in range(len(lists[0]))]
        for part_inputs, part_outputs in parts:
            self.owner = next((o for o in map(self._find_block, part_inputs) if o not in (NONE, BEFORE, AFTER)), NONE)
            for tensor in part_outputs:
                self.record_allocation(tensor)
            if name not in ALLOCATIONS:
                self._record_operation(name, args, part_inputs, part_outputs)
        self.owner = NONE
        for tensor in outputs:
            self.record_allocation(tensor)

    def _find_block(self, tensor: Any) -> int:
        if not isinstance(tensor, Tensor):
            return NONE
        entry = self.sizes.get(tensor.untyped_storage()._cdata)
        return NONE if entry is None else self.blocks[entry[0]]

    def _record_operation(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        library, _, short = name.partition("::")
        if library == "_c10d_functional" and short in COLLECTIVES:
            names = [arg for arg in args if isinstance(arg, str)]
            group = _resolve(names[-1])
            end_key = self.record_collective(COLLECTIVES[short], group, [*inputs, *outputs])
            for tensor in outputs:  # the first operation on them waits for the collective
                entry = self.sizes.get(tensor.untyped_storage()._cdata)
                if entry is not None and end_key >= 0:
                    self.arrivals[entry[0]] = end_key
            return
        for tensor in inputs:  # this stream waits for the collectives that produce them
            entry = self.sizes.get(tensor.untyped_storage()._cdata)
            marker = self.arrivals.pop(entry[0], None) if entry else None
            if marker is not None:
                self.add_event("wait", key=marker)
        if library in NO_KERNEL or short == "wait_tensor":
            return
        moved_bytes = sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
        moved_bytes *= 2 if short.endswith("_") and not outputs else 1  # read and written in place
        self.add_event("op", name=short, size=moved_bytes, shape=_extract_shape(name, args))

    def record_collective(self, kind: str, group: Any, tensors: list[Tensor]) -> int:
        """Record a collective, on FSDP's streams where it runs there, otherwise on one of its group.

        Returns:
            The number of the marker of its end; -1 where what follows on the same stream comes after it.
        """
        ranks = dist.get_process_group_ranks(group)
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        shape = (len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        if self.has_copies and kind in COPIED:  # free again when the collective has ended
            key = self.next_key()
            self.categories[key] = "communication"
            self.add_event("alloc", key=key, size=size)
            self.add_event("free", key=key)
        if self.stream != COMPUTE:
            self.add_event("collective", name=kind, size=size, shape=shape)
            return -1
        stream = self.groups.get(str(ranks), "other")
        if kind == "all-to-all" and stream != "context":
            stream = "expert"
        start_key, end_key = self.next_key(), self.next_key()
        self.add_event("record", key=start_key)
        self.add_event("wait", key=start_key, stream=stream)
        self.add_event("collective", name=kind, size=size, shape=shape, stream=stream)
        self.add_event("record", key=end_key, stream=stream)
        return end_key


def _extract_shape(name: str, args: Any) -> tuple[int, ...]:
    """Return what the time of a matmul or of attention depends on; empty for other operations."""
    if name in MATMULS:
        a, b = args[MATMULS[name]], args[MATMULS[name] + 1]
        batch = a.shape[0] if a.dim() == 3 else 1
        return (batch * a.shape[-2], b.shape[-1], a.shape[-1])
    if name in GROUPED:
        x, second = args[:2]
        return (second.shape[1], x.shape[1], x.shape[0]) if second.dim() == 2 else (x.shape[0], *second.shape[1:])
    if name == "titan::low_grouped_grads":  # both gradients
        x, weight = args[:2]
        return (2 * x.shape[0], *weight.shape[1:])
    if "attention" in name:
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim() >= 4]
        backward = "backward" in name
        q, k = tensors[1 if backward else 0], tensors[2 if backward else 1]
        rows, heads, queries, size = q.shape[-4:]
        return (rows * queries, k.shape[-2], heads, size)
    return ()


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
    """What FSDP takes from `torch.cuda`: recorded streams and events; its own code then says what waits for what."""

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


def record_streams(recorder: EventRecorder, block_of: Mapping[int, int]) -> AbstractContextManager[None]:
    """Record FSDP's streams, its exchanges by block, the storages that it resizes, and collectives.

    Args:
        block_of: the block of each module, by its id.
    """
    return change_functions([*_list_fsdp_patches(recorder, block_of), *_list_torch_patches(recorder)])


@contextmanager
def _label_allocations(recorder: EventRecorder, category: str, block: int) -> Iterator[None]:
    previous = recorder.category, recorder.owner
    recorder.category, recorder.owner = category, block
    try:
        yield
    finally:
        recorder.category, recorder.owner = previous


def _list_fsdp_patches(recorder: EventRecorder, block_of: Mapping[int, int]) -> Iterator[Patch]:
    """Yield recorded streams in place of a device's, and exchanges whose tensors are labelled with their blocks."""
    device = RecordedDevice(recorder)

    def find_block(params: Any) -> int:
        return block_of.get(id(params[0]._module_info.module), NONE)

    def gather(original: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with _label_allocations(recorder, "gathered", find_block(params)):
            return original(params, *args, **kwargs)

    def copy_out(original: Any, result: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with _label_allocations(recorder, "gathered", find_block(params)):  # created here in the first step
            return original(result, params, *args, **kwargs)

    def reduce(original: Any, params: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for grad in grads:
            recorder.label_tensor(grad, "gradients")
        with _label_allocations(recorder, "communication", find_block(params)):
            result = original(params, grads, *args, **kwargs)
        for param in params:
            if param.sharded_param.grad is not None:
                recorder.label_tensor(param.sharded_param.grad, "gradients")
        return result

    def set_block(original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        region = recorder.region
        if region.block == NONE:  # a pipeline calls it outside of its actions
            recorder.region = region._replace(block=block_of.get(id(group.modules[0]), NONE))
        try:
            return original(group, *args, **kwargs)
        finally:
            recorder.region = region

    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        yield module, "_get_device_handle", lambda original, kind: device
    yield _fsdp_param_group, "foreach_all_gather", gather
    yield _fsdp_param_group, "foreach_all_gather_copy_out", copy_out
    yield _fsdp_param_group, "foreach_reduce", reduce
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        yield _fsdp_param_group.FSDPParamGroup, name, set_block


def _list_torch_patches(recorder: EventRecorder) -> Iterator[Patch]:
    """Yield functions that resize storages, which no operation does, that derive shapes, and collectives."""

    def resize(original: Any, tensor: Tensor) -> None:
        with _label_allocations(recorder, "gathered", recorder.owner):
            original(tensor)
            recorder.record_allocation(tensor)

    def propagate_unrecorded(original: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # DTensor derives shapes from whole-sized tensors
            return original(*args, **kwargs)

    def communicate(kind: str, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            end_key = recorder.record_collective(kind, group, tensors)
            if kind != "send" and end_key >= 0:
                recorder.add_event("wait", key=end_key)
        return original(group, *args, **kwargs)

    for name in ("alloc_storage", "free_storage"):
        yield _fsdp_param, name, resize
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unrecorded
    for name, kind in GROUP_METHODS.items():
        if hasattr(dist.ProcessGroup, name):
            yield dist.ProcessGroup, name, partial(communicate, kind)


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
