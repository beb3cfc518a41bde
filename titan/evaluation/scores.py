"""Figures of a task from the log-likelihoods of its choices, with bootstrap intervals over items. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """A figure of a task over all items, with the interval of `LEVEL` by the bootstrap over items."""

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
    if all(len(item.choices) == 1 for item in items):
        return {
            "acc": _estimate_score(likelihoods[:, 1], lambda mean: mean),
            "perplexity": _estimate_score(likelihoods[:, 0], lambda mean: math.exp(-mean) if -mean < 700 else math.inf),
        }
    parts = np.split(likelihoods[:, 0], np.cumsum([len(item.choices) for item in items])[:-1])
    scores: dict[str, TaskScore] = {}
    for name, size in _SIZES.items():
        sizes = [np.array([float(size(choice)) for choice in item.choices]) for item in items]
        chosen = [int(np.argmax(part / divisor)) for part, divisor in zip(parts, sizes, strict=True)]
        right = [float(index == item.label) for index, item in zip(chosen, items, strict=True)]
        scores[name] = _estimate_score(np.array(right), lambda mean: mean)
    return scores


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


@dataclass(frozen=True)
class Request:
    """Tokens of a context and a continuation, which has the last `scored` of them; at least one is before them."""

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
    contexts, texts, numbers = list[str](), list[str](), list[int]()
    for number, item in enumerate(items, 1):
        for choice in item.choices:
            contexts.append(item.context.rstrip())
            texts.append(item.context + item.delimiter + choice)
            numbers.append(number)
    first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    requests = []
    encoded = zip(tokenizer.encode_batch(texts), tokenizer.encode_batch(contexts), numbers, strict=True)
    for ids, context_ids, number in encoded:
        scored, location = len(ids) - len(context_ids), f"{prefix}: item {number}"
        if not 0 < scored <= window:
            problem = (
                "adds no token to its context" if scored <= 0 else f"has {scored} tokens, and the model reads {window}"
            )
            raise ConfigError(f"{location}: a continuation {problem}; correct the item, or raise training.seq_len.")
        needs_first = bos or not context_ids
        if needs_first and first is None:
            raise ConfigError(
                f"{location}: has no context, and no token of {tokenizer.name} begins a document; give one."
            )
        full_ids = [first, *ids] if needs_first and first is not None else ids
        requests.append(Request(tuple(full_ids[-(window + 1) :]), scored))
    return requests
