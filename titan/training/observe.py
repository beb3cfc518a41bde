"""What a step's activations are: statistics, samples, the loss of each token and the largest attention logits.

Hooks see the embedding, the final norm, each block and its direct parts: hidden states [rows, tokens, width]. A rank
may have some of the rows (data parallelism), of the tokens (context and sequence parallelism) or of the layers. Each
counts what no other rank counts, and rows of weight zero not at all, so that sums over ranks are the same on every
layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.debug.module_hooks import ModuleHooks, StageCall, find_compiled_parts
from titan.model.layers import IGNORED
from titan.model.masks import chunk_ids
from titan.numerics.differences import Key, Samples
from titan.parallelism import collectives
from titan.parallelism.norms import sum_row_squares
from titan.training.replay.observation import ActivationTotals, TokenLoss
from titan.training.train_step import TrainStep

MAX_SAMPLED_TOKENS = 4096
"""Tokens of a step whose activations are sampled."""
PROJECTION_WIDTH = 8
"""Random projections of a sampled token's activation: they tell how far two activations are apart."""
LOGIT_CHUNK = 1024
"""Tokens whose logits exist at a time, and queries whose attention logits do."""


class StepRows:
    """Which rows and tokens of a step this rank has.

    `rank_rows` are this rank's, counted from the step's first; what it computes beyond them is padding.
    """

    def __init__(self, train_step: TrainStep, rows: int, rows_per_microbatch: int, seq_len: int) -> None:
        """Take the step's rows, the rows of a micro-batch, and the tokens of a row."""
        self.world, self.rank_rows = train_step.world, train_step.world.data_shard.slice_rows(rows)
        self.total_rows, self.rows_per_microbatch, self.seq_len = rows, rows_per_microbatch, seq_len
        positions = train_step.token_positions
        self._positions = torch.arange(seq_len) if positions is None else positions(seq_len).cpu()

    def count_rows(self, microbatch: int) -> int:
        """Return how many rows of a micro-batch are no padding; they are the first."""
        return max(0, min(self.rows_per_microbatch, len(self.rank_rows) - microbatch * self.rows_per_microbatch))

    def get_row_number(self, microbatch: int, row: int) -> int:
        """Return a row's number in the step."""
        return self.rank_rows.start + microbatch * self.rows_per_microbatch + row

    def number_tokens(self, microbatch: int, real: Tensor) -> Tensor:
        """Return the indices in the step of a micro-batch's tokens [rows, tokens, ...]; int64, flat, on the CPU."""
        first = self.get_row_number(microbatch, 0)
        rows = torch.arange(first, first + len(real))[:, None]
        return (rows * self.seq_len + self.select_positions(real.shape[1])).flatten()

    def select_positions(self, tokens: int) -> Tensor:
        """Return the positions of a hidden state's tokens, int64 on the CPU: all that this rank has, or its part."""
        all_positions, rank = self._positions, self.world.get_coordinate("tensor")
        return (
            all_positions if tokens == len(all_positions) else all_positions.chunk(len(all_positions) // tokens)[rank]
        )

    def is_counted(self, tokens: int) -> bool:
        """Whether this rank counts a hidden state: where tensor ranks have replicas only the first does."""
        return tokens < len(self._positions) or self.world.get_coordinate("tensor") == 0


def add_totals(totals: Tensor, x: Tensor) -> None:
    """Add a tensor's elements to totals: float64 [4], the fields of `ActivationTotals`."""
    if x.numel():
        totals[0] += sum_row_squares(x).sum()
        totals[1] += x.sum(dtype=torch.float32)
        totals[2] = torch.maximum(totals[2], x.abs().amax().double())
        totals[3] += x.numel()


SeenTokens = list[tuple[Tensor, Tensor, int]]
"""Of some micro-batches: the tokens' indices in the step, int64 [tokens], what was seen of them [tokens, width], on the
CPU, and the micro-batch's number on this rank."""


def join_microbatches(seen: SeenTokens, rank: int) -> Samples:
    """Return what a rank saw of the tokens of all its micro-batches."""
    tokens, values = (torch.cat(parts).numpy() for parts in list(zip(*seen, strict=True))[:2])
    microbatches = np.concatenate([np.full(len(part[0]), part[2], np.int64) for part in seen])
    return Samples(tokens, values, microbatches, microbatches * 0 + rank)


def iterate_hidden_modules(stage: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a stage whose outputs are hidden states, with their names, each before what contains it."""
    model = stage.model
    if model.tok_embeddings is not None:
        yield "tok_embeddings", model.tok_embeddings
    for number, block in model.layers.items():
        yield from ((f"layers.{number}.{name}", part) for name, part in block.named_children())
        yield f"layers.{number}", block
    if model.norm is not None:
        yield "norm", model.norm


class Observer(ModuleHooks):
    """Collects statistics of a step while its context is open.

    Attributes:
        totals: by direction and module, of its output or of the loss's gradient with respect to it: see `add_totals`.
        samples: likewise, projections of sampled tokens, float32 [tokens, PROJECTION_WIDTH].
        logits: the largest attention logit of each block, by its name; minus infinity where a rank has none.
        inside_compiled: names of those that can't be, because they are inside of code that runs compiled.
    """

    def __init__(self, train_step: TrainStep, rows: StepRows, *, around_compiled: bool = False) -> None:
        """Observe a train step; `around_compiled` as of `ModuleHooks`."""
        super().__init__(train_step.stages, around_compiled=around_compiled)
        self.train_step, self.rows, self.device = train_step, rows, train_step.device
        self.totals: dict[Key, Tensor] = {}
        self.samples: dict[Key, SeenTokens] = {}
        self.losses: list[TokenLoss] = []
        self.logits: dict[str, Tensor] = {}
        self.watched: list[str] = []
        self.inside_compiled: list[str] = []
        self._with_totals = True

    def watch_hidden(self, *, blocks_only: bool = False, sample: bool = False, totals: bool = True) -> None:
        """Collect statistics of hidden states.

        Args:
            totals: whether sums over all elements are collected; else they are those of nothing.
        """
        self._with_totals = totals
        for index, stage in enumerate(self.train_step.stages):
            hidden = find_compiled_parts(stage) if self.around_compiled else set()
            for name, module in iterate_hidden_modules(stage):
                if blocks_only and name.count(".") > 1:
                    continue
                if module in hidden:
                    self.inside_compiled.append(name)
                    continue
                self.watched.append(name)
                self.add_after(index, module, partial(self._collect_output, name, sample))

    def watch_logits(self) -> None:
        """Collect the largest attention logits."""
        for index, stage in enumerate(self.train_step.stages):
            for number, block in stage.model.layers.items():
                if core := getattr(getattr(block, "attention", None), "core", None):
                    name, chunk = f"layers.{number}", getattr(block.attention, "chunk", None)
                    self.logits[name] = torch.full((), -math.inf, dtype=torch.float64, device=self.device)
                    self.add_before(index, core, partial(self._collect_logit, name, chunk))

    def watch_losses(self, largest: int) -> None:
        """Collect the `largest` losses of tokens."""
        for index, stage in enumerate(self.train_step.stages):
            if stage.model.head is not None:
                self.add_before(index, stage.model.head, partial(self._collect_losses, largest))

    def read_totals(self) -> dict[Key, ActivationTotals]:
        """Return the totals on the host."""
        return {key: ActivationTotals(*totals.tolist()) for key, totals in self.totals.items()}

    def read_samples(self) -> dict[Key, Samples]:
        """Return the samples of all micro-batches."""
        rank = self.train_step.world.rank_info.rank
        return {key: join_microbatches(seen, rank) for key, seen in self.samples.items()}

    # --- hidden states

    def _collect_output(
        self, name: str, sample: bool, call: StageCall, module: nn.Module, args: tuple[Any, ...], out: Tensor
    ) -> None:
        self._collect_hidden(("forward", name), call.microbatch, sample, out)
        if sample and out.requires_grad:
            watch: Any = out.register_hook
            watch(partial(self._collect_hidden, ("backward", name), call.microbatch, sample))

    @torch.no_grad()
    def _collect_hidden(self, key: Key, microbatch: int, sample: bool, x: Tensor) -> None:
        if key not in self.totals:
            self.totals[key] = torch.zeros(4, dtype=torch.float64, device=self.device)
        if not self.rows.is_counted(x.shape[1]):
            return
        real = x[: self.rows.count_rows(microbatch)]
        if self._with_totals:
            add_totals(self.totals[key], real)
        if sample:
            self.samples.setdefault(key, []).append(self._sample_tokens(microbatch, real))

    def _sample_tokens(self, microbatch: int, real: Tensor) -> tuple[Tensor, Tensor, int]:
        rows, tokens = self.rows, self.rows.number_tokens(microbatch, real)
        stride = math.ceil(rows.total_rows * rows.seq_len / MAX_SAMPLED_TOKENS)
        sampled = (tokens % stride == 0).nonzero().flatten()
        values = real.flatten(0, 1)[sampled.to(real.device)].float()
        generator = torch.Generator().manual_seed(0)  # so that the random projections are the same everywhere
        projections = torch.randn(values.shape[-1], PROJECTION_WIDTH, generator=generator)
        return tokens[sampled], (values @ projections.to(values.device)).cpu(), microbatch

    # --- losses

    @torch.no_grad()
    def _collect_losses(self, largest: int, call: StageCall, head: Any, args: tuple[Any, ...]) -> None:
        if len(args) < 2 or args[1] is None:
            return
        count, rows = self.rows.count_rows(call.microbatch), self.rows
        losses = compute_token_losses(head, args[0], args[1])[:count]
        if not self.train_step.world.counts_loss or not losses.numel():
            return
        order = losses.nan_to_num(nan=math.inf).flatten()
        top = order.topk(min(largest, order.numel())).indices
        positions, targets = rows.select_positions(losses.shape[1]), args[1][:count].flatten()[top].tolist()
        for flat_index, loss, target in zip(top.tolist(), losses.flatten()[top].tolist(), targets, strict=True):
            row, token = divmod(flat_index, losses.shape[1])
            self.losses.append(
                TokenLoss(loss, rows.get_row_number(call.microbatch, row), int(positions[token]), target)
            )
        self.losses = sorted(self.losses, key=lambda t: -math.inf if math.isnan(t.loss) else -t.loss)[:largest]

    # --- attention logits

    def _collect_logit(
        self, block: str, chunk: int | None, call: StageCall, core: nn.Module, args: tuple[Any, ...]
    ) -> None:
        call_largest = self._find_largest_logit(call, args[0].detach(), args[1].detach(), chunk)
        self.logits[block] = torch.maximum(self.logits[block], call_largest)

    @torch.no_grad()
    def _find_largest_logit(self, call: StageCall, q: Tensor, k: Tensor, chunk: int | None) -> Tensor:
        """Return the largest logit of pairs of tokens that attend to each other, over this rank's queries."""
        rows, count = q.shape[0], self.rows.count_rows(call.microbatch)
        positions, documents = call.get_argument(2, "positions"), call.get_argument(3, "document_ids")
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)
        positions = positions.view(-1, q.shape[2])
        if chunk is not None:
            documents = chunk_ids(documents, positions, chunk)
        documents = torch.zeros_like(positions) if documents is None else documents
        query_ids = torch.stack([positions.expand(rows, -1), documents.expand(rows, -1)])
        keys, key_ids = k, query_ids
        if (group := self.train_step.world.get_group("context")) is not None:
            keys, key_ids = collectives.all_gather(k, 2, group), collectives.all_gather(query_ids, 2, group)
        return compute_largest_logit(q[:count], keys[:count], query_ids[:, :count], key_ids[:, :count])


def compute_token_losses(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each token, float32 like `targets`; 0 where it does not count. All tensor ranks call it."""
    losses = [
        F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none").view(y.shape)
        for logits, y in iterate_logit_chunks(head, hidden, targets)
    ]
    return torch.cat(losses, 1)


def iterate_logit_chunks(head: Any, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield complete logits (float32) and targets of some tokens of each row at a time; see `compute_token_losses`."""
    weight = head.get_weight(head.weight, head.operand or hidden.dtype)
    size = max(1, LOGIT_CHUNK // len(hidden))
    for x, y in zip(torch.split(hidden, size, 1), torch.split(targets, size, 1), strict=True):
        logits = head.complete_logits(head.product(x.contiguous(), weight))  # a strided bf16 product is slow on CPUs
        yield logits.float(), y


def compute_largest_logit(q: Tensor, k: Tensor, query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Return the largest q k / sqrt(d) of a query and a key that it attends to, float64; minus infinity without rows.

    Args:
        q: [B, H, t, d].
        k: [B, K, s, d].
        query_ids: positions and document ids of the queries' tokens, int64 [2, B, t].
        key_ids: those of the keys' tokens, int64 [2, B, s].
    """
    largest = torch.full((), -math.inf, dtype=torch.float64, device=q.device)
    if not len(q):
        return largest
    grouped_queries, step = q.reshape(len(q), k.shape[1], -1, *q.shape[2:]).float(), max(1, LOGIT_CHUNK // 8)
    scaled_keys = k.float().transpose(-1, -2)[:, :, None] / math.sqrt(q.shape[-1])
    for start in range(0, q.shape[2], step):
        chunk = slice(start, start + step)
        positions, documents = query_ids[:, :, chunk, None]
        is_masked = (positions < key_ids[0][:, None]) | (documents != key_ids[1][:, None])
        scores = (grouped_queries[..., chunk, :] @ scaled_keys).masked_fill(is_masked[:, None, None], -math.inf)
        largest = torch.maximum(largest, scores.amax().double())
    return largest
