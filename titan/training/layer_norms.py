"""Norms of a model's layers over all ranks: of gradients, weights and updates, the same numbers on every layout.

A layer is the embedding, a block, the final norm or the head. Each rank sums the squares of what it holds, divided by
the number of ranks that hold the same, in float64; one all-reduce over all ranks completes the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from titan.parallelism.mesh import World
from titan.parallelism.norms import count_replicas, sum_row_squares
from titan.training.train_step import TrainStep


def get_layer_name(name: str) -> str:
    """Return the layer of a parameter or module: layers.3 for layers.3.attention.wq.weight."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def list_layers(train_step: TrainStep) -> tuple[str, ...]:
    """Return all layers of the model, in the order of the forward pass; all ranks call it together."""
    rank_layers = [
        get_layer_name(name) for stage in train_step.stages for name, _ in stage.model.named_modules() if name
    ]
    layers = {name for part in train_step.world.all_gather_object(rank_layers) for name in part if name != "layers"}
    return tuple(sorted(layers, key=_build_sort_key))


def _build_sort_key(layer: str) -> tuple[int, int, str]:
    """Return a key that sorts layers by the forward pass: the embedding, the blocks, norm, head."""
    prefix, _, number = layer.partition(".")
    if prefix == "layers":
        return 1, int(number), ""
    return 0 if "emb" in layer else 3 if layer == "head" else 2, 0, layer


def iterate_parameters(train_step: TrainStep) -> Iterator[tuple[str, nn.Parameter]]:
    """Return this rank's parameters with their names; of a tied weight with two replicas only the embedding's."""
    tied = train_step.tied_weights
    replica = None if tied is None or tied.last is tied.first else tied.last
    return ((name, p) for name, p in train_step.named_parameters() if p is not replica)


def sum_squares(parts: Iterable[tuple[str, Tensor, Tensor]], layers: Sequence[str], world: World) -> Tensor:
    """Return this rank's part of the squares' sum of each layer, float64 [layers] on its device.

    Args:
        parts: the name of each parameter, the parameter, and what this rank has of it or of its gradient.
        layers: see `list_layers`.
    """
    sums = torch.zeros(len(layers), dtype=torch.float64, device=world.device)
    layer_indices = {name: i for i, name in enumerate(layers)}
    for name, parameter, part in parts:
        square = sum_row_squares(part).sum() / count_replicas(parameter, world)
        sums[layer_indices[get_layer_name(name)]] += square.to(world.device)
    return sums
