"""What a hook knows and may do: the argument of all its methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan.parallelism import norms
from titan.parallelism.mesh import World
from titan.run.run import Run

Parameters = Callable[[], Iterator[tuple[str, nn.Parameter]]]


class Context:
    """A hook's view of the run on this rank; the same object at every moment.

    Attributes:
        run: all settings.
        directory: the run's.
        rank: this rank.
        world_size: the number of ranks.
        device: of this rank.
        step: the step of the moment; 0 before the first one.
        figures: what is known at the moment; docs/extending.md lists it.
    """

    def __init__(self, name: str, run: Run, world: World, parameters: Parameters) -> None:
        """Make the context of the hook `name`; `parameters` yields those of this rank."""
        self.run, self.rank, self.world_size = run, world.rank_info.rank, world.rank_info.world_size
        self.directory = Path(run.directory)
        self.device, self.step, self.figures = world.device, 0, dict[str, Any]()
        self._name, self._world, self._parameters = name, world, parameters
        self._names_of_all: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._logged: dict[str, float | Tensor] = {}
        self._stop_reason: str | None = None
        self._waits_for_device = True

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with their names in the whole model; parts of them are DTensors."""
        return self._parameters()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Return the gradients of this rank's parameters by their names.

        Raises:
            RuntimeError: at another moment than `before_optimizer`, when there are none.
        """
        if self._waits_for_device:
            raise RuntimeError("named_gradients() has gradients in before_optimizer only")
        return ((name, parameter.grad) for name, parameter in self._parameters() if parameter.grad is not None)

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the 2-norm of each whole tensor, the same on every layout; all ranks call it together.

        Args:
            tensors: this rank's parameters or gradients, or tensors that are distributed as they are, by name.

        Returns:
            Scalars on the device, also for names that only other ranks have.
        """
        rank_names = tuple(tensors)
        if rank_names not in self._names_of_all:
            names_by_rank = self._world.all_gather_object(rank_names)
            self._names_of_all[rank_names] = tuple(dict.fromkeys(name for names in names_by_rank for name in names))
        return norms.compute_norms(tensors, self._names_of_all[rank_names], self._world)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; all ranks call it together."""
        return self._world.all_reduce(tensor.detach().clone())

    def log(self, name: str, value: float | Tensor) -> None:
        """Record an own metric of this step, as hooks/HOOK/NAME; what rank 0 logs is recorded.

        Before the optimizer a scalar tensor is copied without waiting for the device.
        """
        if isinstance(value, Tensor):
            self._logged[name] = value.item() if self._waits_for_device else _start_copy(value)
        else:
            self._logged[name] = float(value)

    def stop(self, reason: str) -> None:
        """Ask to end the run: any rank may, and all end it together within two more steps, with a checkpoint."""
        self._stop_reason = reason


def _start_copy(value: Tensor) -> Tensor:
    """Return a scalar's copy on the host, which is complete once the device has reached the end of the step."""
    value = value.detach().to(torch.float64, copy=True)
    if not value.is_cuda:
        return value
    return torch.empty((), dtype=torch.float64, pin_memory=True).copy_(value.reshape(()), non_blocking=True)
