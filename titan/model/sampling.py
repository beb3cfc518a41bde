"""How the next token is drawn from logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def choose(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab: int | None = None,
) -> Tensor:
    """Draw a token for each row of logits.

    The distribution is inverted at numbers that the caller draws, so that the same numbers choose the same tokens on
    every device, and each row may have a source of its own.

    Args:
        logits: [B, V], on any device.
        uniform: numbers in [0, 1), float64 [B].
        temperature: the logits are divided by it; 0 takes the likeliest token, whatever the rest says.
        top_k: only so many likeliest tokens take part; 0: all.
        top_p: only the likeliest tokens take part, the fewest that have this probability together (nucleus sampling,
            arXiv:1904.09751); after `top_k`.
        vocab: only ids below it take part; None: all.

    Returns:
        Token ids, int64 [B], on the device of `logits`.
    """
    logits = logits[:, :vocab].double()
    if temperature == 0:
        return logits.argmax(-1)
    values, ids = _candidates(logits, top_k, ordered=top_p < 1)
    shares = ((values - values.amax(-1, keepdim=True)) / temperature).softmax(-1)
    reached = nucleus(shares, top_p).cumsum(-1)
    wanted = uniform.to(reached.device)[:, None] * reached[:, -1:]
    place = (reached <= wanted).sum(-1, keepdim=True)
    last = (reached < reached[:, -1:]).sum(-1, keepdim=True)  # a number just below one may round to the sum
    place = place.minimum(last)
    return (place if ids is None else ids.gather(-1, place))[:, 0]


def _candidates(logits: Tensor, top_k: int, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """The logits that take part and their ids (None: each is at its id), from the largest where that is asked for."""
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k)
        return best.values, best.indices
    return torch.sort(logits, dim=-1, descending=True, stable=True) if ordered else (logits, None)


def nucleus(shares: Tensor, top_p: float) -> Tensor:
    """Probabilities [B, V], sorted from the largest, with those after the first that reach `top_p` together as zero."""
    if top_p >= 1:
        return shares
    before = shares.cumsum(-1) - shares
    kept = before < top_p
    kept[:, 0] = True
    return shares * kept


def source(seed: int, prompt: Sequence[int], sample: int) -> torch.Generator:
    """Random numbers of one continuation, on the CPU: they depend on nothing else than these three."""
    text = f"{seed}\0{sample}\0{','.join(map(str, prompt))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def draw_uniform(generators: Sequence[torch.Generator]) -> Tensor:
    """A number in [0, 1) from each: float64 [B]."""
    return torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
