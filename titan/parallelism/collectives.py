"""Collective operations that autograd and torch.compile can trace.

All are torch's functional collectives followed by a wait, so that the result is a plain tensor in eager and in compiled
code. A pending tensor (torch's AsyncCollectiveTensor) would give wrong gradients when it enters a compiled block. Only
an exchange of rows may be waited for later (`start_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops._c10d_functional
SEQUENCE_DIM = 1
"""The dimension of tokens in hidden states [B, T, D]."""


def wait(tensor: Tensor) -> Tensor:
    """Wait for a functional collective, and return its result."""
    out: Tensor = _OPS.wait_tensor(tensor)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors, all of one shape, along `dim`. No gradient."""
    return finish_all_gather(start_all_gather(x, group.size(), group.group_name), dim, group.size())


def start_all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-gather in a group given by its name, and return what `finish_all_gather` takes. No gradient."""
    pending: Tensor = _OPS.all_gather_into_tensor(x.contiguous(), ranks, group)
    return pending


def finish_all_gather(pending: Tensor, dim: int, ranks: int) -> Tensor:
    """Wait for an all-gather, and concatenate the ranks' tensors along `dim`; a view where they lie so already."""
    out = wait(pending)
    if dim == 0:
        return out
    if dim == 1 and out.shape[0] == ranks:  # one row
        return out.flatten(0, 1).unsqueeze(0)
    return torch.cat(out.chunk(ranks), dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks; all parts have one size. No gradient."""
    return wait(start_reduce_scatter(x, dim, group.size(), group.group_name))


def start_reduce_scatter(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Start a reduce-scatter in a group given by its name, and return what `wait` takes. No gradient."""
    if dim == 1 and x.shape[0] == 1:
        x = x.reshape(ranks, -1, *x.shape[2:])
    elif dim != 0:
        x = torch.cat(x.chunk(ranks, dim))
    pending: Tensor = _OPS.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)
    return pending


def all_reduce(x: Tensor, group: dist.ProcessGroup | str, op: str = "sum") -> Tensor:
    """Return the sum (or "max") over ranks, in a new tensor. No gradient.

    Args:
        group: the ranks, or the name of their group: for custom operations, which take no process groups.
    """
    return wait(_OPS.all_reduce(x.contiguous(), op, group if isinstance(group, str) else group.group_name))


class PendingExchange:
    """Rows that travel between ranks: in the forward pass those of `start_exchange`, in the backward pass their
    gradients, which have the shape of neither its argument nor its result."""

    def __init__(self, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup) -> None:
        self.send_counts, self.receive_counts, self.group = send_counts, receive_counts, group.group_name
        self.rows: Tensor | None = None
        self.marker: Tensor | None = None

    def start(self, x: Tensor) -> None:
        """Start to send rows."""
        self.rows = _OPS.all_to_all_single(x.contiguous(), self.receive_counts, self.send_counts, self.group)

    def start_gradient(self, grad: Tensor) -> None:
        """Start to send the gradients of received rows back."""
        self.rows = _OPS.all_to_all_single(grad.contiguous(), self.send_counts, self.receive_counts, self.group)

    def take(self) -> Tensor:
        """Wait for the rows that come to this rank, and return them."""
        rows, self.rows = self.rows, None
        return wait(rows)  # type: ignore[arg-type]

    def finish(self) -> Tensor:
        """Return the received rows, differentiably; what autograd keeps does not refer to this object's `marker`."""
        marker, self.marker = self.marker, None
        out: Tensor = _FinishExchange.apply(marker, self)  # type: ignore[no-untyped-call]
        return out


class _StartExchange(torch.autograd.Function):
    """Returns an empty tensor, which orders this operation and `_FinishExchange` in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: PendingExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.take(), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: Tensor, exchange: PendingExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.take()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.exchange.start_gradient(grads[0])
        return grads[0].new_empty(0), None


def start_exchange(x: Tensor, exchange: PendingExchange) -> PendingExchange:
    """Start to send rows to the group's ranks in order; `PendingExchange.finish` returns those that came from them.

    What is computed before that runs beside the exchange. In the backward pass the exchange of the gradient runs beside
    the gradients of the same operations.
    """
    exchange.marker = _StartExchange.apply(x, exchange)  # type: ignore[no-untyped-call]
    return exchange


class _Collective(torch.autograd.Function):
    """A collective operation by its name in `_PASSES`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.name, ctx.dim, ctx.group = name, dim, group
        return _PASSES[name][0](x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _PASSES[ctx.name][1](grads[0], ctx.dim, ctx.group), None, None, None


def _sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return all_reduce(x, group)


def _select_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _all_to_all(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sizes = [x.shape[0] // group.size()] * group.size()
    return wait(_OPS.all_to_all_single(x.contiguous(), sizes, sizes, group.group_name))


_PASSES: dict[str, tuple[Callable[[Tensor, int, dist.ProcessGroup], Tensor], ...]] = {
    "all_gather": (all_gather, reduce_scatter),
    "reduce_scatter": (reduce_scatter, all_gather),
    "copy": (lambda x, dim, group: x.view_as(x), _sum),
    "sum": (_sum, lambda grad, dim, group: grad),
    "gather": (all_gather, _select_part),
    "all_to_all": (_all_to_all, _all_to_all),
    "share": (lambda x, dim, group: x.view_as(x), lambda grad, dim, group: grad / group.size()),
}
"""The forward and the backward pass of each operation."""


def all_gather_autograd(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`; ranks use the result for different things, so the gradient is reduce-scattered."""
    return _Collective.apply(x, "all_gather", dim, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_autograd(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along `dim`; the gradient is all-gathered."""
    return _Collective.apply(x, "reduce_scatter", dim, group)  # type: ignore[no-any-return, no-untyped-call]


def copy_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor; ranks use it for different things, so the gradient is all-reduced."""
    return _Collective.apply(x, "copy", 0, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; all ranks use the result for the same thing, so the gradient passes unchanged."""
    return _Collective.apply(x, "sum", 0, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_region(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`; all ranks use the result for the same thing, so each takes its part of the gradient."""
    return _Collective.apply(x, "gather", dim, group)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all_autograd(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the j-th of `size` equal parts of x along dimension 0 to rank j; receive theirs in rank order.

    The gradient takes the same way back.
    """
    return _Collective.apply(x, "all_to_all", 0, group)  # type: ignore[no-any-return, no-untyped-call]


def share_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor; each rank has an equal part of its gradient."""
    return _Collective.apply(x, "share", 0, group)  # type: ignore[no-any-return, no-untyped-call]
