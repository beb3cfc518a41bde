"""What a save compares between replicas before it writes: all that it saves, buffers, and the position in the data.

Randomness is a function of seed and step, so that ranks have no state of it. A tensor of which it is not known which
ranks must have the same is an error, when a run starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from titan.checkpoint.manifest import Manifest
from titan.checkpoint.state import TrainState
from titan.errors import RunError
from titan.parallelism.mesh import World
from titan.parallelism.replicas import ReplicaDifference, find_difference, find_replicas
from titan.precision.low_precision import unwrap_tensor

POSITION = "the step and the position in the data"


@dataclass
class Compared:
    """This rank's tensors; see `titan.parallelism.replicas.find_difference`."""

    tensors: dict[str, Tensor]
    stages: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)


def compare_replicas(
    train_state: TrainState, world: World, state: Mapping[str, Tensor], manifest: Manifest
) -> ReplicaDifference | None:
    """Return the first difference between replicas of what is saved; all ranks call it together."""
    compared = collect_compared(state, train_state)
    position = json.dumps([manifest.step, manifest.tokens, manifest.data, manifest.run_id], sort_keys=True)
    digest = int.from_bytes(blake2b(position.encode(), digest_size=8).digest(), "little", signed=True)
    compared.tensors[POSITION], compared.stages[POSITION] = torch.tensor(digest), "all"
    return find_difference(compared.tensors, world, compared.stages, compared.copies)


def collect_compared(state: Mapping[str, Tensor], train_state: TrainState) -> Compared:
    """Return what is compared of a state: its tensors, and buffers, which are not all saved."""
    compared = Compared(dict(state))
    _add_tied(compared, train_state)
    for index, stage in enumerate(train_state.stages):
        for name, buffer in stage.named_buffers():
            if name.count(".") > 1:  # of a module that only some stages have
                compared.tensors[f"buffer.{index}.{name}"] = buffer
                continue
            key = f"buffer.{name}"
            (compared.tensors if index == 0 else compared.copies)[key] = buffer
            compared.stages[key] = "all"
    return compared


def _add_tied(compared: Compared, train_state: TrainState) -> None:
    """Mark a tied weight that both ends of a pipeline have, with its optimizer state."""
    tied = train_state.tied_weights
    if tied is None:
        return
    parameter = tied.first if tied.first is not None else tied.last
    name = next(name for name, p in train_state.named_parameters() if p is parameter)
    prefix = f"optimizer.{name}."
    names = [key for key in compared.tensors if key == f"model.{name}" or key.startswith(prefix)]
    compared.stages |= dict.fromkeys(names, "tied")
    if tied.first is not None and tied.last is not None:
        second = train_state.optimizer.state.get(tied.last, {})
        compared.copies |= {
            key: second[key.removeprefix(prefix)] if key.startswith(prefix) else unwrap_tensor(tied.last)
            for key in names
        }


def describe_compared(state: Mapping[str, Tensor], train_state: TrainState, world: World) -> str:
    """Return how much of a state has replicas, in one line; empty with one rank.

    Raises:
        RunError: for a tensor of which it is not known which ranks must have the same.
    """
    if world.rank_info.world_size == 1:
        return ""
    compared = collect_compared(state, train_state)
    tensors, stages = compared.tensors, compared.stages
    try:
        replicated = [n for n, t in tensors.items() if find_replicas(n, t, world).groups or n in stages]
    except RunError as error:
        raise RunError(f"{str(error).removesuffix('.')}; give checkpoint.fingerprints=false.") from error
    return (
        f"each save compares replicas of {len(replicated)} of {len(tensors)} tensors; "
        "of the others each part exists once"
    )
