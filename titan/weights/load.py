"""Load weights into a built model, on any layout: each rank reads the slices of its parameters, and casts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan.checkpoint.coordinator import CoordinationError, Coordinator, find_reason
from titan.checkpoint.state import TrainState
from titan.config.settings import format_setting
from titan.errors import ConfigError, RunError
from titan.weights.formats import open_weights
from titan.weights.interface import Weights

_HEAD, _EMBEDDING = "head.weight", "tok_embeddings.weight"


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
    failure: tuple[bool, str] | None = None
    try:
        for name, tensor in state.items():
            _read_shard(tensor.detach(), weights, sources[name])
            advance()
    except Exception as error:
        failure = isinstance(error, ConfigError), find_reason(error)
    failures = [failure]
    if not no_dist:
        failures *= dist.get_world_size()
        dist.all_gather_object(failures, failure)
    reasons = [(rank, *failed) for rank, failed in enumerate(failures) if failed is not None]
    for _, is_config_error, reason in reasons:
        if is_config_error:
            raise ConfigError(reason)
    for rank, _, reason in reasons:
        where = f"rank {rank}: " if rank or len(reasons) > 1 else ""
        raise RunError(f"{label}: can't be read: {where}{reason}; fix this, or give other weights.")


def _read_shard(tensor: Tensor, weights: Weights, source: str) -> None:
    offset, local = [0] * tensor.dim(), tensor
    if isinstance(tensor, DTensor):
        _, found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offset, local = list(found), tensor.to_local()
    if local.numel():
        local.copy_(weights.read(source, offset, list(local.shape)))  # casts, too


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
    """Load the weights at `path` and leave the optimizer unchanged; all ranks call it together."""
    parameters = {name: parameter.detach() for name, parameter in state.named_weights()}
    try:
        advance = coordinator.activity.record_progress
        coordinator.run_all(lambda: load_weights(parameters, open_weights(path), no_dist=True, advance=advance))
    except CoordinationError as error:
        raise (ConfigError if error.is_config_error else RunError)(str(error)) from error
    if state.tied_weights is not None:
        state.tied_weights.align(state.optimizer)
