"""Rank correlation: do small or early figures order variants as the final ones do?"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rank(values: ArrayLike) -> NDArray[np.float64]:
    """Return the rank of each value, from 1; equal values share the mean of their ranks; [n] each."""
    values = np.asarray(values, dtype=np.float64)
    below = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return np.asarray(below + (equal + 1) / 2, dtype=np.float64)


def correlate_ranks(first: ArrayLike, second: ArrayLike) -> float:
    """Return Spearman's rank correlation; NaN where all values of one are equal, or there are fewer than two.

    Args:
        first: figures; [n].
        second: figures of the same variants; [n].
    """
    a, b = rank(first), rank(second)
    a, b = a - a.mean() if len(a) else a, b - b.mean() if len(b) else b
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
