"""From a run and its world to what trains: the one place where the axes meet.

The order in which techniques are applied is written here once, for any model's declaration:
build on meta, precision, activation checkpointing, compile, sharding, initial weights, copies, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan import compile as compiling
from titan import memory, precision, rng
from titan.parallelism import data
from titan.parallelism.mesh import World
from titan.run import Recipe


class Losses(nn.Module):
    """A model and its head as one module that gives the summed loss: what data parallelism wraps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy (fp32 scalar) of tokens and targets, both int64 [rows, seq_len]."""
        loss: Tensor = self.model.head(self.model(tokens), targets)
        return loss


@dataclass(frozen=True)
class Engine:
    """What computes a step on this rank.

    Attributes:
        model: the model whose parameters are trained, under their own names.
        losses: the model with its head, and with whatever sums gradients of copies.
        optimizer: over the model's parameters.
    """

    model: Any
    losses: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, tokens: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Run micro-batch after micro-batch forward and backward; gradients are complete after the last.

        Args:
            tokens, targets: int64 [microbatches, rows, seq_len] on this rank's device.
            scale: what each token's loss counts in the gradient: 1 / (tokens of the global batch).

        Returns:
            This rank's summed loss, an fp32 scalar on its device.
        """
        total = torch.zeros((), device=tokens.device)
        for i in range(len(tokens)):
            with data.defer(self.losses, self.model, last=i == len(tokens) - 1):
                loss = self.losses(tokens[i], targets[i])
                (loss * scale).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's summed loss on [microbatches, rows, seq_len], without gradients."""
        model = self.model
        losses = [model.head(model(x), y) for x, y in zip(tokens, targets, strict=True)]
        return torch.stack(losses).sum()

    def gradients(self) -> list[Tensor]:
        """The gradients that there are, in the order of the parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def assemble(recipe: Recipe, world: World, note: Callable[[str], None] = lambda line: None) -> Engine:
    """Build what trains `recipe` on this rank.

    Args:
        recipe: the choices.
        world: the ranks and their mesh.
        note: told each transformation as it is done.
    """
    with torch.device("meta"):
        model: Any = recipe.model.build()
    note(f"built on meta: {recipe.model.parameters():,} parameters")
    precision.apply(model, recipe.precision)
    memory.apply(model.blocks(), recipe.memory)
    note(f"precision {recipe.precision.compute}, activation checkpointing {recipe.memory.checkpointing}")
    compiling.apply(model.blocks(), recipe.compile)
    note(f"compile {recipe.compile.scope}")
    initial = model.initial()
    if world.layout.shard > 1:
        mesh = world.dimensions("replicate", "shard")
        data.shard(model, mesh, recipe.precision.dtype, recipe.parallelism.reshard)  # type: ignore[arg-type]
        note(f"sharded over {world.layout}")
    rng.materialise(model, initial, recipe.training.seed, world.device)
    note(f"initial weights from seed {recipe.training.seed} on {world.device}")
    losses: nn.Module = Losses(model)
    copies = world.dimensions("replicate")
    if world.layout.shard == 1 and copies is not None:
        losses = data.replicate(losses, copies)
        note(f"copied over {world.layout}")
    return Engine(model, losses, recipe.optimizer.build(model.parameters()))
