"""RegMix (Liu et al. 2024, arXiv:2407.01492): from runs of 1M parameters to the order of mixtures at 1M, 60M and 1B."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from experiments.mixture.regression import fit_mixture
from tests.measure.published_tables import FigureCheck, read_table
from titan.scaling.early_stopping import correlate_ranks

Numbers = NDArray[np.float64]

BOUNDS = {"1M": 0.96, "60M": 0.95, "1B": 0.90}
"""The least rank correlation by size of the models that are predicted, the mean over evaluation sets."""


def read_mixtures() -> dict[str, Numbers]:
    """Return the weights of the mixtures by the name of their set; [mixtures, sources]."""
    return _group(read_table("regmix.csv"), ("set",), skip=2)


def read_losses() -> dict[str, Numbers]:
    """Return losses by set and size, as in "train 1M"; [mixtures, evaluation sets]."""
    return _group(read_table("regmix_losses.csv"), ("set", "size"), skip=3)


def _group(rows: list[dict[str, str]], keys: tuple[str, ...], skip: int) -> dict[str, Numbers]:
    groups: dict[str, list[list[float]]] = {}
    for row in rows:
        values = [float(value) for value in list(row.values())[skip:]]
        groups.setdefault(" ".join(row[key] for key in keys), []).append(values)
    return {name: np.array(group) for name, group in groups.items()}


def compute_correlations(chosen: slice) -> dict[str, float]:
    """Return the mean rank correlation over evaluation sets by size, with some of the 512 runs of 1M."""
    weights, losses = read_mixtures(), read_losses()
    train = losses["train 1M"][chosen]
    models = [fit_mixture(weights["train"][chosen], losses_of_set) for losses_of_set in train.T]
    correlations = {}
    for name, size in (("test", "1M"), ("test", "60M"), ("test_1B", "1B")):
        pairs = zip(models, losses[f"{name} {size}"].T, strict=True)
        correlations[size] = float(np.mean([correlate_ranks(m.predict(weights[name]), truth) for m, truth in pairs]))
    return correlations


def check_regmix() -> Iterator[FigureCheck]:
    """Yield rank correlations with all proxies, and the mean of those with each quarter of them."""
    quarters = [compute_correlations(slice(k, k + 128)) for k in range(0, 512, 128)]
    means = {size: float(np.mean([quarter[size] for quarter in quarters])) for size in BOUNDS}
    for words, correlations in (
        ("512 runs of 1M", compute_correlations(slice(512))),
        ("128 runs of 1M, mean of 4 sets", means),
    ):
        for size, correlation in correlations.items():
            what = f"rank correlation of 13 losses at {size}, {words}"
            yield FigureCheck(
                "RegMix", what, f">= {BOUNDS[size]:.2f}", f"{correlation:.3f}", correlation >= BOUNDS[size]
            )
