"""What the ranks of a replay are given, and what each of them leaves. Free of torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.token_loss import TokenLoss


@dataclass(frozen=True)
class ReplayJob:
    """The input of the ranks.

    Attributes:
        run: the run, with a temporary directory.
        attempt: the checkpoint to begin at.
        step: the step to look at.
        tokens: how many tokens with the largest losses to collect.
        save: whether to save the state before that step, for another replay.
    """

    run: Run
    attempt: Attempt
    step: int
    tokens: int
    save: bool = False


@dataclass(frozen=True)
class ActivationTotals:
    """Sums over some elements: of squares, of values, the largest absolute value, and their number."""

    squares: float
    values: float
    largest: float
    count: int


Key = tuple[str, str]
"""A direction, "forward" or "backward", and the name of a module."""
Samples = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Indices of sampled tokens in the step, and the projections of their activations."""


@dataclass(frozen=True)
class RankReplay:
    """What one rank saw of the step.

    Attributes:
        record: the step's line of metrics.jsonl.
        totals: of hidden states and of their gradients, in the order of the forward pass.
        samples: likewise.
        losses: the largest ones.
        notes: what was applied to the model.
    """

    record: Mapping[str, Any]
    totals: Mapping[Key, ActivationTotals]
    samples: Mapping[Key, Samples]
    losses: tuple[TokenLoss, ...]
    notes: tuple[str, ...] = ()

    def write(self, directory: Path, rank: int) -> None:
        """Write it into the replay's directory."""
        _get_rank_file(directory, rank).write_bytes(pickle.dumps(self))


def read_rank_replays(directory: Path, ranks: int) -> list[RankReplay]:
    """Return what all ranks of a replay in a directory of ours have written."""
    return [pickle.loads(_get_rank_file(directory, rank).read_bytes()) for rank in range(ranks)]


def _get_rank_file(directory: Path, rank: int) -> Path:
    return directory / f"replayed-{rank}.pickle"
