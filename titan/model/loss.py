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

from titan.model.custom_op import register_operation
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
    needs_grad: bool,
    *,
    first: int = 0,
    largest: Callable[[Tensor], Tensor] = identity,
    total: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Return the summed cross-entropy in nats, overwriting the logits.

    Args:
        logits: float32 [N, V]; overwritten, with `needs_grad` by the gradient of the loss: softmax minus one-hot
            targets.
        targets: int64 [N], -100 where ignored.
        first: index of the rank's first vocabulary entry, with a sharded vocabulary.
        largest: max all-reduce over the ranks of the vocabulary, of a value per token.
        total: sum all-reduce over these ranks, of several values per token.
    """
    index, valid = targets - first, targets != IGNORED
    is_local = (index >= 0) & (index < logits.shape[-1])
    index = index.where(is_local, 0)[:, None]
    logits.sub_(largest(logits.amax(-1))[:, None])
    target_logits = logits.gather(-1, index)[:, 0].where(is_local, 0)
    sums, target_logits = total(torch.stack([logits.exp_().sum(-1), target_logits])).unbind()
    if needs_grad:
        logits.mul_((valid / sums)[:, None])
        logits.scatter_add_(-1, index, -(is_local & valid).to(logits.dtype)[:, None])
    return (sums.log() - target_logits).where(valid, 0).sum()


def measure_logits(
    hidden: Tensor, logits: Tensor, targets: Tensor, needs_grad: bool, **split: Any
) -> tuple[Tensor, None]:
    """Do as `loss_and_grad_`, as a `Measure`."""
    return loss_and_grad_(logits, targets, needs_grad, **split), None


def compute_loss_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    needs_grads: tuple[bool, bool],
    measure: Measure = measure_logits,
) -> Results:
    """Return the loss and the requested gradients, computing the logits of `chunk` tokens at a time."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden) if needs_grads[0] else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grads[1] else None
    for start in range(0, len(hidden), chunk):
        tokens = slice(start, start + chunk)
        chunk_grad = None if hidden_grad is None else hidden_grad[tokens]
        loss = loss + _compute_chunk_loss(hidden[tokens], weight, targets[tokens], measure, chunk_grad, weight_grad)
    empty = hidden.new_empty(0), weight.new_empty(0)
    return (
        loss,
        empty[0] if hidden_grad is None else hidden_grad,
        empty[1] if weight_grad is None else weight_grad.to(weight.dtype),
    )


def _compute_chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    measure: Measure,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> Tensor:
    """Return the loss of one chunk; write its gradient to `hidden_grad` and add its gradient to `weight_grad`."""
    logits = F.linear(hidden, weight).float()
    loss, direct = measure(hidden, logits, targets, hidden_grad is not None or weight_grad is not None)
    logits = logits.to(hidden.dtype)  # as autograd rounds the gradient in the backward of `float`
    if hidden_grad is not None:
        torch.mm(logits, weight, out=hidden_grad)
        if direct is not None:
            hidden_grad += direct
    if weight_grad is not None and hidden.dtype == weight_grad.dtype:
        weight_grad.addmm_(logits.T, hidden)
    elif weight_grad is not None:
        weight_grad += logits.T @ hidden
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, with gradients computed in forward; backward does not modify them, so it may run twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, operation: Operation, needs_grad: bool
    ) -> Tensor:
        needs_grads = needs_grad and ctx.needs_input_grad[0], needs_grad and ctx.needs_input_grad[1]
        loss, hidden_grad, weight_grad = operation(hidden.flatten(0, -2), weight, targets.flatten(), *needs_grads)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.shape = hidden.shape
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden_grad, weight_grad), needs_grads = ctx.saved_tensors, ctx.needs_input_grad
        upstream = grads[0].flatten()[0]  # with loss terms the first element has the gradient of all
        hidden_upstream = (hidden_grad * upstream).view(ctx.shape) if needs_grads[0] else None
        return hidden_upstream, weight_grad * upstream if needs_grads[1] else None, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, operation: Operation) -> Tensor:
    """Return the summed cross-entropy in nats, fp32 [], of hidden states [..., D] and targets [...].

    If grad mode is enabled, the gradients that autograd needs are computed with the loss.
    """
    needs_grad = torch.is_grad_enabled()  # grad mode is off inside forward
    out: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, operation, needs_grad)  # type: ignore[no-untyped-call]
    return out


def compute_chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, product: Product = F.linear, *, chunk: int
) -> Tensor:
    """Return `linear_cross_entropy` with an unsharded weight [vocab, D], in chunks of `chunk` tokens.

    `product` has no effect: the head of chunks is computed in the type of the hidden states.
    """

    def run_operation(*args: Any) -> Results:
        results: Results = torch.ops.titan.chunked_loss(*args, chunk)
        return results

    return linear_cross_entropy(hidden, weight, targets, run_operation)


def _run_chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_hidden_grad: bool, needs_weight_grad: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return compute_loss_in_chunks(hidden, weight, targets, chunk, (needs_hidden_grad, needs_weight_grad))


def make_fake_results(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_hidden_grad: bool, needs_weight_grad: bool, *rest: Any
) -> Results:
    """Return empty results of the operation: its fake implementation."""
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if needs_hidden_grad else 0),
        weight.new_empty(weight.shape if needs_weight_grad else 0),
    )


register_operation("titan::chunked_loss", _run_chunked_loss, make_fake_results)
