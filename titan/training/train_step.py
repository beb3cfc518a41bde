"""The computation of a step on a rank, for all layouts: forward, backward, evaluation, gradients and their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from titan.compile.backend import GraphLabel
from titan.model.layers import IGNORED
from titan.model.loss_terms import join_with_gradient, weigh_figures
from titan.parallelism import data, norms, tensor
from titan.parallelism.mesh import RunContext
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import count_replicas
from titan.parallelism.pipeline.runtime import Pipeline, TiedWeights
from titan.precision.low_precision import Float8Scales
from titan.training.expert_load import ExpertLoad


class ModelStage(nn.Module):
    """A model, or a pipeline stage's part of it, as one module from tokens to the summed loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Any:
        """Compute this part of the model.

        Args:
            x: int64 tokens [rows, seq_len], or the previous stage's hidden states.
            targets: int64 [rows, seq_len].
            positions: see `titan.model.decoder.DecoderModel.forward`.
            keys: int64 [rows], for a model that draws random numbers (`titan.model.schema.Decoder.uses_keys`).

        Returns:
            Hidden states; from the last stage the summed loss (an fp32 scalar), or without targets the logits.
        """
        return self._compute((x, positions, document_ids), {} if keys is None else {"keys": keys}, targets)

    def _compute(self, inputs: tuple[Tensor | None, ...], drawn: dict[str, Tensor], targets: Tensor | None) -> Any:
        hidden = self.model(*inputs, **drawn)
        return hidden if self.model.head is None else self.model.head(hidden, targets)

    def iterate_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with their names in the whole model; a tied weight's replica has the original's."""
        return ((self.model.aliases.get(name, name), p) for name, p in self.model.named_parameters())


class StageWithLosses(ModelStage):
    """A stage of a model whose blocks return loss terms or counts, of tokens whose targets count in the loss."""

    def __init__(self, model: Any, tensor_rank: int, sequence_parallel_size: int = 1) -> None:
        """Take the model, this tensor rank, and into how many parts tensor ranks split a row between matmuls."""
        super().__init__(model)
        self.tensor_rank, self.sequence_parallel_size = tensor_rank, sequence_parallel_size

    @staticmethod
    def count_block_sums(model: Any) -> int:
        """Return the number of figures of a model's blocks: their loss terms and what they count."""
        return len(model.losses) + int(model.config.layers * model.counted)

    def _compute(self, inputs: tuple[Tensor | None, ...], drawn: dict[str, Tensor], targets: Tensor | None) -> Any:
        """Compute this part of the model; see `ModelStage.forward`.

        Returns:
            Where gradients are computed, of the last stage a vector, see `titan.model.loss_terms.join_with_gradient`:
            the loss, then the sums of its terms and the expert counts of all layers. Of other stages hidden states, the
            terms' sum times their coefficients, and the same sums and counts.
        """
        if targets is None or not torch.is_grad_enabled():
            return super()._compute(inputs, drawn, targets)
        valid = targets.chunk(self.sequence_parallel_size, 1)[self.tensor_rank % self.sequence_parallel_size] != IGNORED
        hidden, term_values, counts = self.model(*inputs, valid, **drawn)
        block_sums = torch.cat([term_values.where(valid, 0).sum((1, 2)), counts.flatten()])
        weighted_terms = weigh_figures(block_sums, list(self.model.losses.values()))
        if self.model.head is None:
            return hidden, weighted_terms, block_sums.detach()
        return join_with_gradient(self.model.head(hidden, targets).reshape(-1), block_sums, weighted_terms)


@dataclass(eq=False)
class GradAccumulation:
    """Runs one stage on one micro-batch after another; gradients are complete after the last.

    `wrapped` is the stage, in DDP where it has replicas; `unsharded_gradients`: FSDP accumulates whole ones.
    """

    stage: nn.Module
    wrapped: nn.Module
    unsharded_gradients: bool = False
    advance: Callable[[], None] = lambda: None

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """Run forward and backward, and return this rank's summed loss.

        With loss terms it is a vector: cross-entropy and the sums of the terms. As `Pipeline.backward`, whose ranks
        without the last stage return zero.
        """
        count, total = len(rows.tokens), torch.zeros((), device=rows.tokens.device)
        for i in range(count):
            with data.defer_gradient_sync(
                self.wrapped, is_last=i == count - 1, accumulates_whole=self.unsharded_gradients
            ):
                loss = self.wrapped(*rows.select_microbatch(i))
                loss.backward(torch.full_like(loss, scale))
            total = total + loss.detach()
            self.advance()
        return total

    def repeat_forward(self, rows: Microbatches) -> None:
        """Run forward of one micro-batch with the code and in the mode of training, and drop the result."""
        without_sync = self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()
        with without_sync, torch.enable_grad():
            self.wrapped(*rows.select_microbatch(0))

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """Run forward, and return the output for each micro-batch; of a pipeline only where the last stage is."""
        return [self.stage(*rows.select_microbatch(i)) for i in range(len(rows.tokens))]


MicrobatchRunner = GradAccumulation | Pipeline
"""Runs micro-batches through the stages of this rank."""


class StepWatch:
    """Watches a trainer's steps from outside, as replays and proofs do; this one sees nothing."""

    def compute_gradients(self, train_step: TrainStep, rows: Microbatches, scale: float) -> Tensor:
        """Leave a step's gradients, and return its loss, as `TrainStep.backward` does."""
        return train_step.backward(rows, scale)

    def see_gradients(self) -> None:
        """Look at a step's complete gradients, before they are clipped."""


@dataclass(frozen=True)
class TrainStep:
    """The model's part on this rank, the optimizer, and what runs a step on them.

    Attributes:
        stages: the stages of this rank, in order; one without a pipeline.
        runner: runs micro-batches through them.
        optimizer: over their parameters.
        world: the ranks.
        scales: updated after the weights, where some are gathered in float8.
        token_positions: gives this rank's positions of a row, int64 on its device, from the row's length; None where
            ranks have whole rows.
        tied_weights: a tied weight of which this rank has one replica or both; see
            `titan.parallelism.pipeline.runtime.TiedWeights`.
        seq_len_multiple: the number that the length of a row must be a multiple of.
        notes: what was applied to the model, in order.
        terms: names of the loss terms: of the logits, then of the model's blocks.
        num_block_sums: how many of the last figures of the loss each tensor rank sums over its own tokens.
        expert_load: what is done with the counts of experts; None for a model without.
        graph_labels: what is compiled; see `titan.compile.backend`.
    """

    stages: tuple[ModelStage, ...]
    runner: MicrobatchRunner
    optimizer: torch.optim.Optimizer
    world: RunContext
    scales: Float8Scales | None = None
    token_positions: Callable[[int], Tensor] | None = None
    tied_weights: TiedWeights | None = None
    seq_len_multiple: int = 1
    notes: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    num_block_sums: int = 0
    expert_load: ExpertLoad | None = None
    graph_labels: tuple[GraphLabel, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def num_expert_counts(self) -> int:
        """How many of the last figures of the loss are counts of experts."""
        return self.expert_load.num_counts if self.expert_load is not None else 0

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """Run forward and backward for every micro-batch; afterwards gradients are complete and reduced over ranks.

        Args:
            rows: whole rows, with targets.
            scale: the factor of each token's loss: 1 / (tokens of the global batch).

        Returns:
            This rank's summed loss, an fp32 scalar on its device; the sum over all ranks is the global batch's. With
            `terms` or `expert_load` a vector: cross-entropy, the sums of the terms, and the counts of experts.
        """
        loss = self.runner.backward(self._select_local_rows(rows), scale)
        if self.tied_weights is not None:
            self.tied_weights.sum_gradients()
        if (ranks := self.world.get_group("tensor")) is not None:
            tensor.sum_shared_gradients((m for stage in self.stages for m in stage.modules()), ranks, self.device)
        if self.world.counts_loss:
            return loss
        rank_sums = torch.zeros_like(loss)  # the loss is a replica; the loss terms are of the rank's own tokens
        if self.num_block_sums:
            rank_sums[-self.num_block_sums :] = loss[-self.num_block_sums :]
        return rank_sums

    @torch.no_grad()
    def evaluate(self, rows: Microbatches) -> Tensor:
        """Return this rank's summed loss on whole rows, without gradients; see `backward`.

        A vector with the sums of the model's `evaluation_figures` behind it, where it has any.
        """
        losses = []
        for microbatch in self._select_local_rows(rows).iterate_microbatches():
            losses += self.runner.forward(microbatch)
            self.world.activity.record_progress()
        figures = len(self.stages[0].model.config.evaluation_figures)
        if not losses or not self.world.counts_loss:
            return torch.zeros((1 + figures,) if figures else (), device=rows.tokens.device)
        return torch.stack(losses).sum(0)

    def repeat_forward(self, rows: Microbatches) -> None:
        """Run forward of one micro-batch of whole rows as in training; gradients stay as they are.

        Raises:
            RuntimeError: with a pipeline.
        """
        if not isinstance(self.runner, GradAccumulation):
            raise RuntimeError("a pipeline does not run forward alone as it does in training")
        self.runner.repeat_forward(self._select_local_rows(rows))

    @torch.no_grad()
    def compute_logits(self, tokens: list[int]) -> Tensor:
        """Return the logits [vocab] (fp32) of the token after `tokens`, on every rank; all ranks call it together."""
        length = -(-len(tokens) // self.seq_len_multiple) * self.seq_len_multiple
        row = torch.zeros(length, dtype=torch.int64, device=self.world.device)
        row[: len(tokens)] = torch.tensor(tokens)  # causal attention does not see the padding behind them
        local = self._select_local_rows(Microbatches(row[None, None]))
        positions = local.positions
        last = len(tokens) - 1 if positions is None else (positions == len(tokens) - 1).nonzero().flatten()
        out = torch.zeros(self.stages[0].model.config.vocab, device=self.world.device)
        for logits in self.runner.forward(local):
            if self.world.counts_loss and self.world.data_shard.rank == 0:
                out += logits[0, last].float().sum(0) if positions is not None else logits[0, last].float()
        return self.world.all_reduce(out)

    def list_gradients(self) -> list[Tensor]:
        """Return the gradients that exist, in the order of the parameters."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def sum_gradient_squares(self) -> Tensor:
        """Return this rank's part of the sum of squares of all gradients, a float64 scalar on its device."""
        replica = self.tied_weights.last if self.tied_weights is not None else None  # counted as the embedding's
        gradients = (p.grad for p in self.parameters() if p.grad is not None and p is not replica)
        return norms.sum_squares(((g, count_replicas(g, self.world)) for g in gradients), self.device)

    def compute_norm(self) -> Tensor:
        """Return the 2-norm of all gradients, an fp32 scalar that is equal on every rank and to one device's."""
        return self.world.all_reduce(self.sum_gradient_squares()).sqrt().float()

    def _select_local_rows(self, rows: Microbatches) -> Microbatches:
        """Return this rank's tokens of whole rows (context parallelism)."""
        return rows if self.token_positions is None else rows.select_tokens(self.token_positions(rows.tokens.shape[-1]))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the whole model, each name once."""
        names: set[str] = set()
        for stage in self.stages:
            for name, parameter in stage.iterate_global_parameters():
                if name not in names:
                    names.add(name)
                    yield name, parameter

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's weights with their names in the whole model: parameters, and the routers' biases."""
        yield from self.named_parameters()
        for stage in self.stages:
            parameters = dict(stage.model.named_parameters())
            yield from ((name, weight) for name, weight in stage.model.named_weights() if name not in parameters)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a step leaves for the next one beside weights and optimizer state, with unique names."""
        for stage in self.stages:
            for name, router in stage.model.routers().items():
                yield f"{name}.load", router.load

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters on this rank."""
        return (p for stage in self.stages for p in stage.parameters())
