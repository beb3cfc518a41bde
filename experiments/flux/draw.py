"""Random numbers of rows: functions of a row's key only, so that they are the same on every layout.

A word of 64 bits is SplitMix64's (doi:10.1145/2660193.2660195) at a position of the sequence that begins at the key;
integer arithmetic wraps, as in the published code. Values are computed from words one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOISE, TIME = 1, 2
"""What numbers are drawn for: each has a sequence for itself."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MANTISSA = 23


def draw_words(keys: Tensor, count: int, stream: int) -> Tensor:
    """Return 64 random bits for each of `count` positions of each row: int64 [rows, count] from keys [rows]."""
    start = _mix(keys + stream * 1_000_003)
    positions = torch.arange(1, count + 1, device=keys.device, dtype=torch.int64)
    return _mix(start[:, None] + positions * _GOLDEN)


def draw_normal(keys: Tensor, count: int, stream: int) -> Tensor:
    """Return normal values with mean 0 and deviation 1, float32 [rows, count] (Box and Muller)."""
    words = draw_words(keys, count, stream)
    radius = (-2 * _to_share(_shift(words, 64 - _MANTISSA)).log()).sqrt()
    angle = 2 * math.pi * _to_share(_shift(words, 64 - 2 * _MANTISSA) & ((1 << _MANTISSA) - 1))
    return radius * angle.cos()


def _to_share(bits: Tensor) -> Tensor:
    """Return integers below 2**23 as numbers above 0 and below 1, exact in float32."""
    return (bits.float() + 0.5) * 2.0**-_MANTISSA


def _shift(words: Tensor, count: int) -> Tensor:
    """Return words shifted to the right, with zeros from the left."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    return words ^ _shift(words, 31)
