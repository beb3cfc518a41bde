"""Records every operation, collective and allocation of a rank, as events."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.estimate.traced.events import AFTER, BEFORE, COMPUTE, NONE, Event, Kind, Region

OUTSIDE = Region("S", 0, -1, NONE)
_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
"""Operations that allocate memory and compute nothing."""
MATMULS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
"""Matmuls, with the position of their first factor."""
GROUPED = ("titan::grouped_product", "titan::low_grouped_product", "titan::grouped_weight_grad")
"""Products of rows with the weights of their experts, and the gradients of these."""
COLLECTIVES = {
    "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all", "broadcast": "all-gather",
}  # fmt: skip
"""The kinds of functional collectives, by the names of their operations."""
NO_KERNEL = ("prim", "profiler")
"""Libraries of operations that compute nothing."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
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

    def __init__(self, groups: Mapping[str, str]) -> None:
        """Take the stream of each process group, by the list of its ranks as text."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups = groups
        self.events: list[Event] = []
        self.region, self.owner, self.category, self.stream = OUTSIDE, NONE, "", COMPUTE
        self.recomputing = self.active = False
        self.sizes: dict[int, tuple[int, int]] = {}
        self.homes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.arrivals: dict[int, int] = {}
        self.count = 0

    # ---- what is recorded ----

    def add(self, kind: Kind, **more: Any) -> None:
        """Record an event of the present region."""
        more.setdefault("owner", self.owner)
        more.setdefault("stream", self.stream)
        self.events.append(Event(kind, self.region, recomputed=self.recomputing, **more))

    def next_key(self) -> int:
        """Return a new number for a tensor or marker."""
        self.count += 1
        return self.count

    def label(self, tensor: Tensor, category: str) -> None:
        """Set the category of a tensor."""
        found = self.sizes.get(local(tensor).untyped_storage()._cdata)
        if found is not None:
            self.names[found[0]] = category

    def hold(self, tensors: Iterable[tuple[Tensor, int]], category: str) -> None:
        """Record tensors that exist already, each with its block."""
        for tensor, block in tensors:
            self.owner, self.category = block, category
            self.see(local(tensor))
        self.owner, self.category = NONE, ""

    def finished(self) -> list[Event]:
        """Return the events with the final categories of tensors."""
        return [e._replace(name=self.names[e.key]) if e.kind == "alloc" else e for e in self.events]

    # ---- tensors ----

    def see(self, tensor: Tensor) -> None:
        """Record the allocation of a tensor's storage, if it is new or was resized."""
        storage = tensor.untyped_storage()
        cdata, size = storage._cdata, storage.nbytes()
        before = self.sizes.get(cdata)
        if before is not None and before[1] == size:
            return
        if before is None:
            weakref.finalize(storage, self._gone, cdata)
        elif before[1]:
            self._free(before[0])
        key = self.next_key()
        self.sizes[cdata] = (key, size)
        self.names[key] = self.category or self._category()
        self.homes[key] = self.region.block if self.region.block != NONE else self.owner
        if size:
            self.add("alloc", key=key, size=size)

    def _category(self) -> str:
        if self.region.action == "U":
            return "optimizer"
        if self.region.block == AFTER:
            return "logits"
        return "activations"

    def _gone(self, cdata: int) -> None:
        key, size = self.sizes.pop(cdata)
        if size:
            self._free(key)

    def _free(self, key: int) -> None:
        self.arrivals.pop(key, None)
        self.add("free", key=key, owner=self.homes[key])

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        view = not func._schema.is_mutable and (not outputs or _share(inputs, outputs))
        if self.owner == NONE and self.region.block == NONE and not view:
            self._by_block(name, args, inputs, outputs)
            return out
        for tensor in outputs:
            self.see(tensor)
        if name == "_c10d_functional::wait_tensor" or (not view and name not in ALLOCATIONS):
            self._operation(name, args, inputs, outputs)
        return out

    def _by_block(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record an operation outside of all blocks: on lists, as one operation for each tensor of the lists."""
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        parts = [(inputs, outputs)]
        if lists and all(len(a) == len(lists[0]) for a in lists):
            results = outputs if len(outputs) == len(lists[0]) else []
            parts = [([a[i] for a in lists], results[i : i + 1]) for i in range(len(lists[0]))]
        for given, made in parts:
            self.owner = next((o for o in map(self._home, given) if o not in (NONE, BEFORE, AFTER)), NONE)
            for tensor in made:
                self.see(tensor)
            if name not in ALLOCATIONS:
                self._operation(name, args, given, made)
        self.owner = NONE
        for tensor in outputs:
            self.see(tensor)

    def _home(self, tensor: Any) -> int:
        if not isinstance(tensor, Tensor):
            return NONE
        found = self.sizes.get(tensor.untyped_storage()._cdata)
        return NONE if found is None else self.homes[found[0]]

    def _operation(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        library, _, short = name.partition("::")
        if library == "_c10d_functional" and short in COLLECTIVES:
            names = [arg for arg in args if isinstance(arg, str)]
            group = _resolve(names[-1])
            done = self.collective(COLLECTIVES[short], group, [*inputs, *outputs])
            self._arrive(outputs, done)
            return
        self._await(inputs)
        if library in NO_KERNEL or short == "wait_tensor":
            return
        moved = sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
        moved *= 2 if short.endswith("_") and not outputs else 1  # read and written in place
        self.add("op", name=short, size=moved, shape=_shape(name, args))

    def _await(self, inputs: list[Tensor]) -> None:
        """Let this stream wait for the collectives that produce its inputs."""
        for tensor in inputs:
            found = self.sizes.get(tensor.untyped_storage()._cdata)
            marker = self.arrivals.pop(found[0], None) if found else None
            if marker is not None:
                self.add("wait", key=marker)

    def collective(self, kind: str, group: Any, tensors: list[Tensor]) -> int:
        """Record a collective, on FSDP's streams where it runs there, otherwise on one of its group.

        Returns:
            The number of the marker of its end; -1 where what follows on the same stream comes after it.
        """
        ranks = dist.get_process_group_ranks(group)
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        shape = (len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        if self.stream != COMPUTE:
            self.add("collective", name=kind, size=size, shape=shape)
            return -1
        stream = self.groups.get(str(ranks), "other")
        if kind == "all-to-all" and stream != "context":
            stream = "expert"
        issued, done = self.next_key(), self.next_key()
        self.add("record", key=issued)
        self.add("wait", key=issued, stream=stream)
        self.add("collective", name=kind, size=size, shape=shape, stream=stream)
        self.add("record", key=done, stream=stream)
        return done

    def _arrive(self, outputs: list[Tensor], marker: int) -> None:
        """Let the first operation on the results of a collective wait for it."""
        for tensor in outputs:
            found = self.sizes.get(tensor.untyped_storage()._cdata)
            if found is not None and marker >= 0:
                self.arrivals[found[0]] = marker


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's shard on this rank; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _share(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether all outputs are views of inputs."""
    given = {t.untyped_storage()._cdata for t in inputs}
    return bool(outputs) and all(t.untyped_storage()._cdata in given for t in outputs)


def _shape(name: str, args: Any) -> tuple[int, ...]:
    """Return what the time of a matmul or of attention depends on; empty for other operations."""
    if name in MATMULS:
        a, b = args[MATMULS[name]], args[MATMULS[name] + 1]
        batch = a.shape[0] if a.dim() == 3 else 1
        return (batch * a.shape[-2], b.shape[-1], a.shape[-1])
    if name in GROUPED:
        x, other = args[:2]
        return (other.shape[1], x.shape[1], x.shape[0]) if other.dim() == 2 else (x.shape[0], *other.shape[1:])
    if name == "titan::low_grouped_grads":  # both gradients
        x, weight = args[:2]
        return (2 * x.shape[0], *weight.shape[1:])
    if "attention" in name:
        four = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim() >= 4]
        backward = "backward" in name
        q, k = four[1 if backward else 0], four[2 if backward else 1]
        rows, heads, queries, size = q.shape[-4:]
        return (rows * queries, k.shape[-2], heads, size)
    return ()
