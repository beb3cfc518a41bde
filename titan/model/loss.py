"""Fused linear cross-entropy in chunks: logits, loss and gradients of some tokens at a time.

With a large vocabulary the logits of a batch need more memory than any other tensor. They are needed only once: the
gradient of the loss follows from them directly, and from it the gradients of hidden states and weight, up to the
upstream gradient factor. So the forward pass computes those gradients too and frees the logits of each chunk (Liger
Kernel, arXiv:2410.10989, section 3.2; Cut Cross-Entropy, arXiv:2411.09009, avoids whole logits too).

For the compiler all chunks are one operation, torch.ops.titan.chunked_loss: a traced graph could save logits that are
freed here, or recompute them, and would grow with the number of chunks.

Shapes: N tokens, D hidden width, V vocabulary entries of the rank's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.custom_op import register
from titan.model.layers import IGNORED, Product, identity

Results = tuple[Tensor, Tensor, Tensor]
"""The summed loss in nats (fp32 scalar) and the gradients of hidden states and weight, each in its tensor's type; a
gradient that was not requested is empty."""
Operation = Callable[[Tensor, Tensor, Tensor, bool, bool], Results]
"""Returns `Results` for hidden states [N, D], weight [V, D], targets [N] and whether each gradient is requested."""
Measure = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Returns the loss of hidden states, their logits and targets, overwriting the logits by the gradient if requested; and
the gradient of the hidden states that does not come from the logits, if there is one."""


def loss_and_grad_(
    logits: Tensor,
    targets: Tensor,
    graded: bool,
    *,
    first: int = 0,
    largest: Callable[[Tensor], Tensor] = identity,
    total: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Return the summed cross-entropy in nats, overwriting the logits.

    Args:
        logits: float32 [N, V]; overwritten, with `graded` by the gradient of the loss: softmax minus one-hot targets.
        targets: int64 [N], -100 where ignored.
        graded: whether the gradient is requested.
        first: index of the rank's first vocabulary entry, with a sharded vocabulary.
        largest, total: max and sum all-reduce over those ranks, of one or more values per token.
    """
    index, valid = targets - first, targets != IGNORED
    here = (index >= 0) & (index < logits.shape[-1])
    index = index.where(here, 0)[:, None]
    logits.sub_(largest(logits.amax(-1))[:, None])
    chosen = logits.gather(-1, index)[:, 0].where(here, 0)
    sums, chosen = total(torch.stack([logits.exp_().sum(-1), chosen])).unbind()
    if graded:
        logits.mul_((valid / sums)[:, None])
        logits.scatter_add_(-1, index, -(here & valid).to(logits.dtype)[:, None])
    return (sums.log() - chosen).where(valid, 0).sum()


def measure_logits(hidden: Tensor, logits: Tensor, targets: Tensor, graded: bool, **split: Any) -> tuple[Tensor, None]:
    """Do as `loss_and_grad_`, as a `Measure`."""
    return loss_and_grad_(logits, targets, graded, **split), None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    wants: tuple[bool, bool],
    measure: Measure = measure_logits,
) -> Results:
    """Return the loss and the requested gradients, computing the logits of `chunk` tokens at a time."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    into_hidden = torch.empty_like(hidden) if wants[0] else None
    into_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        mine = None if into_hidden is None else into_hidden[part]
        loss = loss + _of_chunk(hidden[part], weight, targets[part], measure, mine, into_weight)
    nothing = hidden.new_empty(0), weight.new_empty(0)
    return (
        loss,
        nothing[0] if into_hidden is None else into_hidden,
        nothing[1] if into_weight is None else into_weight.to(weight.dtype),
    )


def _of_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    measure: Measure,
    into_hidden: Tensor | None,
    into_weight: Tensor | None,
) -> Tensor:
    """Return the loss of one chunk; write its gradient to `into_hidden` and add its gradient to `into_weight`."""
    logits = F.linear(hidden, weight).float()
    loss, direct = measure(hidden, logits, targets, into_hidden is not None or into_weight is not None)
    logits = logits.to(hidden.dtype)  # as autograd rounds the gradient in the backward of `float`
    if into_hidden is not None:
        torch.mm(logits, weight, out=into_hidden)
        if direct is not None:
            into_hidden += direct
    if into_weight is not None and hidden.dtype == into_weight.dtype:
        into_weight.addmm_(logits.T, hidden)
    elif into_weight is not None:
        into_weight += logits.T @ hidden
    return loss


class _Loss(torch.autograd.Function):
    """The loss, with gradients computed in forward; backward does not modify them, so it may run twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, by: Operation, graded: bool) -> Tensor:
        wants = graded and ctx.needs_input_grad[0], graded and ctx.needs_input_grad[1]
        loss, of_hidden, of_weight = by(hidden.flatten(0, -2), weight, targets.flatten(), *wants)
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.shape = hidden.shape
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (of_hidden, of_weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        upstream = grads[0].flatten()[0]  # with loss terms the first element has the gradient of all
        dh = (of_hidden * upstream).view(ctx.shape) if needs[0] else None
        return dh, of_weight * upstream if needs[1] else None, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, operation: Operation) -> Tensor:
    """Return the summed cross-entropy in nats, fp32 [], of hidden states [..., D] and targets [...].

    If grad mode is enabled, the gradients that autograd needs are computed with the loss.
    """
    graded = torch.is_grad_enabled()  # grad mode is off inside forward
    out: Tensor = _Loss.apply(hidden, weight, targets, operation, graded)  # type: ignore[no-untyped-call]
    return out


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, product: Product = F.linear, *, chunk: int) -> Tensor:
    """Return `linear_cross_entropy` with an unsharded weight [vocab, D], in chunks of `chunk` tokens.

    `product` has no effect: the head of chunks is computed in the type of the hidden states.
    """

    def operation(*args: Any) -> Results:
        results: Results = torch.ops.titan.chunked_loss(*args, chunk)
        return results

    return linear_cross_entropy(hidden, weight, targets, operation)


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return chunked_loss(hidden, weight, targets, chunk, (wants_hidden, wants_weight))


def shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, *rest: Any
) -> Results:
    """Return empty results of the operation: its fake implementation."""
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
    )


register("titan::chunked_loss", _chunked, shapes)
