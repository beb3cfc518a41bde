"""What computes a step on a rank, whatever the layout: forward, backward, evaluation, and what gradients came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan.parallelism import data, grad_norm, tensor
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.pipeline.runtime import TiedWeights
from titan.precision.low_precision import Scales


class Stage(nn.Module):
    """A model, or the part of it that a stage of a pipeline has, as one module from tokens to the summed loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """What this part makes of its input.

        Args:
            x: int64 tokens [rows, seq_len], or the hidden states that the stage before gave.
            targets: int64 [rows, seq_len].
            positions, document_ids: see `titan.model.decoder.Decoder.forward`.

        Returns:
            Hidden states; of the last stage the summed loss (an fp32 scalar), or without targets the logits.
        """
        hidden: Tensor = self.model(x, positions, document_ids)
        return hidden if self.model.head is None else self.model.head(hidden, targets)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters here under the names that they have in the whole model; a copy has the original's."""
        return ((self.model.aliases.get(name, name), p) for name, p in self.model.named_parameters())


class MicrobatchRunner(Protocol):
    """How micro-batches go through the stages of this rank."""

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """Forward and backward; this rank's summed loss, zero where the last stage is elsewhere."""

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """Forward only: what the last stage gives, a micro-batch each; nothing where it is elsewhere."""


class GradAccumulation:
    """One stage, micro-batch after micro-batch; gradients are complete after the last."""

    def __init__(self, stage: nn.Module, wrapped: nn.Module, whole: bool = False) -> None:
        """Take the stage, the same with whatever sums the gradients of copies, and how FSDP accumulates gradients."""
        self.stage, self.wrapped, self.whole = stage, wrapped, whole

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """See `Runner`."""
        count, total = len(rows.tokens), torch.zeros((), device=rows.tokens.device)
        for i in range(count):
            with data.accumulating(self.wrapped, last=i == count - 1, whole=self.whole):
                loss = self.wrapped(*rows.at(i))
                (loss * scale).backward()
            total += loss.detach()
        return total

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """See `Runner`."""
        return [self.stage(*rows.at(i)) for i in range(len(rows.tokens))]


@dataclass(frozen=True)
class TrainStep:
    """What computes a step on this rank.

    Attributes:
        stages: the parts of the model that this rank holds, in order; one without a pipeline.
        runner: takes micro-batches through them.
        optimizer: over their parameters.
        world: the ranks.
        scales: to be updated after the weights are, where some are gathered in float8.
        places: this rank's places of a row, int64 on its device, for its length; None where ranks have whole rows.
        tied_weights: a tied weight of which this rank has one of two, or both; see
            `titan.parallelism.pipeline.runtime.TiedWeights`.
        multiple: rows have to be a multiple of so many tokens.
        notes: what was applied to the model, in order.
    """

    stages: tuple[Stage, ...]
    runner: MicrobatchRunner
    optimizer: torch.optim.Optimizer
    world: World
    scales: Scales | None = None
    places: Callable[[int], Tensor] | None = None
    tied_weights: TiedWeights | None = None
    multiple: int = 1
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """Run micro-batch after micro-batch forward and backward; gradients are complete afterwards.

        Args:
            rows: whole rows, with targets.
            scale: what each token's loss counts in the gradient: 1 / (tokens of the global batch).

        Returns:
            This rank's summed loss, an fp32 scalar on its device: over all ranks they add up to the whole.
        """
        loss = self.runner.backward(self._part(rows), scale)
        if self.tied_weights is not None:
            self.tied_weights.meet()
        for parameter in self.parameters():
            tensor.settle(parameter)
        return loss if self.world.counts_loss else torch.zeros_like(loss)

    @torch.no_grad()
    def evaluate(self, rows: Microbatches) -> Tensor:
        """This rank's summed loss on whole rows, without gradients; see `backward`."""
        losses = self.runner.forward(self._part(rows))
        if not losses or not self.world.counts_loss:
            return torch.zeros((), device=rows.tokens.device)
        return torch.stack(losses).sum()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """The logits [vocab] (fp32) of the token after `tokens`; every rank must call it, and every rank gets them."""
        row = torch.zeros(-(-len(tokens) // self.multiple) * self.multiple, dtype=torch.int64, device=self.world.device)
        row[: len(tokens)] = torch.tensor(tokens)  # what is filled up comes later: attention does not see it
        part = self._part(Microbatches(row[None, None]))
        positions = part.positions
        last = len(tokens) - 1 if positions is None else (positions == len(tokens) - 1).nonzero().flatten()
        out = torch.zeros(self.stages[0].model.config.vocab, device=self.world.device)
        share = self.world.share
        for logits in self.runner.forward(part):
            if self.world.counts_loss and share.rank == 0:
                out += logits[0, last].float().sum(0) if positions is not None else logits[0, last].float()
        return self.world.sum(out)

    def gradients(self) -> list[Tensor]:
        """The gradients that there are, in the order of the parameters."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def norm(self) -> Tensor:
        """The 2-norm of all gradients, the same on every rank as on one device."""
        double = self.tied_weights.last if self.tied_weights is not None else None
        counted = [p.grad for p in self.parameters() if p.grad is not None and p is not double]
        return grad_norm.total_norm(counted, self.world.device, self.world.group("pipeline"))

    def _part(self, rows: Microbatches) -> Microbatches:
        """This rank's part of whole rows."""
        return rows if self.places is None else rows.cut(self.places(rows.tokens.shape[-1]))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters here under the names that they have in the whole model, each name once."""
        seen: set[str] = set()
        for stage in self.stages:
            for name, parameter in stage.named():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters here."""
        return (p for stage in self.stages for p in stage.parameters())
