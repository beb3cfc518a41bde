"""Lion's update of weights, also of sharded ones."""

from __future__ import annotations

from typing import Any

import torch


class SignedMomentum(torch.optim.Optimizer):
    """w <- (1 - lr * decay) w - lr * sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = momentum.lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - second)
