"""Cells of a table: the runs of one variant at one size and length, which differ in their seeds only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan.scaling.law import Indices, Numbers, Points
from titan.scaling.table import Table

LINE = 1e-4
"""Share of the variance of ln D beyond a linear function of ln N, below which N and D can't be separated."""

SAME = 0.05
"""Sizes, and lengths, that differ by less count as one."""
FEWEST_LEVELS = 3
"""Sizes, and lengths, from which on an exponent is determined beside E."""


@dataclass(frozen=True)
class Cells:
    """The cells of some variants.

    Attributes:
        n: parameters; [cells].
        d: tokens; [cells].
        y: mean of ln loss; [cells].
        variant: index; [cells].
        counts: of runs; [cells].
        seed_sd: standard deviation of ln loss over seeds, pooled over cells; None without repeats.
        seed_freedom: its degrees of freedom.
    """

    n: Numbers
    d: Numbers
    y: Numbers
    variant: Indices
    counts: Numbers
    seed_sd: float | None
    seed_freedom: int

    def build_points(self, variants: int, cell_variance: float | None = None) -> Points:
        """Return the points of a fit.

        Args:
            cell_variance: variance of ln loss that all seeds of a cell share; None: not known yet.
        """
        log_n, log_d = np.log(self.n), np.log(self.d)
        center = float(log_n.mean()), float(log_d.mean())
        return Points(
            log_n - center[0], log_d - center[1], self.y, self.variant, self._compute_precision(cell_variance), center,
            variants, is_line(log_n, log_d),
        )  # fmt: skip

    def _compute_precision(self, cell_variance: float | None) -> Numbers:
        """Return precisions relative to that of a single run: a mean over seeds has less noise of seeds only."""
        if not self.seed_sd or cell_variance is None:
            return np.ones(len(self.n))
        seed_variance = self.seed_sd**2
        return np.asarray((cell_variance + seed_variance) / (cell_variance + seed_variance / self.counts))


def list_levels(values: Numbers) -> list[float]:
    """Return the distinct sizes, or lengths, of cells in rising order; those within a few percent count as one."""
    levels: list[float] = []
    for value in np.sort(values):
        if not levels or value > levels[-1] * (1 + SAME):
            levels.append(float(value))
    return levels


def is_line(log_n: Numbers, log_d: Numbers) -> bool:
    """Return whether ln D is a linear function of ln N at all points."""
    x, z = log_n - log_n.mean(), log_d - log_d.mean()
    slope = float(x @ z) / max(float(x @ x), 1e-300)
    return bool(((z - slope * x) ** 2).mean() <= LINE * max(float((z**2).mean()), 1e-12))


def group_cells(table: Table, variants: Sequence[str]) -> Cells:
    """Return the cells of the named variants."""
    groups: dict[tuple[int, float, float], list[float]] = {}
    rows = zip(table.variant, table.n, table.d, table.loss, table.seed, strict=True)
    seen: set[tuple[str, float, float, float, str]] = set()
    for row in rows:
        name, n, d, loss, seed = row
        is_copy = bool(seed) and row in seen  # a run that is listed twice is no repeat
        seen.add(row)
        if name in variants and not is_copy:
            groups.setdefault((variants.index(name), float(n), float(d)), []).append(float(np.log(loss)))
    keys, values = list(groups), list(groups.values())
    squares = sum(float(((np.array(v) - np.mean(v)) ** 2).sum()) for v in values)
    freedom = sum(len(v) - 1 for v in values)
    return Cells(
        np.array([key[1] for key in keys]), np.array([key[2] for key in keys]), np.array([np.mean(v) for v in values]),
        np.array([key[0] for key in keys], dtype=np.int64), np.array([float(len(v)) for v in values]),
        float(np.sqrt(squares / freedom)) if freedom else None, freedom,
    )  # fmt: skip
