"""The load of experts: what routers do with it after each step, and what the metrics say of it.

Each layer counts how often each expert was chosen for tokens whose targets count, once for each forward pass
of training (`titan.model.balance.counts`). The counts are at the end of the step's vector
(`titan.training.step_metrics`), so they are summed over all ranks with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.model.experts import Router

COLLAPSED = 1.5
"""A router has collapsed if its choices are as uneven as if only so many times K experts were chosen, equally often."""
STEPS = 10
"""How many steps in a row a router must be so before that is reported."""


class ExpertLoad:
    """Updates the routers of this rank, and reports the load of all layers."""

    def __init__(self, routers: dict[int, Router], experts: int, layers: int, chosen: int, rate: float) -> None:
        """Take the routers of this rank.

        Args:
            routers: by the index of their layer; none where a pipeline stage has only dense blocks.
            experts: of a layer.
            layers: of the whole model.
            chosen: experts of a token.
            rate: change per step of the bias with which experts are chosen, where a router has one.
        """
        self.routers, self.layers, self.chosen, self.rate = routers, layers, chosen, rate
        self.experts, self.size = experts, layers * (experts + 1)
        self._uneven = np.zeros(layers, dtype=int)
        device = next((router.load.device for router in routers.values()), None)
        self._places = torch.tensor(list(routers), dtype=torch.long, device=device)  # hosts would wait for a list

    @torch.no_grad()
    def update(self, counts: Tensor, skipped: Tensor) -> None:
        """Set the load that the next step's losses use, and move the biases (arXiv:2408.15664, algorithm 1).

        Args:
            counts: of the global batch, float64 [size].
            skipped: whether the step leaves the weights as they were, bool [].
        """
        if not self.routers:
            return
        routers, chosen = list(self.routers.values()), counts.view(self.layers, -1)[self._places, :-1]
        total, mean = chosen.sum(-1, keepdim=True), chosen.mean(-1, keepdim=True)
        keep = skipped | (total == 0)
        loads = [router.load for router in routers]
        torch._foreach_copy_(loads, list(torch.where(keep, torch.stack(loads), chosen / total).float().unbind()))
        biases = [router.bias for router in routers if router.bias is not None]
        if biases and self.rate:
            moves = self.rate * torch.where(keep, 0, (mean - chosen).sign()).float()
            torch._foreach_add_(biases, list(moves.unbind()))

    def record(self, counts: Sequence[float], each: bool) -> dict[str, float | list[float]]:
        """Return what the step's record says of the load; shares are relative to an even load, 1.

        Args:
            counts: of the global batch, [size].
            each: whether it has the load of each expert and layer too.
        """
        table = np.asarray(counts, dtype=float).reshape(self.layers, -1)
        routed = table[:, :-1].sum(-1) > 0
        if not routed.any():
            return {}
        shares = table[routed, :-1] / table[routed, :-1].sum(-1, keepdims=True)
        found: dict[str, float | list[float]] = {
            "expert_load_max": float(shares.max() * self.experts),
            "expert_load_min": float(shares.min() * self.experts),
            "expert_entropy": float(_entropy(shares).mean() / np.log(self.experts)) if self.experts > 1 else 1.0,
            "expert_dropped": float(table[:, -1].sum() / table[:, :-1].sum()),
        }
        if each:
            loads = zip(np.flatnonzero(routed).tolist(), (shares * self.experts).tolist(), strict=True)
            found |= {f"expert_load/layers.{layer}": load for layer, load in loads}
        return found

    def collapsed(self, counts: Sequence[float]) -> list[str]:
        """Return a sentence if routers have just collapsed; call it once for each step."""
        table = np.asarray(counts, dtype=float).reshape(self.layers, -1)[:, :-1]
        totals = table.sum(-1, keepdims=True)
        effective = np.exp(_entropy(np.divide(table, totals, out=np.ones_like(table), where=totals > 0)))
        few = (totals[:, 0] > 0) & (effective < COLLAPSED * self.chosen) & (self.experts > 2 * COLLAPSED * self.chosen)
        self._uneven = np.where(few, self._uneven + 1, 0)
        new = np.flatnonzero(self._uneven == STEPS).tolist()
        if not new:
            return []
        layers = f"layer{'s' if len(new) > 1 else ''} {', '.join(map(str, new))}"
        return [
            f"the router of {layers} has collapsed: for {STEPS} steps it chose few of {self.experts} experts; raise "
            "model.aux_loss, or give model.bias_rate=0.001."
        ]


def _entropy(shares: np.ndarray) -> np.ndarray:
    """Return the entropy in nats of each row of shares."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: np.ndarray = -(shares * logs).sum(-1)
    return entropy


def expert_load(stages: Sequence[Any], model: Any) -> ExpertLoad | None:
    """Return the load of the experts of a model in a rank's stages; None for a model without experts.

    Args:
        stages: this rank's.
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
    return ExpertLoad(routers, model.experts, model.layers, model.chosen_experts, model.bias_rate or 0.0)
