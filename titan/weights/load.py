"""Load weights into a built model, on any layout.

torch.distributed.checkpoint plans which rank needs which slice of which tensor; it sees `Weights` as a storage with one
chunk per tensor. Each rank reads only the slices of its parameters and casts them to the parameters' dtypes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titan.checkpoint.coordinator import CoordinationError, Coordinator, find_reason
from titan.checkpoint.reader import ProgressLoadPlanner as Planner
from titan.checkpoint.state import TrainState
from titan.config.settings import format_setting
from titan.errors import ConfigError, RunError
from titan.weights.formats import open_weights
from titan.weights.interface import Weights, describe_whole_tensor

_HEAD, _EMBEDDING = "head.weight", "tok_embeddings.weight"


class WeightsReader(StorageReader):
    """Adapts `Weights` to the storage interface of torch.distributed.checkpoint."""

    def __init__(self, weights: Weights, sources: Mapping[str, str]) -> None:
        """Take the weights and, for each parameter's name, its name in the weights."""
        self.weights, self.sources = weights, sources

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return metadata with one chunk per tensor."""
        weights = self.weights
        return Metadata(
            {name: describe_whole_tensor(weights.shapes[s], weights.dtypes[s]) for name, s in self.sources.items()}
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the slices in this rank's plan, one at a time."""
        for item in plan.items:
            source = self.sources[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.weights.read(source, item.storage_offsets, item.lengths))  # casts, too
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any id: it is not used."""
        return True


def load_weights(
    state: Mapping[str, Tensor],
    weights: Weights,
    no_dist: bool = False,
    setting: str = "checkpoint.weights",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Load parameters in place; all ranks call it together, unless `no_dist`.

    If the weights have a tied head and the model doesn't, the head is a copy of the embedding. If one rank has both
    copies of a tied weight, call `TiedWeights.align` afterwards.

    Args:
        state: the parameters of this rank by their names in titan's module; DTensors if they are sharded.
        no_dist: load without communication; the caller shares errors between ranks.
        setting: the name of the user's setting, for messages; empty for a command's first word.
        advance: called after each tensor.

    Raises:
        ConfigError: when a parameter is missing or has another shape, or a file is broken.
        RunError: when it can't be read for another reason.
    """
    label = format_setting(setting, weights.path)
    sources = _map_sources(state, weights, label)
    plain = {name: tensor.detach() for name, tensor in state.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader, planner = WeightsReader(weights, sources), Planner(advance)
            load(plain, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, ConfigError):
                raise cause from None
        # torch's error is not an Exception, so the handlers that end a run orderly would miss it
        raise RunError(f"{label}: can't be read: {find_reason(error)}; fix this, or give other weights.") from error


def _map_sources(state: Mapping[str, Tensor], weights: Weights, label: str) -> dict[str, str]:
    """Return each parameter's name in the weights."""
    is_head_copied = weights.model.tied and _HEAD not in weights.shapes
    sources = {name: _EMBEDDING if name == _HEAD and is_head_copied else name for name in state}
    for name, source in sources.items():
        if source not in weights.shapes:
            raise ConfigError(f"{label}: lacks {name}, which the model has; give weights of this model.")
        stored_shape, expected_shape = weights.shapes[source], tuple(state[name].shape)
        if tuple(stored_shape) != expected_shape:
            raise ConfigError(
                f"{label}: {name} has the shape {list(stored_shape)}, and in the model {list(expected_shape)}; give "
                "weights of this model."
            )
    return sources


def load_initial_weights(state: TrainState, path: str, coordinator: Coordinator) -> None:
    """Load the weights at `path` and leave the optimizer unchanged; all ranks call it together.

    Raises:
        ConfigError: when the weights are of another model, or a file is broken.
    """
    parameters = {name: parameter.detach() for name, parameter in state.named_weights()}
    try:
        advance = coordinator.activity.record_progress
        coordinator.run_all(lambda: load_weights(parameters, open_weights(path), no_dist=True, advance=advance))
    except CoordinationError as error:
        raise (ConfigError if error.is_config_error else RunError)(str(error)) from error
    if state.tied_weights is not None:
        state.tied_weights.align(state.optimizer)
