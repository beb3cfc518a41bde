"""Step Law (Li et al. 2025, arXiv:2503.04715): the best learning rate and batch by parameters and tokens.

A *cell* is a pair of parameters and tokens; each has up to 120 runs with other learning rates and batches. Regret is by
how much the loss at a rule's choice, interpolated between runs, exceeds the least loss of the cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator

from tests.measure.published_tables import FigureCheck, read_table
from titan.optimizer import step_law

Numbers = NDArray[np.float64]
Rule = Callable[[float, float], tuple[float, float]]
"""Returns the learning rate and the batch in tokens, for parameters and tokens."""

ROW = 2048
"""Tokens of a row."""
NEAR = 0.01
"""The share of excess loss up to which runs decide where the least loss of a cell is."""


class SettingsCell(NamedTuple):
    """Runs that differ in learning rate and batch: their logarithms, in rows of `points`, and losses."""

    parameters: float
    tokens: float
    points: Numbers
    losses: Numbers


def read_cells(kind: str) -> list[SettingsCell]:
    """Return the cells of dense or MoE models; MoE models of one size differ in what is active."""
    cells: Mapping[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for run in read_table("steplaw.csv"):
        if run["kind"] == kind:
            cells[run["N"], run["N_active"], run["D"]].append(run)
    return [_build_cell(float(n), float(d), runs) for (n, _, d), runs in sorted(cells.items())]


def _build_cell(parameters: float, tokens: float, runs: list[dict[str, str]]) -> SettingsCell:
    points = np.log([[float(run["lr"]), float(run["batch_rows"]) * ROW] for run in runs])
    return SettingsCell(parameters, tokens, points, np.array([float(run["loss"]) for run in runs]))


def find_optimum(cell: SettingsCell) -> Numbers:
    """Return where a quadratic through the best runs is least: logarithms of learning rate and batch."""
    near = cell.losses < cell.losses.min() * (1 + NEAR)
    centre = cell.points[cell.losses.argmin()]
    x, y = (cell.points[near] - centre).T
    features = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=1)
    c = np.linalg.lstsq(features, cell.losses[near], rcond=None)[0]
    return np.asarray(centre - np.linalg.solve([[2 * c[3], c[4]], [c[4], 2 * c[5]]], c[1:3]))


def fit_rule(cells: list[SettingsCell]) -> Rule:
    """Return powers of parameters and tokens for the learning rate, and of tokens for the batch, by least squares."""
    optima = np.array([find_optimum(cell) for cell in cells])
    logs = np.array([[1.0, np.log(cell.parameters), np.log(cell.tokens)] for cell in cells])
    rate = np.linalg.lstsq(logs, optima[:, 0], rcond=None)[0]
    batch = np.linalg.lstsq(logs[:, [0, 2]], optima[:, 1], rcond=None)[0]

    def choose(parameters: float, tokens: float) -> tuple[float, float]:
        n, d = np.log(parameters), np.log(tokens)
        return float(np.exp(rate @ [1, n, d])), float(np.exp(batch @ [1, d]))

    return choose


def use_auto(parameters: float, tokens: float) -> tuple[float, float]:
    """Return what titan chooses for optimizer.lr=auto, and the batch that it goes with."""
    return step_law.compute_learning_rate(parameters, tokens), step_law.compute_batch(tokens)


def compute_regret(cell: SettingsCell, rule: Rule) -> float:
    """Return the regret in percent; NaN where the rule leaves the grid."""
    choice = np.log(rule(cell.parameters, cell.tokens))
    loss = float(LinearNDInterpolator(cell.points, cell.losses)(*choice))
    return 100 * (loss / cell.losses.min() - 1)


def compute_left_out_regrets(cells: list[SettingsCell]) -> list[float]:
    """Return the regret in each cell of a rule fitted to all others."""
    return [compute_regret(cell, fit_rule([other for other in cells if other is not cell])) for cell in cells]


def check_steplaw() -> Iterator[FigureCheck]:
    """Yield the regrets of a rule fitted without each cell, and of optimizer.lr=auto."""
    dense, moe = read_cells("dense"), read_cells("moe")
    figures = {
        f"rule without each of {len(dense)} dense cells": compute_left_out_regrets(dense),
        f"lr=auto, {len(dense)} dense cells": [compute_regret(cell, use_auto) for cell in dense],
        f"lr=auto, {len(moe)} MoE cells": [compute_regret(cell, use_auto) for cell in moe],
    }
    for what, regrets in figures.items():
        median, most = float(np.median(regrets)), max(regrets)
        yield FigureCheck(
            "StepLaw", f"median regret, {what}", "<= 0.15 %", f"{median:.3f} % (most {most:.2f} %)", median <= 0.15
        )
