"""The update of Schedule-Free AdamW, also of sharded weights.

Gradients are computed at y = (1 - b1) z + b1 x, AdamW without momentum updates z, and x averages z. The parameters are
y. The state has z - y, from which x follows; it starts at zero, as titan starts every state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Averaging(torch.optim.Optimizer):
    """z <- z - lr (g / (sqrt(v) + eps) + decay y), then x <- (1 - c) x + c z with c = lr^2 / sum of all lr^2."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for y in (p for p in group["params"] if p.grad is not None):
                self._update(y, y.grad, group, self.state[y] or self._begin(y))

    def _begin(self, y: Tensor) -> dict[str, Tensor]:
        scalars = {name: torch.zeros((), dtype=torch.float64) for name in ("step", "lr_squares")}
        begun = {"base": torch.zeros_like(y), "second": torch.zeros_like(y), **scalars}
        self.state[y] = begun
        return begun

    def _update(self, y: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        (beta1, beta2), lr, base, second = self.betas, group["lr"], state["base"], state["second"]
        state["step"] += 1
        state["lr_squares"] += lr**2
        share = lr**2 / state["lr_squares"].clamp(min=1e-300)  # a tensor, so that no step waits for the device
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (second / (1 - beta2 ** state["step"])).sqrt_().add_(self.eps)
        moved = base - lr * (gradient / scale + group["weight_decay"] * y)  # the new z - y
        base.mul_((1 - beta1) / beta1).add_(moved).mul_(beta1 * (1 - share))  # of z - x the part beyond the new y
        y.add_(moved - base)

    def evaluation_weights(self, parameter: Parameter) -> Tensor:
        """Return x."""
        beta1, base = self.betas[0], self.state[parameter]["base"]
        return torch.sub(parameter, base, alpha=(1 - beta1) / beta1)
