"""Optimizers that train with one set of weights and give another: an average of them, for example."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """What a torch optimizer may have beside torch's methods.

    Validation, sampling, tasks, averages, exports and all that reads weights from a checkpoint use what it returns;
    gradients are computed at the parameters, and a resumed run continues with these.
    """

    def evaluation_weights(self, parameter: Parameter) -> Tensor:
        """Return a new tensor to evaluate in place of a parameter, with its shape, sharding and dtype.

        It is computed from the parameter and `self.state[parameter]`, each rank's shard by itself.
        """


@torch.no_grad()
def compute_evaluation_weights(optimizer: HasEvaluationWeights, parameter: Parameter) -> Tensor:
    """Return what is evaluated in place of a parameter."""
    return optimizer.evaluation_weights(parameter)
