from __future__ import annotations

import numpy as np
import pytest

from experiments.mixture import regression
from experiments.mixture.regression import fit_mixture
from titan.errors import ConfigError
from titan.scaling.early_stopping import correlate_ranks


def draw(count: int, sources: int = 4, seed: int = 0) -> regression.Numbers:
    return np.random.default_rng(seed).dirichlet(np.ones(sources), count)


def lose(weights: regression.Numbers) -> regression.Numbers:
    """Return losses that fall with the logarithm of two weights, as published ones do."""
    return np.asarray(np.exp(1.2 - 0.08 * np.log(weights[:, 0] + 0.003) - 0.02 * np.log(weights[:, 1] + 0.003)))


def test_losses_of_unseen_mixtures_are_found() -> None:
    model, unseen = fit_mixture(draw(64), lose(draw(64))), draw(200, seed=1)
    assert correlate_ranks(model.predict(unseen), lose(unseen)) > 0.999
    assert model.predict(unseen) == pytest.approx(lose(unseen), rel=0.01)


def test_leave_one_out_error_is_that_of_fits_without_each_proxy() -> None:
    weights = draw(20)
    losses = lose(weights) * np.exp(np.random.default_rng(2).normal(0, 0.01, 20))
    model = fit_mixture(weights, losses)
    features = (regression._build_features(weights, model.small_weight) - model.mean) / model.scale
    errors = []
    for k in range(len(losses)):
        x, y = np.delete(features, k, 0), np.log(np.delete(losses, k))
        x = np.hstack([np.ones((len(x), 1)), x])
        penalty = np.diag([0.0] + [model.penalty] * features.shape[1])
        slopes = np.linalg.solve(x.T @ x + penalty, x.T @ y)
        errors.append(np.log(losses[k]) - slopes[0] - features[k] @ slopes[1:])
    assert model.error == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-9)


@pytest.mark.parametrize(
    ("weights", "losses", "words"),
    [
        pytest.param(draw(9) * 2, np.ones(9), "mixture 1 have the sum 2", id="sum"),
        pytest.param(-draw(9), np.ones(9), "not negative", id="negative"),
        pytest.param(draw(9), np.ones(8), "one loss above zero", id="count"),
        pytest.param(draw(9), np.zeros(9), "one loss above zero", id="zero"),
        pytest.param(draw(9), np.full(9, np.nan), "one loss above zero", id="nan"),
        pytest.param(draw(7), np.ones(7), "at least 8", id="few"),
    ],
)
def test_tables_that_determine_nothing_are_rejected(weights: object, losses: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fit_mixture(weights, losses)  # type: ignore[arg-type]


def test_a_source_that_no_proxy_has_changes_nothing() -> None:
    weights = np.hstack([draw(20), np.zeros((20, 1))])
    model = fit_mixture(weights, lose(weights))
    assert np.isfinite(model.predict(weights)).all()
