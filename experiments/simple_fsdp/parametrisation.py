"""The parametrisation of SimpleFSDP (arXiv:2411.00284, section 3): what a module reads of a parameter is gathered.

A module gets a class whose properties, named as its parameters, return the gathered weight; the shard stays in
`_parameters`, so that names, checkpoints and optimizers see no difference. The backward pass of gathering sums
gradients over ranks.

Outside of the forward and the backward pass a property returns the shard, as FSDP2 does: nothing that looks at a model
waits for other ranks. Weights that are freed after the forward pass are gathered again for backward: compiled, the
partitioner has to compute them again; else autograd saves how to gather a weight in its place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from experiments.simple_fsdp.shards import shard_parameter

_OPS = torch.ops._c10d_functional


class Exchange(NamedTuple):
    """How a parameter is gathered, and its gradient reduced.

    Attributes:
        rows: of the whole parameter, or of a tensor rank's part.
        ranks: that have a shard.
        group: their group's name.
        replica_group: of the ranks that have the same shard; empty: none.
        dtype: in which it is gathered.
        reduce_dtype: in which gradients are summed.
        frees: whether what was gathered is freed after the forward pass.
    """

    rows: int
    ranks: int
    group: str
    replica_group: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    frees: bool

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole parameter [rows, ...] from this rank's rows."""
        rows = _pad_rows(shard.to(self.dtype), -(-self.rows // self.ranks))
        whole: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(rows, self.ranks, self.group))
        return whole[: self.rows] if len(whole) > self.rows else whole

    def reduce(self, grad: Tensor, shard_rows: int) -> Tensor:
        """Return this rank's rows of the sum of all ranks' gradients [rows, ...]."""
        rows = _pad_rows(grad.to(self.reduce_dtype), -(-self.rows // self.ranks) * self.ranks)
        part = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(rows, "sum", self.ranks, self.group))
        if self.replica_group:
            part = _OPS.wait_tensor(_OPS.all_reduce(part, "sum", self.replica_group))
        out: Tensor = part[:shard_rows] if len(part) > shard_rows else part
        return out


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - len(tensor)
    return (F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.rows, ctx.dtype = exchange, len(shard), shard.dtype
        return exchange.gather(shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.reduce(grads[0], ctx.rows).to(ctx.dtype), None


def parametrise(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    frees: bool,
) -> None:
    """Shard the parameters of modules that are no shards yet, and let the modules gather what they read of them.

    Args:
        modules: that are computed as one unit; their parameters are on meta.
        mesh: dimensions replicate (where it is above one) and shard.
        dtype: in which weights are gathered; None: that of the parameter.
        reduce_dtype: in which gradients are summed; None: that of the parameter.
        frees: whether gathered weights are freed after the forward pass.
    """
    shards: dict[nn.Parameter, tuple[nn.Parameter, Exchange]] = {}  # tied weights of a unit stay tied
    for owner in (owner for module in modules for owner in module.modules() if "_exchanges" not in vars(owner)):
        exchanges: dict[str, Exchange] = {}
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter not in shards:
                shards[parameter] = (
                    _shard_once(parameter, mesh),
                    _plan_exchange(parameter, mesh, dtype, reduce_dtype, frees),
                )
            owner._parameters[name], exchanges[name] = shards[parameter]
        if exchanges:
            owner._exchanges = exchanges  # type: ignore[assignment]
            kind: Any = type(owner)
            owner.__class__ = _derive_class(kind, tuple(exchanges))
    for module in modules:
        module._frees = frees  # type: ignore[assignment]
        unit_kind: Any = type(module)
        module.__class__ = _derive_unit_class(unit_kind)


def _shard_once(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return the shard of a parameter; raise NotImplementedError where another unit has it, which would untie them."""
    if getattr(parameter, "in_unit", False):
        raise NotImplementedError("it shares a parameter with a module that is gathered by itself")
    parameter.in_unit = True  # type: ignore[attr-defined]
    return shard_parameter(parameter, mesh)


def _plan_exchange(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    frees: bool,
) -> Exchange:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    replicas = mesh.get_group(0).group_name if mesh.ndim == 2 and mesh.size(0) > 1 else ""
    return Exchange(
        len(local) if local.dim() else 0,
        mesh.size(-1),
        mesh.get_group(-1).group_name,
        replicas,
        dtype or parameter.dtype,
        reduce_dtype or parameter.dtype,
        frees,
    )


@cache
def _derive_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """Return a class whose properties read parameters; one for all modules of a class, which so share graphs."""
    return type(kind.__name__, (kind,), {name: property(partial(_read_parameter, name=name)) for name in names})


@cache
def _derive_unit_class(kind: Any) -> type[nn.Module]:
    """Return a class whose calls are those in which parameters are gathered."""

    def call_unit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return kind.__call__(self, *args, **kwargs)
        with _UnitPass(saves_handles=self._frees and self._compiled_call_impl is None):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call_unit})


def _read_parameter(module: Any, name: str) -> Tensor:
    """Return what a module's attribute is: the whole weight while the model computes, else the shard."""
    parameter: Any = module._parameters[name]
    exchange: Exchange = module._exchanges[name]
    if torch.compiler.is_compiling():
        return _gather_in_graph(parameter.to_local(), exchange)
    if not _is_computing():
        shard: Tensor = parameter
        return shard
    return _gather(parameter, exchange)


def _gather(parameter: Any, exchange: Exchange) -> Tensor:
    """Return the whole weight; a unit that has it already, as between two reads in one expression, gives the same."""
    unit = _running.unit
    known = unit.find(parameter) if unit is not None else None
    if known is not None:
        return known
    whole: Tensor = _Gather.apply(parameter.to_local(), exchange)  # type: ignore[no-untyped-call]
    if unit is not None:
        unit.note(whole, parameter, exchange)
    return whole


def _gather_in_graph(shard: Tensor, exchange: Exchange) -> Tensor:
    """Return the whole weight, which the partitioner does not save for backward where it is to be freed."""
    if not exchange.frees or not torch.is_grad_enabled():
        return _Gather.apply(shard, exchange)  # type: ignore[no-untyped-call, no-any-return]
    gather = partial(_Gather.apply, exchange=exchange)
    return checkpoint(gather, shard, use_reentrant=False, context_fn=_recompute_all)  # type: ignore[no-any-return]


def _recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE)  # type: ignore[no-untyped-call]


class _Running(threading.local):
    """The unit whose forward pass this thread computes, the innermost one."""

    unit: _UnitPass | None = None


_running = _Running()


def _is_computing() -> bool:
    """Whether this thread is in a unit's forward pass, or in a backward pass, which may compute units again."""
    return _running.unit is not None or torch._C._current_graph_task_id() != -1


class _Handle(NamedTuple):
    """What gathers a weight again, and how the saved tensor viewed it."""

    parameter: Any
    exchange: Exchange
    view: tuple[tuple[int, ...], tuple[int, ...], int]


class _UnitPass(torch.autograd.graph.saved_tensors_hooks):
    """A forward pass of a unit, which may save handles in place of the weights that were gathered in it."""

    def __init__(self, saves_handles: bool) -> None:
        super().__init__(self._pack, _unpack)
        self.saves_handles, self.outer = saves_handles, _running.unit
        self.wholes: dict[int, weakref.ref[Tensor]] = {}
        self.gathered: dict[int, tuple[StorageWeakRef, Any, Exchange]] = {}

    def find(self, parameter: Any) -> Tensor | None:
        """Return a weight that was gathered in this pass, with the present mode of autograd, and still exists."""
        whole = self.wholes.get(id(parameter), _nothing)()
        is_usable = whole is not None and whole.requires_grad == (parameter.requires_grad and torch.is_grad_enabled())
        return whole if is_usable else None

    def note(self, whole: Tensor, parameter: Any, exchange: Exchange) -> None:
        """Remember a weight, and its memory, which a weak reference keeps from being taken for another tensor's."""
        storage = whole.untyped_storage()
        self.wholes[id(parameter)] = weakref.ref(whole)
        self.gathered[storage._cdata] = _refer_weakly(storage), parameter, exchange

    def __enter__(self) -> None:
        _running.unit = self
        if self.saves_handles:
            super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self.saves_handles:
            super().__exit__(*error)
        _running.unit = self.outer
        self.gathered.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        entry = self.gathered.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[0].expired():  # type: ignore[no-untyped-call]
            return tensor
        view = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _Handle(entry[1], entry[2], view)


def _nothing() -> None:
    """Stands for a weak reference to nothing."""


def _refer_weakly(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _unpack(saved: Tensor | _Handle) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    whole = saved.exchange.gather(saved.parameter._local_tensor)
    return whole.as_strided(*saved.view)
