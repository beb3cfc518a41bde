"""Save and load a run's state with torch.distributed.checkpoint.

Every rank takes part: each writes the parts of the tensors that it holds; once all have, rank 0 writes the manifest
that makes the checkpoint count and takes away what is older than the last `checkpoint.keep`. Tensors go by the model's
own parameter names, so a checkpoint knows nothing of the layout that saved it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titan.checkpoint import manifest
from titan.checkpoint.manifest import Manifest
from titan.engine import Engine
from titan.parallelism import data
from titan.parallelism.mesh import World
from titan.settings import Refusal, show


class Manager:
    """The checkpoints of one run, seen from one rank."""

    def __init__(self, directory: Path, keep: int, science_id: str, engine: Engine, world: World) -> None:
        self.directory, self.keep, self.science_id = directory, keep, science_id
        self.engine, self.world = engine, world

    def save(self, step: int, position: dict[str, Any]) -> Path:
        """Save the state after `step` updates and the data's `position`; all ranks call it together.

        Returns:
            The checkpoint's folder.
        """
        folder = manifest.folder_of(self.directory, step)
        if self.world.speaks:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed save may have left
            folder.mkdir(parents=True)
        self.world.barrier()
        with _quietly():
            save(state_of(self.engine), checkpoint_id=folder, no_dist=self.world.place.size == 1)
        if self.world.speaks:
            layout = self.world.layout.degrees()
            manifest.write(folder, Manifest(step, position, self.science_id, layout))
            self._prune()
        self.world.barrier()
        return folder

    def load(self, folder: Path) -> None:
        """Load a checkpoint, whatever layout saved it; all ranks call it together.

        The optimizer must have its state already (`prime`).

        Raises:
            Refusal: when it lacks a tensor, or has it in another shape.
        """
        state = state_of(self.engine)
        _compare(state, folder)
        with _quietly():
            load(state, checkpoint_id=folder, no_dist=self.world.place.size == 1)
        if self.engine.twins is not None:
            self.engine.twins.align(self.engine.optimizer)

    def _prune(self) -> None:
        for folder in manifest.complete(self.directory)[: -self.keep]:
            (folder / manifest.NAME).unlink()  # first: it stops to count before it is incomplete
            shutil.rmtree(folder, ignore_errors=True)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """All tensors that a run needs to go on, by name: `model.NAME` and `optimizer.NAME.KEY`."""
    for stage in engine.stages:
        data.part(stage)  # the optimizer's state goes by the parts
    parameters = dict(engine.named_parameters())
    state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def _compare(state: dict[str, Tensor], folder: Path) -> None:
    """Refuse a checkpoint of another model or optimizer: a fork may ask for one."""
    saved: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        shape = tuple(saved[name].size) if name in saved else None
        if shape != tuple(tensor.shape):
            found = f"has {name} in the shape {show(shape)}" if shape is not None else f"has no {name}"
            wanted = f"this run has it in the shape {show(tuple(tensor.shape))}"
            raise Refusal(
                f"checkpoint.resume={folder}: was saved with another model or optimizer: it {found}, and {wanted}; "
                "give the model and optimizer of the run that saved it."
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def prime(optimizer: torch.optim.Optimizer) -> None:
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
