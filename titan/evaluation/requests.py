"""Requests for log-likelihoods: the tokens of a context and of a continuation, as lm-evaluation-harness forms them.

Context and continuation are encoded together, and split after as many tokens as the context alone has. Spaces at the
end of the context belong to the continuation. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.evaluation.items import Item


@dataclass(frozen=True)
class Request:
    """Tokens of which the last ones are scored.

    Attributes:
        tokens: of the context and the continuation.
        scored: how many of the last ones are the continuation's; at least one token is before them.
    """

    tokens: tuple[int, ...]
    scored: int


def requests_of(
    items: Sequence[Item], tokenizer: Tokenizer, window: int, *, bos: bool = False, where: str = "task"
) -> list[Request]:
    """Return one request for each choice of each item, in order.

    Args:
        items: the items of a task.
        tokenizer: of the model.
        window: tokens that the model reads at most: the beginning of a longer context is left out.
        bos: whether contexts begin with the token that begins a document.
        where: the task's settings, for messages.

    Raises:
        ConfigError: when a continuation is empty, or longer than the window.
    """
    pairs = [_split(item.context, item.delimiter + choice) for item in items for choice in item.choices]
    wholes = iter(tokenizer.encode_batch([context + more for context, more in pairs]))
    contexts = iter(tokenizer.encode_batch([context for context, _ in pairs]))
    return [
        _request(next(wholes), next(contexts), tokenizer, window, bos, f"{where}: item {number}")
        for number in _numbers(items)
    ]


def _numbers(items: Iterable[Item]) -> Iterable[int]:
    return (number for number, item in enumerate(items, 1) for _ in item.choices)


def _split(context: str, continuation: str) -> tuple[str, str]:
    """Move the spaces at the end of a context to the continuation."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _request(whole: list[int], context: list[int], tokenizer: Tokenizer, window: int, bos: bool, where: str) -> Request:
    scored = len(whole) - len(context)
    if not 0 < scored <= window:
        what = "adds no token to its context" if scored <= 0 else f"has {scored} tokens, and the model reads {window}"
        raise ConfigError(f"{where}: a continuation {what}; correct the item, or raise training.seq_len.")
    prefix = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    if bos or not context:
        if prefix is None:
            raise ConfigError(f"{where}: has no context, and no token of {tokenizer.name} begins a document; give one.")
        whole = [prefix, *whole]
    return Request(tuple(whole[-(window + 1) :]), scored)
