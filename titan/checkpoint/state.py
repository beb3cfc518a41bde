"""The state of a run as named tensors: weights, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan.parallelism import data
from titan.precision.low_precision import stored


class TrainState(Protocol):
    """What a rank trains, as far as a checkpoint is concerned."""

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """The parts of the model that the rank holds."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over their parameters."""

    @property
    def tied_weights(self) -> Any:
        """A tied weight of which the rank has one of two, or both: `titan.parallelism.pipeline.runtime.TiedWeights`; or
        None."""

    @property
    def device(self) -> torch.device:
        """Where the rank computes."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters here under the names that they have in the whole model, each name once."""


def train_state_dict(state: TrainState) -> dict[str, Tensor]:
    """All tensors that a run needs to go on, by name: `model.NAME` and `optimizer.NAME.KEY`."""
    for stage in state.stages:
        data.part(stage)  # the optimizer's state goes by the parts
    parameters = dict(state.named_parameters())
    found = {f"model.{name}": stored(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, all zero as before a first update, unless it has some already.

    It makes it in its first update, so that one is done, with zero gradients and learning rate zero. A first step that
    is skipped would leave no state for a checkpoint otherwise, and fused SGD a momentum of chance bytes.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for value in (v for state in optimizer.state.values() for v in state.values()):
        if isinstance(value, Tensor):
            value.zero_()
