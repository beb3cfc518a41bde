"""Schedule-Free AdamW (Defazio et al. 2024, arXiv:2405.15682): an average of the weights replaces the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.optimizer.schema import Optimizer

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Optimizer):
    """The settings of Schedule-Free AdamW; choose `schedule=constant`, which has a warm-up."""

    betas: tuple[float, float] = setting(
        (0.9, 0.95), "the average's weight where gradients are computed; decay of the second moment", above=0, below=1
    )
    eps: float = setting(1e-8, "added to the square root of the second moment", above=0, cap=1)

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`."""
        from experiments.schedule_free.update import Averaging

        return Averaging(self.param_groups(parameters), self.peak_lr, self.betas, self.eps)

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """Return the bytes of the base sequence and of the second moment; see `Optimizer.state_bytes`."""
        return 2 * weight_bytes * (matrices + others)

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Raise ConfigError for weights whose rounding is larger than the average's changes."""
        super().check(model, weight_bytes)
        if weight_bytes < 4:
            raise ConfigError(
                "precision.weights=bf16: Schedule-Free's average changes by less than the rounding of bf16; give "
                "precision.weights=fp32."
            )
