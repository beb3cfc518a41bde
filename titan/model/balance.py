"""What keeps a router from sending all tokens to a few experts: losses, a bias, and a limit per expert.

The definitions are the same on every layout and for every number of micro-batches (docs/experts.md):

- `aux_loss` (arXiv:2101.03961, 2006.16668): E * sum over experts of load * the mean score over the tokens of the global
  batch. `load` is the expert's share of all choices in the previous step's global batch, since that of the present one
  is known only after its last micro-batch.
- `seq_aux_loss` (arXiv:2412.19437, eq. 17): the same for each row, whose load is its own.
- `router_z_loss` (arXiv:2202.08906): the squared logsumexp of the router's logits.

Scores are divided by their sum over the experts, which matters for sigmoid scores only. Only tokens count whose target
counts in the loss. Each loss is a value for each token; a layer's loss is their mean, and the layers' losses are added.

Shapes: B rows, T tokens of a row, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

AUX, SEQ_AUX, Z = "aux_loss", "seq_aux_loss", "router_z_loss"


class RowExchange:
    """What ranks exchange that have parts of the same rows; here one rank has all of them."""

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Return the sum over the ranks of counts [B, ...], which has no gradient."""
        return counts

    def gather_rows(self, x: Tensor) -> Tensor:
        """Return whole rows [B, T, ...] in order, from this rank's tokens [B, t, ...]."""
        return x

    def select_part(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows."""
        return x


class Balance:
    """The balancing of one layer, and in `rows` what ranks exchange that have parts of the same rows."""

    def __init__(self, experts: int, losses: tuple[str, ...] = (), capacity: float | None = None) -> None:
        """Take E, names of losses, and the limit per row and expert as a multiple of the mean; None: no limit."""
        self.experts, self.losses, self.capacity = experts, losses, capacity
        self.rows = RowExchange()

    def compute_losses(
        self, experts: Tensor, scores: Tensor, logits: Tensor, load: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        """Return the values of the losses, float32 [B, T] each, by name.

        Args:
            experts: chosen ones, int64 [B, T, K].
            scores: the router's, float32 [B, T, E], as its logits.
            load: of the previous step, float32 [E].
            valid: which tokens count, bool [B, T].
        """
        losses: dict[str, Callable[[], Tensor]] = {
            AUX: lambda: self.experts * (_normalise_scores(scores) @ load),
            SEQ_AUX: lambda: (
                self.experts * (_normalise_scores(scores) * self._compute_row_load(experts, valid)).sum(-1)
            ),
            Z: lambda: logits.logsumexp(-1).square(),
        }
        return {name: losses[name]() for name in self.losses}

    def _compute_row_load(self, experts: Tensor, valid: Tensor) -> Tensor:
        """Return each expert's share of the choices in a row, float32 [B, 1, E]."""
        choices = experts.flatten(1)
        ones = valid[..., None].expand_as(experts).flatten(1).long()
        counts = torch.zeros(len(choices), self.experts, dtype=torch.int64, device=choices.device)
        counts = self.rows.sum_counts(counts.scatter_add(1, choices, ones))
        return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).float()[:, None]

    def apply_capacity(self, experts: Tensor) -> Tensor:
        """Return the chosen experts, int64 [B, T, K], with E where an expert has more tokens of a row than its limit.

        First choices come before second ones, and earlier tokens before later ones (arXiv:2006.16668, algorithm 1).
        """
        if self.capacity is None:
            return experts
        rows = self.rows.gather_rows(experts)
        limit = math.ceil(self.capacity * rows.shape[1] * rows.shape[2] / self.experts)
        positions = _number_choices(rows.transpose(1, 2).flatten(1), self.experts).view(rows.transpose(1, 2).shape)
        return experts.where(self.rows.select_part(positions.transpose(1, 2)) < limit, self.experts)


def needs_whole_rows(config: Any) -> bool:
    """Return whether routers need whole rows, by the model's `titan.model.schema_moe.Moe`."""
    return config.capacity is not None or SEQ_AUX in config.balance_losses()


def set_row_exchange(model: nn.Module, rows: RowExchange) -> None:
    """Set what ranks exchange in the layers of a model that balance experts."""
    for module in model.modules():
        if isinstance(balance := getattr(module, "balance", None), Balance):
            balance.rows = rows


def _normalise_scores(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def _number_choices(choices: Tensor, experts: int) -> Tensor:
    """Return the place of each choice, int64 [B, C], among those of the same expert, int64 [B, C]."""
    order = choices.argsort(dim=1, stable=True)
    sizes = torch.zeros(len(choices), experts, dtype=torch.int64, device=choices.device)
    sizes = sizes.scatter_add(1, choices, torch.ones_like(choices))
    starts = (sizes.cumsum(1) - sizes).gather(1, choices.gather(1, order))
    positions = torch.arange(choices.shape[1], device=choices.device) - starts
    return torch.empty_like(order).scatter_(1, order, positions)


def count_choices(experts: Tensor, kept_experts: Tensor, count: int, valid: Tensor) -> Tensor:
    """Return what a layer counts, float32 [E + 1]: how often each expert was chosen, and choices that were dropped.

    Args:
        experts: chosen ones, int64 [B, T, K]; `kept_experts` those of `Balance.apply_capacity`.
        valid: which tokens count, bool [B, T].
    """
    counts = count_experts(experts.where(valid[..., None], count).flatten(), count)
    dropped = ((kept_experts == count) & valid[..., None]).sum()
    return torch.cat([counts, dropped[None]]).float()


def count_experts(experts: Tensor, count: int) -> Tensor:
    """Return how often each of `count` experts is in int64 [N], int64 [count]; `count` itself is ignored."""
    counts = torch.zeros(count + 1, dtype=torch.int64, device=experts.device)
    return counts.scatter_add(0, experts, torch.ones_like(experts))[:count]
