from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from titan.scaling.ranks import correlate_ranks, rank

VALUES = st.lists(st.integers(-9, 9), min_size=2, max_size=30)


@given(VALUES, st.randoms())
def test_rank_correlation_is_scipys(values: list[int], random: np.random.RandomState) -> None:
    other = [random.randint(-9, 9) for _ in values]
    if len(set(values)) < 2 or len(set(other)) < 2:
        assert np.isnan(correlate_ranks(values, other))
    else:
        assert correlate_ranks(values, other) == pytest.approx(stats.spearmanr(values, other).statistic, abs=1e-12)


def test_equal_values_share_a_rank() -> None:
    assert rank([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]


def test_none_and_one_have_no_correlation() -> None:
    assert np.isnan(correlate_ranks([], [])) and np.isnan(correlate_ranks([1], [2]))
