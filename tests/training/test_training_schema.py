"""The training axis: batches that are no whole rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.training.schema import Training


@given(st.integers(2, 4096), st.integers(1, 10**6))
def test_refused_batch_names_the_nearest_that_fits(seq_len: int, batch: int) -> None:
    training = Training(seq_len=seq_len, global_batch=batch)
    if batch % seq_len == 0:
        training.check()
        assert training.rows * seq_len == batch
        return
    with pytest.raises(ConfigError) as raised:
        training.check()
    nearest = int(str(raised.value).split()[-1].rstrip("."))
    assert nearest > 0
    assert nearest % seq_len == 0
    assert abs(nearest - batch) <= seq_len / 2 or nearest == seq_len
