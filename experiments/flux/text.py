"""What stands for the outputs of T5 and CLIP: fixed vectors in their shapes, computed from a caption's ids.

Each word has a fixed random vector and so has each place, as an encoder's outputs depend on both; the pooled vector is
the normalised sum of other vectors of the words. There are no parameters, and nothing is learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.flux.draw import draw_normal

WORD, PLACE, POOLED = 3, 4, 5
"""Streams of random numbers; see `experiments.flux.draw`."""


def embed_words(ids: Tensor, width: int) -> Tensor:
    """Return the vector of each word at its place, float32 [B, L, width] from ids [B, L], as T5's encoder has them."""
    words = draw_normal(ids.flatten(), width, WORD).view(*ids.shape, width)
    places = draw_normal(torch.arange(ids.shape[1], device=ids.device), width, PLACE)
    return (words + places) * math.sqrt(0.5)


def embed_caption(ids: Tensor, width: int) -> Tensor:
    """Return the vector of each caption, float32 [B, width] from ids [B, L], as CLIP's pooled output is."""
    words = draw_normal(ids.flatten(), width, POOLED).view(*ids.shape, width)
    is_word = (ids > 0).float()[..., None]
    return (words * is_word).sum(1) / is_word.sum(1).clamp(min=1).sqrt()
