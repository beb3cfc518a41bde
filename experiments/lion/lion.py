"""Lion (Chen et al. 2023, arXiv:2302.06675): updates by the sign of an interpolated momentum; one state per weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.config.settings import setting
from titan.optimizer.schema import Optimizer

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """The settings of Lion; `lr` is typically a third to a tenth of AdamW's, and `weight_decay` as much larger."""

    betas: tuple[float, float] = setting((0.9, 0.99), "weights of the momentum in the update and in itself", at_least=0,
                                         below=1)  # fmt: skip

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`."""
        from experiments.lion.update import SignedMomentum

        return SignedMomentum(self.param_groups(parameters), self.peak_lr, self.betas)

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """Return the bytes of the momentum, in the weights' type; see `Optimizer.state_bytes`."""
        return weight_bytes * (matrices + others)
