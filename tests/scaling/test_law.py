"""The laws, their derivatives, and fits of many rows at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_tables import LADDER, Law, chinchilla, kaplan, make_table, thrifty
from titan.scaling.fit import fit_robust
from titan.scaling.law import BEND, DATA, FLOOR, SIZE, compute_log_losses, differentiate, fit_rows, guess_parameters
from titan.scaling.noise import group_cells


@given(st.floats(0, 2), st.floats(0.05, 1), st.floats(0.05, 1), st.floats(-2.5, 1), st.floats(-2, 1), st.floats(-2, 1))
def test_derivatives_are_those_of_the_law(e: float, a: float, b: float, bend: float, ln_a: float, ln_b: float) -> None:
    table = make_table((chinchilla, thrifty(0.8)))
    points = group_cells(table, table.variants).build_points(2)
    theta = np.array([[e, a, b, bend, ln_a, ln_a + 0.1, ln_b, ln_b - 0.1]])
    slopes = differentiate(theta, points)[1][0]
    for k in range(points.columns):
        up, down = (
            compute_log_losses(theta + s * 1e-6 * (np.arange(8) == k), points.x, points.z, points.variant)
            for s in (1, -1)
        )
        assert np.abs((up - down)[0] / 2e-6 - slopes[:, k]).max() < 1e-6


@pytest.mark.parametrize(
    ("law", "wide", "expected"),
    [
        pytest.param(chinchilla, False, {FLOOR: 1.69, SIZE: 0.34, DATA: 0.28}, id="chinchilla"),
        pytest.param(chinchilla, True, {FLOOR: 1.69, SIZE: 0.34, DATA: 0.28, BEND: 0.0}, id="chinchilla-wide"),
        pytest.param(kaplan, True, {FLOOR: 0.0, SIZE: 0.076, DATA: 0.095, BEND: np.log(0.095)}, id="kaplan-wide"),
    ],
)
def test_exact_losses_give_the_parameters(law: Law, wide: bool, expected: dict[int, float]) -> None:
    points = group_cells(make_table((law,)), ("",)).build_points(1)
    theta, scale = fit_robust(points, wide)
    assert scale < 1e-4
    for column, value in expected.items():
        assert theta[column] == pytest.approx(value, abs=0.02), column


def test_rows_are_fitted_as_each_by_itself() -> None:
    points = group_cells(make_table(), ("",)).build_points(1)
    y = points.y + 0.01 * np.random.default_rng(0).normal(size=(5, len(points.y)))
    start = np.repeat(guess_parameters(points)[12:13], 5, axis=0)
    together, costs = fit_rows(points, start, y, 0.01)
    for k in range(5):
        alone, cost = fit_rows(points, start[:1], y[k], 0.01)
        assert np.allclose(alone[0], together[k], atol=1e-6) and cost[0] == pytest.approx(costs[k])


def test_a_bad_rung_moves_a_prediction_little() -> None:
    table = make_table(seed_sd=0.003)
    n, d = LADDER[0][-1:] * 4, np.array([1e10])
    losses = []
    for error in (0.0, 0.5):
        table.loss[5] += error
        points = group_cells(table, ("",)).build_points(1)
        theta = fit_robust(points, wide=False)[0][None]
        at = np.log(n) - points.center[0], np.log(d) - points.center[1], np.zeros(1, dtype=np.int64)
        losses.append(float(np.exp(compute_log_losses(theta, *at))[0, 0]))
    assert abs(losses[1] - losses[0]) < 0.01
