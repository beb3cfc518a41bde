"""What all ranks of a replay saw of a step, put together. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.training.replay.observation import ActivationTotals, Fingerprint, Key, Operation, RankReplay, Samples
from titan.training.token_loss import TokenLoss

CONTEXT_TOKENS = 24
"""Tokens of text before a token that is shown."""


@dataclass(frozen=True)
class Statistics:
    """Of a hidden state or its gradient, over all elements: root mean square, mean and largest absolute value."""

    rms: float
    mean: float
    largest: float


@dataclass(frozen=True)
class Token:
    """A token with a large loss: the row's number in the data, its position there, its text and the text before it."""

    loss: float
    row: int
    position: int
    text: str
    before: str


@dataclass(frozen=True)
class Replica:
    """A tensor as some ranks have it, bitwise the same on all of them."""

    ranks: tuple[int, ...]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class ReplayedStep:
    """What a replay saw of a step, over all ranks.

    Attributes:
        record: the step's line, with metrics of the layers.
        statistics: in the order of the forward pass, then of the backward pass.
        samples: likewise.
        tokens: the largest losses.
        notes: what was applied to the model.
        tensors: by kind and name, one replica for each value that ranks have.
        groups: the parameter group of each parameter.
        routes: the experts of each token, by router.
        unobserved: modules whose outputs could not be seen, and why.
        figures: further numbers, summed over the ranks.
        seq_len: tokens of a row.
        operations: of the module that was asked for, on the first rank that has it.
    """

    record: Mapping[str, Any]
    statistics: Mapping[Key, Statistics]
    samples: Mapping[Key, Samples]
    tokens: tuple[Token, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: Mapping[Key, tuple[Replica, ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[str, Samples] = field(default_factory=dict)
    unobserved: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    seq_len: int = 1
    operations: tuple[Operation, ...] = ()


def merge_ranks(
    parts: Sequence[RankReplay], mix: RowMixture | None, first: int, tokens: int, seq_len: int = 1
) -> ReplayedStep:
    """Return what all ranks saw.

    Args:
        mix: the rows; None: no tokens are shown.
        first: rows read before the step.
        tokens: how many tokens to show.
    """
    order = sort_keys({key for part in parts for key in part.totals}, [list(part.totals) for part in parts])
    totals = {key: [part.totals[key] for part in parts if key in part.totals] for key in order}
    samples = {key: _join_samples(part.samples[key] for part in parts if key in part.samples) for key in order}
    losses = sorted((loss for part in parts for loss in part.losses), key=_build_loss_key)[:tokens]
    return ReplayedStep(
        record=parts[0].record,
        statistics={key: _compute_statistics(rank_totals) for key, rank_totals in totals.items()},
        samples=samples,
        tokens=tuple(_build_token(loss, mix, first) for loss in losses) if mix is not None else (),
        notes=parts[0].notes,
        tensors=_join_tensors(parts),
        groups={name: group for part in parts for name, group in part.groups.items()},
        routes=join_routes(parts),
        unobserved={name: reason for part in parts for name, reason in part.unobserved.items()},
        figures=_sum_figures(parts),
        seq_len=seq_len,
        operations=next((part.operations for part in parts if part.operations), ()),
    )


def _build_loss_key(token: TokenLoss) -> tuple[float, int, int]:
    return -math.inf if math.isnan(token.loss) else -token.loss, token.row, token.position


def sort_keys(keys: Iterable[Key], rank_keys: Sequence[Sequence[Key]]) -> list[Key]:
    """Return keys in the order of the forward pass, then of the backward pass.

    Args:
        rank_keys: the keys of each rank, in the order in which it saw those of the forward pass.
    """
    positions = {name: i for part in rank_keys for i, (direction, name) in enumerate(part) if direction == "forward"}

    def build_sort_key(name: str) -> tuple[int, int, int]:
        parts = name.split(".")
        in_block = parts[0] == "layers"
        return (1 if in_block else 2 if name == "norm" else 0, int(parts[1]) if in_block else 0, positions.get(name, 0))

    forward = sorted((key for key in keys if key[0] == "forward"), key=lambda key: build_sort_key(key[1]))
    backward = sorted(
        (key for key in keys if key[0] == "backward"), key=lambda key: build_sort_key(key[1]), reverse=True
    )
    return forward + backward


def _compute_statistics(totals: Sequence[ActivationTotals]) -> Statistics:
    count = max(1, sum(t.count for t in totals))
    squares, values = math.fsum(t.squares for t in totals), math.fsum(t.values for t in totals)
    return Statistics(math.sqrt(squares / count), values / count, max((t.largest for t in totals), default=0.0))


def _join_samples(parts: Iterable[Samples]) -> Samples:
    """Return the samples of all ranks by token; of ranks that have the same token those of the first."""
    rank_samples = list(parts)
    if not rank_samples:
        none = np.zeros(0, np.int64)
        return Samples(none, np.zeros((0, 1), np.float32), none, none)
    columns = [np.concatenate([getattr(part, key) for part in rank_samples]) for key in Samples.__dataclass_fields__]
    tokens, order = np.unique(columns[0], return_index=True)
    return Samples(tokens, *(column[order] for column in columns[1:]))


def join_routes(parts: Sequence[RankReplay]) -> dict[str, Samples]:
    """Return the experts of all ranks' tokens, by router; tokens are sorted."""
    routers = dict.fromkeys(name for part in parts for name in part.routes)
    return {name: _join_samples(part.routes[name] for part in parts if name in part.routes) for name in routers}


def _join_tensors(parts: Sequence[RankReplay]) -> dict[Key, tuple[Replica, ...]]:
    ranks: dict[Key, dict[int, tuple[list[int], Fingerprint]]] = {}
    for rank, part in enumerate(parts):
        for key, fingerprint in part.fingerprints.items():
            ranks.setdefault(key, {}).setdefault(fingerprint.bits, ([], fingerprint))[0].append(rank)
    return {
        key: tuple(Replica(tuple(numbers), fingerprint) for numbers, fingerprint in replicas.values())
        for key, replicas in ranks.items()
    }


def _sum_figures(parts: Sequence[RankReplay]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part.figures)
    return {key: math.fsum(part.figures.get(key, 0.0) for part in parts) for key in keys}


def _build_token(token_loss: TokenLoss, mix: RowMixture, first: int) -> Token:
    """Return a token with its text."""
    numbers = mix.compute_row_numbers(np.array([first + token_loss.row]))
    source_indices, rows = mix.locate_rows(numbers)
    source = mix.sources[int(source_indices[0])]
    row_ids = source.corpus.train.read(int(rows[0]) * source.seq_len, source.seq_len + 1)
    target_index = token_loss.position + 1
    ids_before, ids = np.split(row_ids[: target_index + 1], [target_index])
    text_before = _decode_text(source.corpus, ids_before[-CONTEXT_TOKENS:].tolist())
    text = _decode_text(source.corpus, ids.tolist())
    return Token(token_loss.loss, int(numbers[0]), token_loss.position, text, text_before)


def _decode_text(corpus: Any, ids: list[int]) -> str:
    """Return the text of tokens; their ids where there is no tokenizer."""
    try:
        if corpus.tokenizer["fingerprint"] != "none":
            return load_tokenizer(corpus.tokenizer_path).decode(ids)
    except ConfigError:
        pass
    return " ".join(map(str, ids))
