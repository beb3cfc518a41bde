"""Weights into an assembled model, on any layout.

torch.distributed.checkpoint plans which rank needs which part of which tensor: to it `Weights` are a storage with one
chunk a tensor. Each rank then reads the parts that it holds and no others, and casts them to its parameters' types.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titan.checkpoint.coordinator import reason
from titan.errors import ConfigError, RunError
from titan.weights.interface import Weights

_HEAD, _EMBEDDING = "head.weight", "tok_embeddings.weight"


class WeightsReader(StorageReader):
    """`Weights` as torch.distributed.checkpoint reads a storage."""

    def __init__(self, weights: Weights, sources: Mapping[str, str]) -> None:
        """Take the weights and, for each name that is asked for, the name that they have it under."""
        self.weights, self.sources = weights, sources

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Each tensor as one chunk."""
        return Metadata({name: self._tensor(source) for name, source in self.sources.items()})

    def _tensor(self, source: str) -> TensorStorageMetadata:
        size = torch.Size(self.weights.shapes[source])
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(self.weights.dtypes[source]), size, [chunk])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan of this rank asks for, a part at a time."""
        for item in plan.items:
            source = self.sources[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.weights.read(source, item.storage_offsets, item.lengths))  # casts, too
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any: it is not used."""
        return True


def load_weights(
    state: Mapping[str, Tensor],
    weights: Weights,
    no_dist: bool = False,
    setting: str = "checkpoint.weights",
) -> None:
    """Fill parameters in place; all ranks call it together, unless each is to read for itself.

    A head that the weights lack, because theirs is the embedding's weight, is filled with a copy of that. Where one
    rank holds both copies of a tied weight, `Engine.tied_weights.align` has to follow.

    Args:
        state: the parameters of this rank by their names in titan's module, DTensors where ranks hold parts.
        weights: what to fill them with.
        no_dist: whether other ranks need not hear of an error: it is the only one, or tells them itself.
        setting: what the user gave the weights as, for messages.

    Raises:
        ConfigError: when a parameter is missing or has another shape, or a file turns out to be broken.
        RunError: when it can't be read for another reason.
    """
    sources = _sources(state, weights, f"{setting}={weights.path}")
    plain = {name: tensor.detach() for name, tensor in state.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(plain, storage_reader=WeightsReader(weights, sources), no_dist=no_dist)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, ConfigError):
                raise cause from None
        # torch's own error is no Exception, and those that end a run in order would not see it
        raise RunError(
            f"{setting}={weights.path}: can't be read: {reason(error)}; mend that, or give others."
        ) from error


def _sources(state: Mapping[str, Tensor], weights: Weights, label: str) -> dict[str, str]:
    """The name under which the weights have each parameter."""
    copied = weights.model.tied and _HEAD not in weights.shapes
    sources = {name: _EMBEDDING if name == _HEAD and copied else name for name in state}
    for name, source in sources.items():
        if source not in weights.shapes:
            raise ConfigError(f"{label}: lacks {name}, which the model has; give weights of this model.")
        found, wanted = weights.shapes[source], tuple(state[name].shape)
        if tuple(found) != wanted:
            raise ConfigError(f"{label}: {name} is {list(found)}, and in the model {list(wanted)}; give this model's.")
    return sources
