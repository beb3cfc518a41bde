"""The optimizer axis. Each kind is a dataclass whose `build` makes the torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.settings import setting

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has in common."""

    lr: float = setting(1e-3, "peak learning rate", above=0)
    weight_decay: float = setting(0.1, "weight decay", at_least=0)

    state_bytes = 0
    """Bytes of state that it keeps for each parameter."""

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the two moments", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    fused: bool = setting(True, "one kernel for all parameters", science=False)

    state_bytes = 8

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`."""
        import torch

        return torch.optim.AdamW(
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=self.fused
        )


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    momentum: float = setting(0.0, "momentum", at_least=0, below=1)
    fused: bool = setting(True, "one kernel for all parameters, where they are not cut", science=False)

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        """Bytes of state that it keeps for each parameter."""
        return 4 if self.momentum else 0

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`."""
        import torch
        from torch.distributed.tensor import DTensor

        parameters = list(parameters)
        fused = self.fused and not any(isinstance(p, DTensor) for p in parameters)  # no such kernel for DTensors
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=fused
        )
