from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from titan.scaling.early_stopping import (
    FEWEST_EARLIER,
    Trajectory,
    correlate_ranks,
    examine_position,
    find_decay,
    find_margin,
    find_stop,
    list_shape_settings,
    rank,
)

LENGTH, DECAYED, EARLY = 100, 80, 20
"""The steps of a run; one after and one before the learning rate has decayed."""


def make(name: str, early_loss: float, late_loss: float, end: float) -> Trajectory:
    losses = {EARLY: early_loss, DECAYED: late_loss, LENGTH: end}
    return Trajectory(name, losses, LENGTH, end, DECAYED)


def make_field(spread: float = 0.0) -> list[Trajectory]:
    """Return ten variants that end in the order of their losses after the decay, but for neighbours."""
    ends = [3.0 + 0.1 * k for k in range(10)]
    return [make(f"v{k}", 5.0, end + 0.1 + spread * (k % 2), end) for k, end in enumerate(ends)]


def test_a_variant_that_is_too_far_behind_stops() -> None:
    evidence = find_stop(make("new", 5.0, 3.2, 3.1), make_field())
    assert evidence is not None and evidence.position == DECAYED
    assert evidence.margin == 0 and evidence.correlation == pytest.approx(1)


def test_a_deficit_that_was_made_up_before_is_no_reason() -> None:
    field = make_field(spread=0.15)
    assert examine_position(field, DECAYED).margin == pytest.approx(0.05)
    assert find_stop(make("new", 5.0, 3.14, 3.0), field) is None
    assert find_stop(make("new", 5.0, 3.16, 3.0), field) is not None


def test_nothing_stops_before_its_rate_has_decayed_but_where_curves_have_one_shape() -> None:
    field, behind = make_field(), make("new", 9.0, 3.05, 3.0)
    assert find_stop(behind, field) is None
    evidence = find_stop(behind, field, same_shape=True)
    assert evidence is not None and evidence.position == EARLY


def test_few_earlier_variants_give_no_margin() -> None:
    behind = make("new", 5.0, 9.0, 9.0)
    assert find_stop(behind, make_field()) is not None
    assert find_stop(behind, make_field()[: FEWEST_EARLIER - 1]) is None
    assert find_stop(behind, []) is None


@pytest.mark.parametrize(
    ("rates", "start"),
    [
        ([0.1, 1.0, 0.8, 0.5, 0.2], 4),
        ([0.4, 0.9, 0.3, 1.0, 0.6], float("inf")),
        ([1.0, 0.3, float("nan"), 0.4], 4),
        ([0.4, 0.1], 1),
        ([1.0, 1.0], float("inf")),
    ],
    ids=["warm-up", "rises-again", "unknown", "peak-before", "constant"],
)
def test_the_learning_rate_has_decayed_after_its_last_high_value(rates: list[float], start: float) -> None:
    assert find_decay(range(1, len(rates) + 1), rates) == start


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (["dataset.weights.code", "parallelism", "layout", "training.seed"], []),
        (["optimizer.lr", "dataset.seed"], ["optimizer.lr"]),
        (["schedule", "training.global_batch"], ["schedule", "training.global_batch"]),
        (["training.steps", "model.dim", "precision"], ["training.steps", "model.dim", "precision"]),
    ],
    ids=["data", "lr", "schedule-and-batch", "steps-size-precision"],
)
def test_what_changes_the_shape_of_the_curve(names: list[str], shapes: list[str]) -> None:
    assert list_shape_settings(names) == shapes


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_no_larger_deficit_than_the_margin_was_made_up(pairs: list[tuple[int, int]]) -> None:
    losses, ends = np.array(pairs, dtype=float).T
    margin = find_margin(losses, ends)
    made_up = [a - b for a, x in pairs for b, y in pairs if x < y]
    assert margin == max([0, *made_up])


@given(st.lists(st.integers(-9, 9), max_size=30), st.randoms())
def test_rank_correlation_is_scipys(values: list[int], random: np.random.RandomState) -> None:
    assert rank(values).tolist() == stats.rankdata(values).tolist()
    other = [random.randint(-9, 9) for _ in values]
    if len(set(values)) < 2 or len(set(other)) < 2:
        assert np.isnan(correlate_ranks(values, other))
    else:
        assert correlate_ranks(values, other) == pytest.approx(stats.spearmanr(values, other).statistic, abs=1e-12)
