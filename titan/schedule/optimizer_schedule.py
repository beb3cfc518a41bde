"""Sets the learning rate and the weight decay of an optimizer's parameter groups at every step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan.schedule.schema import Factors


class OptimizerSchedule:
    """The learning rate and weight decay of every parameter group; checkpoints hold neither."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float, factors: Callable[[int], Factors]) -> None:
        """Take the optimizer with the weight decay of its settings, the peak learning rate, and a built schedule."""
        self.optimizer, self.lr, self.factors = optimizer, lr, factors
        self.weight_decays = [group.get("weight_decay") for group in optimizer.param_groups]

    def set_rates(self, step: int) -> float:
        """Set learning rates and weight decays of `step` (1 is the first); return the rate without groups' factors."""
        factors = self.factors(step)
        lr = self.lr * factors.lr
        for group, weight_decay in zip(self.optimizer.param_groups, self.weight_decays, strict=True):
            group["lr"] = lr * group.get("factor", 1.0)
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * factors.weight_decay
        return lr
