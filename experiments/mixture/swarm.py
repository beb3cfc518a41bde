"""Runs on several mixtures as a table: weights, and the loss on each source's evaluation set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan import api
from titan.errors import ConfigError

Numbers = NDArray[np.float64]

LOSS = "validation_loss/"
"""Prefix of a source's loss in result.json."""
FREE = "dataset.weights", "training.seed"
"""Science settings in which runs of a swarm may differ."""


@dataclass(frozen=True)
class Swarm:
    """Runs on mixtures of the same sources; several runs of one mixture are averaged.

    Attributes:
        sources: their names.
        weights: shares of the sources; [mixtures, sources].
        losses: on the evaluation set of each source, nats per token; [mixtures, sources].
        skipped: directories of runs that have not finished.
    """

    sources: tuple[str, ...]
    weights: Numbers
    losses: Numbers
    skipped: tuple[str, ...] = ()

    def measure(self, target: Numbers) -> Numbers:
        """Return the loss of each mixture with the sources' losses weighted by `target` [sources]; [mixtures]."""
        return np.asarray(self.losses @ target)


def read_swarm(folder: str | os.PathLike[str]) -> Swarm:
    """Return the finished runs below a folder.

    Raises:
        ConfigError: where there are none, or they differ in more than weights and seeds.
    """
    found = [api.open_run(file.parent) for file in sorted(Path(folder).glob("**/run.yaml"))]
    finished = [run for run in found if run.result is not None and run.result.finished]
    if not finished:
        raise ConfigError(f"{folder}: has no finished run of a mixture; give the folder of a sweep.")
    for run in finished:
        _check_equal(finished[0], run)
    sources = _read_sources(finished[0])
    rows: dict[tuple[float, ...], list[list[float]]] = {}
    for run in finished:
        rows.setdefault(_read_weights(run, sources), []).append(_read_losses(run, sources))
    skipped = tuple(str(run.directory) for run in found if run not in finished)
    return Swarm(sources, np.array(list(rows)), np.array([np.mean(losses, 0) for losses in rows.values()]), skipped)


def read_shares(typed: str, shares: Mapping[str, float], sources: Sequence[str]) -> Numbers:
    """Return shares as an array with the sum one; sources that are not named have none; [sources].

    Args:
        typed: the setting's name, for messages.
        shares: by source.
        sources: of a swarm.

    Raises:
        ConfigError: for unknown sources, and weights that are no shares.
    """
    unknown = [name for name in shares if name not in sources]
    if unknown:
        raise ConfigError(
            f"{typed}={dict(shares)}: the runs have no source {unknown[0]}; they have {', '.join(sources)}."
        )
    values = np.array([float(shares.get(name, 0.0)) for name in sources])
    if not np.isfinite(values).all() or (values < 0).any() or not values.sum() > 0:
        raise ConfigError(f"{typed}={dict(shares)}: shares are numbers from 0 on, one of them above 0.")
    return np.asarray(values / values.sum())


def _read_sources(run: api.SavedRun) -> tuple[str, ...]:
    sources = tuple(run.config["dataset"].get("sources") or ())
    if len(sources) < 2:
        raise ConfigError(f"{run.directory}: was not trained on a mixture; give a sweep with dataset=mixture.")
    return sources


def _read_weights(run: api.SavedRun, sources: Sequence[str]) -> tuple[float, ...]:
    if run.config["dataset"].get("stages"):
        raise ConfigError(f"{run.directory}: its mixture changes by dataset.stages; give runs with one mixture each.")
    weights = run.config["dataset"]["weights"]
    values = [float(weights.get(name, 0.0)) for name in sources]
    return tuple(value / sum(values) for value in values)


def _read_losses(run: api.SavedRun, sources: Sequence[str]) -> list[float]:
    assert run.result is not None
    values = run.result.values
    missing = [name for name in sources if not isinstance(values.get(LOSS + name), float)]
    if missing:
        raise ConfigError(
            f"{run.directory}: has no loss on the evaluation set of {missing[0]}; train it with evaluation=default "
            "and a weight above 0 for each source."
        )
    return [values[LOSS + name] for name in sources]


def _check_equal(first: api.SavedRun, other: api.SavedRun) -> None:
    """Raise ConfigError where two runs differ in data or in a setting that changes what is learned."""
    a, b = (run.attempts[-1].document["science"] for run in (first, other))
    different = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and key not in FREE)
    if _count_evaluated(first) != _count_evaluated(other):  # no science, but it decides what the losses are of
        different.append("evaluation.tokens")
    if different:
        raise ConfigError(
            f"{other.directory}: differs from {first.directory} in {different[0]}; runs of a swarm differ in "
            "dataset.weights and training.seed alone."
        )


def _count_evaluated(run: api.SavedRun) -> Any:
    return run.config.get("evaluation", {}).get("tokens")
