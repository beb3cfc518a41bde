"""Weights that are evaluated in place of the parameters: the optimizer's, and averages over steps or checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from titan.checkpoint.state import AVERAGE
from titan.optimizer.evaluation_weights import HasEvaluationWeights, compute_evaluation_weights
from titan.parallelism import data
from titan.parallelism.norms import local_tensor
from titan.precision.low_precision import unwrap_tensor
from titan.training.train_step import TrainStep


class MovingAverage:
    """The exponential moving average of the weights, float32 and sharded as they are.

    It is kept beside the optimizer's own state, so checkpoints save it, and any layout restores it.
    """

    def __init__(self, train_step: TrainStep, decay: float) -> None:
        """Allocate it; `copy_weights` gives it values."""
        self.train_step, self.decay = train_step, decay
        state = train_step.optimizer.state
        for parameter in _list_parameters(train_step):
            state[parameter][AVERAGE] = torch.zeros_like(unwrap_tensor(parameter), dtype=torch.float32)

    def copy_weights(self) -> None:
        """Begin at the present weights."""
        for average, weight in self._iterate_pairs():
            average.copy_(weight)

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        """Add the weights after a step, unless the step was `bad` and left them as they were."""
        share: Tensor | None = None
        for average, weight in self._iterate_pairs():
            if share is None or share.device != average.device:
                share = ((~bad).float() * (1 - self.decay)).to(average.device)
            average.lerp_(weight.float(), share)

    def swap_in(self) -> AbstractContextManager[None]:
        """Replace the weights by their average while a block runs; all ranks call it together."""
        return replace_weights(self.train_step, [average for average, _ in self._iterate_pairs()])

    def _iterate_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this rank's shards of the average and of the weights that are evaluated."""
        averages = (
            local_tensor(self.train_step.optimizer.state[p][AVERAGE]) for p in _list_parameters(self.train_step)
        )
        return zip(averages, _iterate_evaluation_weights(self.train_step), strict=True)


def use_evaluation_weights(train_step: TrainStep) -> AbstractContextManager[None]:
    """Replace the weights by those that the optimizer evaluates, where it has others; all ranks call it together."""
    if not isinstance(train_step.optimizer, HasEvaluationWeights):
        return nullcontext()
    return replace_weights(train_step, list(_iterate_evaluation_weights(train_step)))


@contextmanager
def replace_weights(train_step: TrainStep, values: Sequence[Tensor]) -> Iterator[None]:
    """Replace this rank's shards of the weights while the block runs; all ranks call it together."""
    original_weights = [weight.clone() for weight in _list_weights(train_step)]
    _set_weights(train_step, values)
    try:
        yield
    finally:
        _set_weights(train_step, original_weights)


@torch.no_grad()
def average_weights(train_step: TrainStep, loads: Sequence[Callable[[], object]]) -> None:
    """Set the weights to the mean of those to evaluate after each of `loads`, summed in float32."""
    sums: list[Tensor] = []
    for load in loads:
        load()
        weights = [weight.float() for weight in _iterate_evaluation_weights(train_step)]
        sums = [a.add_(b) for a, b in zip(sums, weights, strict=True)] if sums else [w.clone() for w in weights]
    _set_weights(train_step, [total.div_(len(loads)) for total in sums])


@torch.no_grad()
def _set_weights(train_step: TrainStep, values: Sequence[Tensor]) -> None:
    for stage in train_step.stages:
        data.reshard_parameters(stage)  # or the next forward pass would use weights that are still gathered
    for weight, value in zip(_list_weights(train_step), values, strict=True):
        weight.copy_(value)
    if train_step.scales is not None:
        train_step.scales.update()


def _list_weights(train_step: TrainStep) -> list[Tensor]:
    return [local_tensor(unwrap_tensor(parameter)) for parameter in _list_parameters(train_step)]


def _iterate_evaluation_weights(train_step: TrainStep) -> Iterator[Tensor]:
    """Return this rank's shards of the weights that are evaluated, one after the other."""
    optimizer = train_step.optimizer
    if not isinstance(optimizer, HasEvaluationWeights):
        return iter(_list_weights(train_step))
    return (local_tensor(unwrap_tensor(compute_evaluation_weights(optimizer, p))) for p in _list_parameters(train_step))


def _list_parameters(train_step: TrainStep) -> list[nn.Parameter]:
    """Return the parameters as the optimizer has them: sharded, also where a forward pass left them gathered."""
    return [parameter for group in train_step.optimizer.param_groups for parameter in group["params"]]
