"""Requests for log-likelihoods: the tokens of a context and of a continuation, as lm-evaluation-harness forms them.

Context and continuation are encoded together, and split after as many tokens as the context alone has. Spaces at the
end of the context belong to the continuation. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.evaluation.items import TaskItem


@dataclass(frozen=True)
class Request:
    """Tokens of which the last ones are scored.

    Attributes:
        tokens: of the context and the continuation.
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
        prefix: the task's settings, for messages.

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
