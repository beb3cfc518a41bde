"""Sampling of the next token from logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab: int | None = None,
) -> Tensor:
    """Sample a token for each row of logits.

    The inverse of the cumulative distribution is evaluated at the caller's uniform values, so that the same values
    give the same tokens on every device, and each row may have a separate generator.

    Args:
        logits: [B, V], on any device.
        uniform: values in [0, 1), float64 [B].
        temperature: the logits are divided by it; 0: greedy decoding, whatever the other arguments are.
        top_k: sample from this many most likely tokens; 0: all.
        top_p: sample from the smallest set of most likely tokens with this total probability (nucleus sampling,
            arXiv:1904.09751), after `top_k`.
        vocab: sample from ids below it; None: all.

    Returns:
        Token ids, int64 [B], on the device of `logits`.
    """
    logits = logits[:, :vocab].double()
    if temperature == 0:
        return logits.argmax(-1)
    values, ids = _select_candidates(logits, top_k, ordered=top_p < 1)
    probabilities = ((values - values.amax(-1, keepdim=True)) / temperature).softmax(-1)
    cumulative = keep_nucleus(probabilities, top_p).cumsum(-1)
    target = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1, keepdim=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # a value just below one may round to the sum
    index = index.minimum(last)
    return (index if ids is None else ids.gather(-1, index))[:, 0]


def _select_candidates(logits: Tensor, top_k: int, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """Return the candidates' logits and ids (None: ids are indices), in descending order if `ordered`."""
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k)
        return best.values, best.indices
    return torch.sort(logits, dim=-1, descending=True, stable=True) if ordered else (logits, None)


def keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return sorted probabilities [B, V] with zeros after the first ones that reach `top_p` together."""
    if top_p >= 1:
        return probabilities
    preceding = probabilities.cumsum(-1) - probabilities
    in_nucleus = preceding < top_p
    in_nucleus[:, 0] = True
    return probabilities * in_nucleus


def make_generator(seed: int, prompt: Sequence[int], sample: int) -> torch.Generator:
    """Return the CPU generator of one continuation, seeded by these three values only."""
    text = f"{seed}\0{sample}\0{','.join(map(str, prompt))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def draw_uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """Return one value in [0, 1) from each generator: float64 [B]."""
    return torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
