"""The head and its loss as a compiler's graph computes them, for traces: logits once, in the compute type.

The graph reads logits for the loss, writes their gradient over them, and multiplies it (tests measure
that). Its operations on fake tensors have the same tensors and bytes; values do not matter there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan.model.layers import Head, Product, cross_entropy
from titan.model.loss_terms import Objective, label_smoothing, z_loss

FUSED_TERMS = (z_loss, label_smoothing)
"""Values of loss terms that need statistics of logits only."""


class _LogitLoss(torch.autograd.Function):
    """Reads logits, and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax().float().expand(count).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits.mul_(grads[0][0].to(logits.dtype)), None


def fuse_losses(heads: Iterable[Head | None]) -> None:
    """Let heads compute their losses as in one graph; one of split, capped or chunked logits remains as it is."""
    for head in heads:
        if isinstance(head, Head) and (count := _count_figures(head)):
            head.fused = partial(_compute_loss, count=count)


def _count_figures(head: Head) -> int:
    """Return how many figures the loss has that a graph fuses; 0: none is."""
    objective = head.fused
    if objective is None:
        return 1 if head.loss is cross_entropy else 0
    if not isinstance(objective, Objective) or objective.cap or objective.chunk or objective.vocabulary.ranks > 1:
        return 0
    return 1 + len(objective.terms) if all(term.values in FUSED_TERMS for term in objective.terms) else 0


def _compute_loss(hidden: Tensor, weight: Tensor, targets: Tensor, product: Product, count: int) -> Tensor:
    figures: Tensor = _LogitLoss.apply(product(hidden, weight), count)  # type: ignore[no-untyped-call]
    return figures if count > 1 else figures[0].clone()  # FSDP warns of views
