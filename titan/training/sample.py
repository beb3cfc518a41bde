"""Text from a model under training, to see what it has learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan.model import sampling


@torch.no_grad()
def sample_continuation(
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
        temperature, top_k: see `titan.model.sampling.choose`.
    """
    generators = [sampling.source(seed, start, 0)]
    tokens = list(start)
    with torch.compiler.set_stance("force_eager"):  # or every new length would be compiled
        for _ in range(count):
            uniform = sampling.draw_uniform(generators)
            follows = logits(tokens[-window:])[None].cpu()
            tokens += sampling.choose(follows, uniform, temperature=temperature, top_k=top_k, vocab=vocab).tolist()
    return tokens[len(start) :]
