"""The loss of a head without all its logits: products, loss and gradients of some tokens at a time.

The logits of a batch take more room than anything else where a vocabulary is large. They are needed once: the slope of
the loss follows from them at once, and with it the gradients of hidden states and weight, up to the factor that comes
from behind the loss. So the forward pass computes those too and forgets the logits of each chunk (Liger Kernel,
arXiv:2410.10989, section 3.2; that whole logits are not needed also Cut Cross-Entropy, arXiv:2411.09009).

To the compiler all chunks are one operation, torch.ops.titan.chunked_loss: a graph could keep logits that are freed
here, or compute them again, and would grow with the number of chunks.

Shapes: N tokens, D hidden width, V entries of the vocabulary that the weight here has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.custom_op import register
from titan.model.layers import IGNORED, as_is

Results = tuple[Tensor, Tensor, Tensor]
"""The summed loss in nats (an fp32 scalar), and of it the gradients of the hidden states and of the weight, each in the
type of what it is of; empty where it was not asked for."""
Operation = Callable[[Tensor, Tensor, Tensor, bool, bool], Results]
"""Gives them for hidden states [N, D], weight [V, D] and targets [N], and whether each gradient is wanted."""
Measure = Callable[[Tensor, Tensor, bool], Tensor]
"""The summed loss of logits, see `slopes`."""


def slopes(
    logits: Tensor,
    targets: Tensor,
    graded: bool,
    *,
    first: int = 0,
    largest: Callable[[Tensor], Tensor] = as_is,
    total: Callable[[Tensor], Tensor] = as_is,
) -> Tensor:
    """The summed cross-entropy in nats; it is computed in place of the logits.

    Args:
        logits: float32 [N, V]; with `graded` they become the loss's gradient, softmax less one at the target, else of
            no use.
        targets: int64 [N], -100 where ignored.
        graded: whether the gradient is wanted.
        first: where the vocabulary here begins, if ranks have parts of it.
        largest, total: the maximum and the sum over those ranks, of one or more numbers for each token.
    """
    place, valid = targets - first, targets != IGNORED
    here = (place >= 0) & (place < logits.shape[-1])
    place = place.where(here, 0)[:, None]
    logits.sub_(largest(logits.amax(-1))[:, None])
    chosen = logits.gather(-1, place)[:, 0].where(here, 0)
    sums, chosen = total(torch.stack([logits.exp_().sum(-1), chosen])).unbind()
    if graded:
        logits.mul_((valid / sums)[:, None])
        logits.scatter_add_(-1, place, -(here & valid).to(logits.dtype)[:, None])
    return (sums.log() - chosen).where(valid, 0).sum()


def in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, wants: tuple[bool, bool], measure: Measure = slopes
) -> Results:
    """The loss and the gradients that are wanted, from the logits of `chunk` tokens at a time."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    into_hidden = torch.empty_like(hidden) if wants[0] else None
    into_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        mine = None if into_hidden is None else into_hidden[part]
        loss += _of_chunk(hidden[part], weight, targets[part], measure, mine, into_weight)
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
    """The loss of one chunk; its gradients are written to, and added to, what is given for them."""
    logits = F.linear(hidden, weight).float()
    loss = measure(logits, targets, into_hidden is not None or into_weight is not None)
    logits = logits.to(hidden.dtype)  # as autograd rounds the gradient where it goes back through `float`
    if into_hidden is not None:
        torch.mm(logits, weight, out=into_hidden)
    if into_weight is not None and hidden.dtype == into_weight.dtype:
        into_weight.addmm_(logits.T, hidden)
    elif into_weight is not None:
        into_weight += logits.T @ hidden
    return loss


class _Loss(torch.autograd.Function):
    """The loss, whose gradients are ready before anyone asks; nothing is changed in backward, which may run twice."""

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
        dh = (of_hidden * grads[0]).view(ctx.shape) if needs[0] else None
        return dh, of_weight * grads[0] if needs[1] else None, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, operation: Operation) -> Tensor:
    """The summed cross-entropy in nats, an fp32 scalar, of hidden states [..., D] and targets [...] by an operation.

    Gradients are computed with the loss where autograd is on, and only those that it needs.
    """
    graded = torch.is_grad_enabled()  # which forward itself can't see
    out: Tensor = _Loss.apply(hidden, weight, targets, operation, graded)  # type: ignore[no-untyped-call]
    return out


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """`linear_cross_entropy` with a whole weight [vocab, D], from the logits of `chunk` tokens at a time."""

    def operation(*args: Any) -> Results:
        results: Results = torch.ops.titan.chunked_loss(*args, chunk)
        return results

    return linear_cross_entropy(hidden, weight, targets, operation)


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return in_chunks(hidden, weight, targets, chunk, (wants_hidden, wants_weight))


def shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, *rest: Any
) -> Results:
    """Results of an operation, without values."""
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
    )


register("titan::chunked_loss", _chunked, shapes)
