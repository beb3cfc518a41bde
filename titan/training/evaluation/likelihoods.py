"""Log-likelihoods of continuations on any layout.

Each request is one row: its tokens, padded behind them. Targets that are not scored are ignored, so the sum of a
row's token losses is the continuation's negative log-likelihood. Hooks before the head compute it, on the ranks of the
last pipeline stage; each adds what it has of a row, and one sum over all ranks at the end gives the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titan.debug.module_hooks import ModuleHooks, StageCall, force_eager
from titan.evaluation.requests import Request
from titan.model.layers import IGNORED
from titan.parallelism.microbatches import Microbatches
from titan.training.observe import iterate_logit_chunks
from titan.training.train_step import TrainStep

MIN_ROW_TOKENS = 32
"""Tokens of the shortest rows."""


@torch.no_grad()
def compute_loglikelihoods(
    train_step: TrainStep, requests: Sequence[Request], window: int, tokens: int, *, compiled: bool = False
) -> NDArray[np.float64]:
    """Return the log-likelihood of each continuation in nats, and 1 where greedy decoding gives it; [requests, 2].

    All ranks call it together, and all get the same.

    Args:
        window: tokens of the longest rows.
        tokens: of a micro-batch.
        compiled: whether the model is compiled; scoring runs it as it is written.
    """
    sums = torch.zeros(len(requests), 2, dtype=torch.float64, device=train_step.device)
    with force_eager(compiled):
        for length, numbers in _group_by_length(requests, train_step.seq_len_multiple, window).items():
            _score_requests(
                train_step, [requests[n] for n in numbers], numbers, (max(1, tokens // length), length), sums
            )
    losses, mismatches = train_step.world.all_reduce(sums).cpu().numpy().T
    return np.stack([-losses, mismatches == 0], axis=1).astype(np.float64)


def _group_by_length(requests: Sequence[Request], multiple: int, window: int) -> dict[int, list[int]]:
    """Return the numbers of the requests by the length of their rows: powers of two, or multiples of `multiple`."""
    numbers_by_length: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        power = 1 << max(MIN_ROW_TOKENS - 1, len(request.tokens) - 2).bit_length()
        numbers_by_length.setdefault(min(window, -(-power // multiple) * multiple), []).append(number)
    return numbers_by_length


def _score_requests(
    train_step: TrainStep, requests: Sequence[Request], numbers: Sequence[int], shape: tuple[int, int], sums: Tensor
) -> None:
    """Add the losses and the number of tokens that are not greedy of some requests to their lines of `sums`.

    Args:
        numbers: their lines.
        shape: rows of a micro-batch, and tokens of a row.
        sums: [all requests, 2].
    """
    shard, (rows, length) = train_step.world.data_shard, shape
    rank_requests, slots = shard.slice_rows(len(requests)), shard.count_slots(len(requests))
    count = -(-slots // rows)
    tokens = torch.zeros(count * rows, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row, number in enumerate(rank_requests):
        ids, size = torch.tensor(requests[number].tokens), len(requests[number].tokens) - 1
        tokens[row, :size] = ids[:-1]
        targets[row, size - requests[number].scored : size] = ids[-requests[number].scored :]
    lines = torch.split(torch.tensor([numbers[i] for i in rank_requests], dtype=torch.int64, device=sums.device), rows)

    def add_scores(call: StageCall, head: nn.Module, args: tuple[Tensor, ...]) -> None:
        row_sums = _compute_row_sums(head, *args)
        if train_step.world.counts_loss and call.microbatch < len(lines):
            line = lines[call.microbatch]
            sums[line] += row_sums[: len(line)]

    with ModuleHooks(train_step.stages) as hooks:
        for index, stage in enumerate(train_step.stages):
            if stage.model.head is not None:
                hooks.add_before(index, stage.model.head, add_scores)
        device, batch_shape = train_step.device, (count, rows, length)
        train_step.evaluate(Microbatches(tokens.view(batch_shape).to(device), targets.view(batch_shape).to(device)))


def _compute_row_sums(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of each row's losses, and its number of tokens that are not greedy; float64 [rows, 2]."""
    sums = torch.zeros(len(targets), 2, dtype=torch.float64, device=hidden.device)
    for logits, part in iterate_logit_chunks(head, hidden, targets):
        valid = part != IGNORED
        index = part.where(valid, 0)[..., None]
        losses = logits.logsumexp(-1) - logits.gather(-1, index)[..., 0]
        sums[:, 0] += losses.double().where(valid, 0).sum(1)
        sums[:, 1] += ((logits.argmax(-1) != part) & valid).sum(1)
    return sums
