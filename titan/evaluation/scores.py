"""Figures of a task from the log-likelihoods of its choices, with bootstrap intervals over items. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.evaluation.items import TaskItem

RESAMPLES = 1000
"""Samples of items, with replacement, from which an interval follows."""
LEVEL = 0.95

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class TaskScore:
    """A figure of a task.

    Attributes:
        value: over all items.
        low: the lower bound of the interval of `LEVEL` by the bootstrap over items.
    """

    value: float
    low: float
    high: float


def compute_scores(items: Sequence[TaskItem], likelihoods: Numbers) -> dict[str, TaskScore]:
    """Return the figures of a task.

    Tasks with choices have `acc`, the share of items whose right choice has the largest log-likelihood; `acc_norm`, of
    log-likelihoods divided by the choice's characters; and `acc_bytes`, by its bytes. A cloze has `acc`, the share of
    items whose continuation is what greedy decoding gives, and `perplexity`, exp of the mean negative log-likelihood of
    a continuation (of all its tokens, as LAMBADA's).

    Args:
        likelihoods: the log-likelihood of each choice in nats, and whether greedy decoding gives it; [choices, 2].
    """
    ends = np.cumsum([len(item.choices) for item in items])
    parts = np.split(likelihoods, ends[:-1])
    pairs = list(zip(items, parts, strict=True))
    cloze = [(part[0, 0], part[0, 1]) for item, part in pairs if len(item.choices) == 1]
    scores: dict[str, TaskScore] = {}
    if len(cloze) == len(items):
        values = np.array(cloze)
        return {
            "acc": _estimate_score(values[:, 1], _identity),
            "perplexity": _estimate_score(values[:, 0], lambda mean: _clamp_exp(-mean)),
        }
    for name, size in _SIZES.items():
        is_correct = [float(_choose_likeliest(item, part[:, 0], size) == item.label) for item, part in pairs]
        scores[name] = _estimate_score(np.array(is_correct), _identity)
    return scores


def _choose_likeliest(item: TaskItem, likelihoods: Numbers, size: Callable[[str], int]) -> int:
    return int(np.argmax(likelihoods / np.array([float(size(choice)) for choice in item.choices])))


_SIZES: dict[str, Callable[[str], int]] = {
    "acc": lambda choice: 1,
    "acc_norm": len,
    "acc_bytes": lambda choice: len(choice.encode()),
}


def _estimate_score(values: Numbers, transform: Callable[[float], float]) -> TaskScore:
    """Return a figure that is a monotonic function of the mean over items."""
    random, count = np.random.default_rng(0), len(values)
    means = [values[random.integers(count, size=count)].mean() for _ in range(RESAMPLES)]
    tail = (1 - LEVEL) / 2
    bounds = sorted(transform(float(np.quantile(means, q))) for q in (tail, 1 - tail))
    return TaskScore(transform(float(values.mean())), bounds[0], bounds[1])


def _identity(mean: float) -> float:
    return mean


def _clamp_exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Request:
    """Tokens of which the last ones are scored.

    Attributes:
        scored: how many of the last ones are the continuation's; at least one token is before them.
    """

    tokens: tuple[int, ...]
    scored: int


def build_requests(
    items: Sequence[TaskItem], tokenizer: Tokenizer, window: int, *, bos: bool = False, prefix: str = "task"
) -> list[Request]:
    """Return one request for each choice of each item, in order.

    Args:
        window: tokens that the model reads at most: the beginning of a longer context is left out.
        bos: whether contexts begin with the token that begins a document.

    Raises:
        ConfigError: when a continuation is empty, or longer than the window.
    """
    pairs = [_move_spaces(item.context, item.delimiter + choice) for item in items for choice in item.choices]
    full_ids = iter(tokenizer.encode_batch([context + continuation for context, continuation in pairs]))
    context_ids = iter(tokenizer.encode_batch([context for context, _ in pairs]))
    return [
        _build_request(next(full_ids), next(context_ids), tokenizer, window, bos, f"{prefix}: item {number}")
        for number in _number_choices(items)
    ]


def _number_choices(items: Iterable[TaskItem]) -> Iterable[int]:
    return (number for number, item in enumerate(items, 1) for _ in item.choices)


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move the spaces at the end of a context to the continuation."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _build_request(
    full_ids: list[int], context_ids: list[int], tokenizer: Tokenizer, window: int, bos: bool, location: str
) -> Request:
    scored = len(full_ids) - len(context_ids)
    if not 0 < scored <= window:
        problem = (
            "adds no token to its context" if scored <= 0 else f"has {scored} tokens, and the model reads {window}"
        )
        raise ConfigError(f"{location}: a continuation {problem}; correct the item, or raise training.seq_len.")
    prefix = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    if bos or not context_ids:
        if prefix is None:
            raise ConfigError(
                f"{location}: has no context, and no token of {tokenizer.name} begins a document; give one."
            )
        full_ids = [prefix, *full_ids]
    return Request(tuple(full_ids[-(window + 1) :]), scored)
