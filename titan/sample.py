"""Text from a model under training, to see what it has learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def continuation(
    logits: Callable[[list[int]], Tensor],
    start: list[int],
    count: int,
    *,
    window: int,
    vocab: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 40,
) -> list[int]:
    """Sample `count` tokens that follow `start`; every rank must call it, and every rank gets the same.

    Args:
        logits: gives the logits [vocab] of the token that follows others.
        start: token ids, at least one.
        count: how many tokens.
        window: the longest input, in tokens.
        vocab: ids below it may be drawn (a model's vocabulary may be larger than the tokenizer's).
        seed: of the draws.
        temperature, top_k: the logits are divided by the one, and the other many largest take part in a draw.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(start)
    with torch.compiler.set_stance("force_eager"):  # or every new length would be compiled
        for _ in range(count):
            best = (logits(tokens[-window:])[:vocab].cpu() / temperature).topk(min(top_k, vocab))
            drawn = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
            tokens.append(int(best.indices[drawn]))
    return tokens[len(start) :]
