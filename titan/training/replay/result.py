"""What a replay shows: the ranks' parts put together, and two of them compared. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.training.replay.job import ActivationTotals, Key, RankReplay, Samples
from titan.training.token_loss import TokenLoss

CONTEXT_TOKENS = 24
"""Tokens of text before a token that is shown."""
TOLERANCE = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.01}
"""Relative differences of activations and their gradients that are rounding, by compute type."""
EIGHT_BIT_TOLERANCE = 0.2


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
class ReplayedStep:
    """What a replay saw of a step, over all ranks.

    Attributes:
        record: the step's line, with metrics of the layers.
        statistics: in the order of the forward pass, then of the backward pass.
        samples: likewise.
        tokens: the largest losses.
        notes: what was applied to the model.
    """

    record: Mapping[str, Any]
    statistics: Mapping[Key, Statistics]
    samples: Mapping[Key, Samples]
    tokens: tuple[Token, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ModuleDifference:
    """How far a module's output or gradient is from the other replay's, relative to its size."""

    key: Key
    relative: float


def merge_ranks(parts: Sequence[RankReplay], mix: RowMixture, first: int, tokens: int) -> ReplayedStep:
    """Return what all ranks saw.

    Args:
        parts: of each rank.
        mix: the rows.
        first: rows read before the step.
        tokens: how many tokens to show.
    """
    order = sort_keys({key for part in parts for key in part.totals}, [list(part.totals) for part in parts])
    totals = {key: [part.totals[key] for part in parts if key in part.totals] for key in order}
    samples = {key: _join_samples(part.samples[key] for part in parts if key in part.samples) for key in order}
    losses = sorted((loss for part in parts for loss in part.losses), key=_build_loss_key)[:tokens]
    shown_tokens = tuple(_build_token(loss, mix, first) for loss in losses)
    statistics = {key: _compute_statistics(rank_totals) for key, rank_totals in totals.items()}
    return ReplayedStep(parts[0].record, statistics, samples, shown_tokens, parts[0].notes)


def _build_loss_key(token: TokenLoss) -> tuple[float, int, int]:
    return -math.inf if math.isnan(token.loss) else -token.loss, token.row, token.position


def sort_keys(keys: Iterable[Key], rank_keys: Sequence[Sequence[Key]]) -> list[Key]:
    """Return keys in the order of the forward pass, then of the backward pass.

    Args:
        keys: to sort.
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
    """Return the samples of all ranks by token."""
    rank_samples = list(parts)
    if not rank_samples:
        return np.zeros(0, np.int64), np.zeros((0, 1), np.float32)
    tokens, values = (np.concatenate(column) for column in zip(*rank_samples, strict=True))
    tokens, order = np.unique(tokens, return_index=True)
    return tokens, values[order]


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


def compare_replays(a: ReplayedStep, b: ReplayedStep) -> list[ModuleDifference]:
    """Return how far each module's output, and then gradient, is from that of `b`, in the order of computation."""
    return [
        ModuleDifference(key, _compute_distance(a.samples[key], b.samples[key]))
        for key in a.samples
        if key in b.samples
    ]


def _compute_distance(a: Samples, b: Samples) -> float:
    """Return the relative distance of samples; infinite where only one of them is finite."""
    _, a_indices, b_indices = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    x, y = a[1][a_indices].astype(np.float64), b[1][b_indices].astype(np.float64)
    not_finite = ~np.isfinite(x) | ~np.isfinite(y)
    if not_finite.any():
        return 0.0 if np.array_equal(x, y, equal_nan=True) else math.inf
    size = float(np.linalg.norm(y)) or float(np.linalg.norm(x))
    return float(np.linalg.norm(x - y)) / size if size else 0.0


def choose_tolerance(*precisions: Any) -> float:
    """Return the relative difference that is rounding between runs with these precisions."""
    return max(EIGHT_BIT_TOLERANCE if p.eight_bit else TOLERANCE.get(p.compute, 0.03) for p in precisions)
