"""The load of experts: what routers do with it after each step, and what the metrics say of it.

Each layer counts how often each expert was chosen for tokens whose targets count, once for each forward pass
of training (`titan.model.balance.count_choices`). The counts are at the end of the step's vector
(`titan.training.step_metrics`), so they are summed over all ranks with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.model.experts import Router

COLLAPSE_FACTOR = 1.5
"""A router has collapsed if its choices are as uneven as if only so many times K experts were chosen, equally often."""
COLLAPSE_STEPS = 10
"""How many steps in a row a router must be so before that is reported."""


class ExpertLoad:
    """Updates the routers of this rank, and reports the load of all layers."""

    def __init__(self, routers: dict[int, Router], experts: int, layers: int, top_k: int, bias_rate: float) -> None:
        """Take the routers of this rank.

        Args:
            routers: by the index of their layer; none where a pipeline stage has only dense blocks.
            bias_rate: change per step of the bias with which experts are chosen, where a router has one.
        """
        self.routers, self.layers, self.top_k, self.bias_rate = routers, layers, top_k, bias_rate
        self.experts, self.num_counts = experts, layers * (experts + 1)
        self._uneven_steps = np.zeros(layers, dtype=int)
        device = next((router.load.device for router in routers.values()), None)
        # a tensor, because the host would wait for the copy of a list
        self._layer_indices = torch.tensor(list(routers), dtype=torch.long, device=device)

    @torch.no_grad()
    def update(self, counts: Tensor, skipped: Tensor) -> None:
        """Set the load that the next step's losses use, and move the biases (arXiv:2408.15664, algorithm 1).

        Args:
            counts: of the global batch, float64 [size].
            skipped: whether the step leaves the weights as they were, bool [].
        """
        if not self.routers:
            return
        routers, expert_counts = list(self.routers.values()), counts.view(self.layers, -1)[self._layer_indices, :-1]
        total, mean = expert_counts.sum(-1, keepdim=True), expert_counts.mean(-1, keepdim=True)
        keeps_load = skipped | (total == 0)
        loads = [router.load for router in routers]
        next_loads = torch.where(keeps_load, torch.stack(loads), expert_counts / total).float()
        torch._foreach_copy_(loads, list(next_loads.unbind()))
        biases = [router.bias for router in routers if router.bias is not None]
        if biases and self.bias_rate:
            moves = self.bias_rate * torch.where(keeps_load, 0, (mean - expert_counts).sign()).float()
            torch._foreach_add_(biases, list(moves.unbind()))

    def build_record(self, counts: Sequence[float], per_expert: bool) -> dict[str, float | list[float]]:
        """Return what the step's record says of the load; shares are relative to an even load, 1.

        Args:
            counts: of the global batch, [size].
        """
        table = np.asarray(counts, dtype=float).reshape(self.layers, -1)
        routed = table[:, :-1].sum(-1) > 0
        if not routed.any():
            return {}
        shares = table[routed, :-1] / table[routed, :-1].sum(-1, keepdims=True)
        largest_entropy = np.log(self.experts)
        record: dict[str, float | list[float]] = {
            "expert_load_max": float(shares.max() * self.experts),
            "expert_load_min": float(shares.min() * self.experts),
            "expert_entropy": float(_compute_entropy(shares).mean() / largest_entropy) if self.experts > 1 else 1.0,
            "expert_dropped": float(table[:, -1].sum() / table[:, :-1].sum()),
        }
        if per_expert:
            loads = zip(np.flatnonzero(routed).tolist(), (shares * self.experts).tolist(), strict=True)
            record |= {f"expert_load/layers.{layer}": load for layer, load in loads}
        return record

    def check_collapse(self, counts: Sequence[float]) -> list[str]:
        """Return a sentence if routers have just collapsed; call it once for each step."""
        table = np.asarray(counts, dtype=float).reshape(self.layers, -1)[:, :-1]
        totals = table.sum(-1, keepdims=True)
        effective = np.exp(_compute_entropy(np.divide(table, totals, out=np.ones_like(table), where=totals > 0)))
        limit = COLLAPSE_FACTOR * self.top_k
        is_uneven = (totals[:, 0] > 0) & (effective < limit) & (self.experts > 2 * limit)
        self._uneven_steps = np.where(is_uneven, self._uneven_steps + 1, 0)
        collapsed_layers = np.flatnonzero(self._uneven_steps == COLLAPSE_STEPS).tolist()
        if not collapsed_layers:
            return []
        layers = f"layer{'s' if len(collapsed_layers) > 1 else ''} {', '.join(map(str, collapsed_layers))}"
        return [
            f"the router of {layers} has collapsed: for {COLLAPSE_STEPS} steps it chose few of {self.experts} "
            "experts; raise model.aux_loss, or give model.bias_rate=0.001."
        ]


def _compute_entropy(shares: np.ndarray) -> np.ndarray:
    """Return the entropy in nats of each row of shares."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: np.ndarray = -(shares * logs).sum(-1)
    return entropy


def build_expert_load(stages: Sequence[Any], model: Any) -> ExpertLoad | None:
    """Return the load of the experts of a model in a rank's stages; None for a model without experts.

    Args:
        model: the schema, a `titan.model.schema_moe.Moe` where it has experts.
    """
    if not stages[0].model.counted:
        return None
    routers = {
        int(number): module
        for stage in stages
        for number, block in stage.model.layers.items()
        for module in block.modules()
        if isinstance(module, Router)
    }
    return ExpertLoad(routers, model.experts, model.layers, model.top_k, model.bias_rate or 0.0)
