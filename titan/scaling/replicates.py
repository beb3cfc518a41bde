"""One law with its uncertainty: the plain law, the wide law, and replicates of the wide law.

Each replicate draws what may separate the losses from the law: noise of seeds and cells, a smooth lack of fit, and a
prior mean for the bend; subtracts it from the losses, and fits again (randomise, then optimise: Bardsley et al. 2014).
Resampling whole rungs instead would leave one size of four out of a third of the fits, which then have no exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.scaling.cells import Cells
from titan.scaling.discrepancy import Discrepancy, SmoothDraws, estimate_discrepancy
from titan.scaling.law import BEND, Indices, Numbers, Points, compute_log_losses, differentiate, guess_parameters
from titan.scaling.solve import fit_rows

BEND_SD = 1.5
"""Standard deviation of ln k before the data: k within a factor of 4.5 of the plain law's 1."""
PASSES = 4
"""Fits in turn with the robust scale of residuals."""
MAD = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""
PRECISE = 1e-7
"""The least scale of residuals of ln loss, that of losses in fp32."""


@dataclass(frozen=True)
class Law:
    """A law fitted to the cells of some variants.

    Attributes:
        variants: their names.
        cells: what was fitted.
        points: the same, as fitted.
        plain: parameters of the plain law, see `titan.scaling.law`; [columns].
        wide: parameters of the wide law; [columns].
        scale: robust standard deviation of residuals of the wide law in ln loss, of a single run.
        cell_sd: standard deviation that seeds of a cell share, lack of fit included; None without repeated seeds.
        discrepancy: what separates losses from the law.
        replicates: of the wide law; [replicates, columns].
        draws: the discrepancies that they assume.
        normals: standard normal noise of a new run; [replicates].
    """

    variants: tuple[str, ...]
    cells: Cells
    points: Points
    plain: Numbers
    wide: Numbers
    scale: float
    cell_sd: float | None
    discrepancy: Discrepancy
    replicates: Numbers
    draws: SmoothDraws
    normals: Numbers

    @property
    def bend_weight(self) -> float:
        """Return the weight of the bend's prior in costs."""
        return (self.scale / BEND_SD) ** 2

    def compute_residuals(self) -> Numbers:
        """Return ln loss minus that of the wide law, in standard deviations; [cells]."""
        points = self.points
        fitted = compute_log_losses(self.wide[None], points.x, points.z, points.variant)[0]
        return np.asarray((points.y - fitted) * np.sqrt(points.precision) / self.scale)

    def locate(self, n: Numbers, d: Numbers, variant: str) -> tuple[Numbers, Numbers, Indices]:
        """Return centred ln N and ln D, and the index of the variant; [targets] each."""
        x, z = np.log(n) - self.points.center[0], np.log(d) - self.points.center[1]
        return x, z, np.full(len(x), self.variants.index(variant), dtype=np.int64)

    def draw_losses(self, n: Numbers, d: Numbers, variant: str, noise: bool = True) -> Numbers:
        """Return losses by the replicates; [replicates, targets].

        Args:
            n: parameters; [targets].
            d: tokens; [targets].
            noise: whether of a single new run, with its noise, instead of the mean over runs.
        """
        x, z, index = self.locate(n, d, variant)
        logs = compute_log_losses(self.replicates, x, z, index) + self.draws.evaluate(x, z, index)
        if noise:  # of losses lower than the fitted ones as large in nats, not relative: the wider of both
            typical = float(self.points.y.mean())
            logs += (self.draws.noise * self.normals)[:, None] * np.exp(np.maximum(0.0, typical - logs))
        return np.asarray(np.exp(logs))

    @property
    def slope(self) -> float:
        """Return the slope of ln D over ln N, of rungs on a line."""
        return float(self.points.x @ self.points.z) / float(self.points.x @ self.points.x)

    def draw_own(self, n: Numbers, d: Numbers, variant: str) -> Numbers:
        """Return the mean loss by each replicate at a size and length for each; [replicates].

        Args:
            n: parameters; [replicates].
            d: tokens; [replicates].
        """
        x, z, index = self.locate(n, d, variant)
        x, z, index = x[:, None], z[:, None], index[:1]
        logs = compute_log_losses(self.replicates, x, z, index) + self.draws.evaluate(x, z, index)
        return np.asarray(np.exp(logs[:, 0]))

    def compute_plain(self, n: Numbers, d: Numbers, variant: str) -> Numbers:
        """Return losses by the plain law; [targets]."""
        return np.asarray(np.exp(compute_log_losses(self.plain[None], *self.locate(n, d, variant))[0]))


def fit_robust(points: Points, wide: bool) -> tuple[Numbers, float]:
    """Return the parameters of a law and the robust standard deviation of its residuals in ln loss.

    Args:
        wide: whether the bend is fitted.
    """
    starts = guess_parameters(points)
    found, costs = fit_rows(points, starts, points.y)
    theta, scale = found[costs.argmin()][None], 0.0
    free = points.list_free(wide)
    correction = np.sqrt(len(points.x) / max(1, len(points.x) - int(free.sum())))
    for _ in range(PASSES):
        residuals = points.y - compute_log_losses(theta, points.x, points.z, points.variant)[0]
        scale = max(PRECISE, MAD * correction * float(np.median(np.abs(residuals) * np.sqrt(points.precision))))
        weight = (scale / BEND_SD) ** 2 if free[BEND] else 0.0
        theta, _ = fit_rows(points, theta, points.y, scale, free, 0.0, weight)
    return theta[0], scale


def build_law(cells: Cells, variants: tuple[str, ...], replicates: int, seed: int) -> Law:
    """Fit a law and its replicates."""
    generator = np.random.default_rng(seed)
    cell_sd = _estimate_cell_sd(cells, len(variants))
    points = cells.build_points(len(variants), None if cell_sd is None else cell_sd**2)
    plain, _ = fit_robust(points, wide=False)
    wide, scale = fit_robust(points, wide=True)
    discrepancy = _estimate_discrepancy(points, wide, scale)
    draws = discrepancy.draw(replicates, len(variants), generator)
    y = points.y - draws.evaluate(points.x, points.z, points.variant)
    y -= draws.noise[:, None] * generator.normal(size=y.shape) / np.sqrt(points.precision)
    bend = BEND_SD * generator.normal(size=replicates)
    scale_drawn = max(scale, float(np.median(draws.noise)))
    starts = np.repeat(wide[None], replicates, axis=0)
    weight = 0.0 if points.is_line else (scale_drawn / BEND_SD) ** 2
    fitted, _ = fit_rows(points, starts, y, scale_drawn, points.list_free(), bend, weight)
    normals = generator.normal(size=replicates)
    return Law(variants, cells, points, plain, wide, scale, cell_sd, discrepancy, fitted, draws, normals)


def _estimate_discrepancy(points: Points, theta: Numbers, scale: float) -> Discrepancy:
    logs, slopes = differentiate(theta[None], points)
    free = points.list_free() & (np.arange(points.columns) != 0) if theta[0] <= 0 else points.list_free()
    return estimate_discrepancy(points, slopes[0][:, free], points.y - logs[0], scale)


def _estimate_cell_sd(cells: Cells, variants: int) -> float | None:
    """Return the standard deviation of ln loss that all seeds of a cell share; None without repeated seeds."""
    if not cells.seed_sd:
        return None
    points = cells.build_points(variants)
    _, scale = fit_robust(points, wide=True)
    return float(np.sqrt(max(0.0, scale**2 - cells.seed_sd**2 * float((1 / cells.counts).mean()))))
