"""Tables of runs that follow a known law, with noise of seeds and of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from titan.scaling.table import Table

Numbers = NDArray[np.float64]
Law = Callable[[Numbers, Numbers], Numbers]
LADDER = (np.geomspace(1e7, 1.6e8, 5), (5.0, 20.0, 80.0, 320.0))
"""Sizes, and tokens per parameter."""
SMALL_LADDER = (np.geomspace(1e7, 8e7, 4), (10.0, 20.0, 40.0))


def chinchilla(n: Numbers, d: Numbers) -> Numbers:
    """The law of Hoffmann et al. 2022, with their constants."""
    return 1.69 + 406.4 * n**-0.34 + 410.7 * d**-0.28


def kaplan(n: Numbers, d: Numbers) -> Numbers:
    """The law of Kaplan et al. 2020, with their constants: of another form, and without a floor."""
    return ((8.8e13 / n) ** (0.076 / 0.095) + 5.4e13 / d) ** 0.095


def thrifty(share: float) -> Law:
    """The law of a variant that needs a share of the tokens."""
    return lambda n, d: chinchilla(n, d / share)


def make_uneven(deviation: float, random: int) -> Law:
    """The law of Hoffmann et al. 2022, from which losses deviate smoothly by this share (standard deviation)."""
    generator = np.random.default_rng(random)
    frequencies, phases = generator.normal(size=(2, 40)) / 0.7, generator.uniform(0, 2 * np.pi, 40)

    def compute_losses(n: Numbers, d: Numbers) -> Numbers:
        angles = np.outer(np.log(n), frequencies[0]) + np.outer(np.log(d), frequencies[1]) + phases
        return np.asarray(chinchilla(n, d) * np.exp(deviation * np.sqrt(2 / 40) * np.cos(angles).sum(1)))

    return compute_losses


def make_table(
    laws: Sequence[Law] = (chinchilla,),
    ladder: tuple[Numbers, Sequence[float]] = LADDER,
    seeds: int = 1,
    seed_sd: float = 0.0,
    cell_sd: float = 0.0,
    random: int = 0,
) -> Table:
    """Return a table; variants are a, b and so on, and have no name where there is one."""
    generator, (sizes, multipliers) = np.random.default_rng(random), ladder
    n = np.repeat(sizes, len(multipliers))
    d = n * np.tile(multipliers, len(sizes))
    names = [""] if len(laws) == 1 else [chr(ord("a") + k) for k in range(len(laws))]
    losses, rows = [], []
    for name, law in zip(names, laws, strict=True):
        cells = law(n, d) + cell_sd * generator.normal(size=len(n))
        for seed in range(seeds):
            losses.append(cells + seed_sd * generator.normal(size=len(n)))
            rows += [(name, str(seed))] * len(n)
    copies = len(laws) * seeds
    return Table(
        np.tile(n, copies), np.tile(d, copies), np.concatenate(losses), tuple(seed for _, seed in rows),
        tuple(name for name, _ in rows), ("",) * len(rows), tuple(f"run {k}" for k in range(len(rows))),
        np.full(len(rows), np.nan),
    )  # fmt: skip
