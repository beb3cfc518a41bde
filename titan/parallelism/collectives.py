"""Collective operations that autograd and torch.compile see through.

All are torch's functional collectives, waited for at once: what comes out is a plain tensor in eager and in compiled
code alike. A tensor that is still under way (torch's AsyncCollectiveTensor) would give wrong gradients when it enters a
compiled block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops._c10d_functional


def wait(tensor: Tensor) -> Tensor:
    """The tensor, once it has arrived."""
    out: Tensor = _OPS.wait_tensor(tensor)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, all of one shape, one after the other along `dim`. No gradient."""
    out = wait(_OPS.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return out if dim == 0 else torch.cat(out.chunk(group.size()), dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; all parts are equally long. No gradient."""
    if dim != 0:
        x = torch.cat(x.chunk(group.size(), dim))
    return wait(_OPS.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name))


def all_reduce(x: Tensor, group: dist.ProcessGroup, how: str = "sum") -> Tensor:
    """The sum (or "max") over ranks, in a new tensor. No gradient."""
    return reduced(x, group.group_name, how)


def reduced(x: Tensor, group: str, how: str = "sum") -> Tensor:
    """`all_reduce` over a group that is given by its name, as operations are that the compiler takes as they are."""
    return wait(_OPS.all_reduce(x.contiguous(), how, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`; each rank uses the result for something else, so the gradient is reduce-scattered."""
    out: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along `dim`; the gradient is all-gathered."""
    out: Tensor = _Scatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, which each rank uses for something else: the gradient is summed."""
    out: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, which all ranks then use for the same: the gradient goes to each as it is."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`; all ranks use the result for the same, so each takes its part of the gradient."""
    out: Tensor = _Join.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out
