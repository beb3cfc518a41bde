"""The order is a permutation of each epoch, a pure function, and looks random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.dataset.permutation import VERSION, Permutation, build_state, check_state, hash64
from titan.errors import ConfigError

SEEDS = st.integers(0, 2**64 - 1)


@given(rows=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    got = Permutation(rows, seed).rows_at(epoch * rows + np.arange(rows))
    assert np.array_equal(np.sort(got), np.arange(rows))


@given(rows=st.integers(2**31, 2**62), seed=SEEDS, start=st.integers(0, 2**62 - 200))
def test_huge_corpora_have_distinct_rows_in_range(rows: int, seed: int, start: int) -> None:
    index = np.arange(start, start + 100)
    index = index[index // rows == start // rows]
    got = Permutation(rows, seed).rows_at(index)
    assert got.min() >= 0
    assert got.max() < rows
    assert len(set(got.tolist())) == index.size


@given(rows=st.integers(1, 5000), seed=SEEDS, cuts=st.lists(st.integers(0, 400), max_size=5))
def test_grouping_does_not_matter(rows: int, seed: int, cuts: list[int]) -> None:
    order, whole = Permutation(rows, seed), np.arange(400)
    parts = [order.rows_at(part) for part in np.split(whole, sorted(cuts))]
    assert np.array_equal(np.concatenate(parts), order.rows_at(whole))
    assert np.array_equal(order.rows_at(whole.reshape(20, 20)).reshape(-1), order.rows_at(whole))
    assert order.rows_at(17) == order.rows_at(whole)[17]


def test_epochs_and_seeds_differ() -> None:
    first, again = Permutation(1000, 7).rows_at(np.arange(2000)).reshape(2, 1000)
    other = Permutation(1000, 8).rows_at(np.arange(1000))
    for a, b in ((first, again), (first, other)):
        assert (a == b).mean() < 0.01


def test_seed_and_epoch_are_not_interchangeable() -> None:
    """Seed s in epoch e + 1 is not seed s + 1 in epoch e, as it would be if the two were added."""
    epochs = [tuple(Permutation(500, s).rows_at(e * 500 + np.arange(500)).tolist()) for s in range(5) for e in range(5)]
    assert len(set(epochs)) == 25


@pytest.mark.parametrize("rows", [pytest.param(n, id=f"{n}-rows") for n in (2, 3, 5, 7, 12, 16, 17)])
def test_every_row_is_equally_often_at_every_position(rows: int) -> None:
    """Chi-square over rows x positions, whose mean is its degrees of freedom, (rows - 1)^2."""
    epochs = 4000
    got = Permutation(rows, 3).rows_at(np.arange(rows * epochs)).reshape(epochs, rows)
    counts = np.stack([np.bincount(got[:, position], minlength=rows) for position in range(rows)])
    freedom = (rows - 1) ** 2
    chi_square = ((counts - epochs / rows) ** 2 / (epochs / rows)).sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_successive_rows_are_unrelated() -> None:
    """The serial correlation of n random numbers is about 1 / sqrt(n)."""
    got = Permutation(100_000, 11).rows_at(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(got[:-1], got[1:])[0, 1]) < 5 / np.sqrt(got.size)


def test_the_mixer_has_avalanche() -> None:
    """Each input bit flips each output bit with a probability near one half."""
    x = np.random.default_rng(0).integers(0, 2**64, 4096, dtype=np.uint64)
    for bit in range(64):
        changed = hash64(x) ^ hash64(x ^ np.uint64(1 << bit))
        rates = np.unpackbits(changed.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
        assert rates.min() > 0.45
        assert rates.max() < 0.55


def test_the_order_is_the_one_of_this_version() -> None:
    """Another sequence under the same version would break every resume: bump VERSION with these figures."""
    assert VERSION == 1
    assert Permutation(10, 0).rows_at(np.arange(10)).tolist() == [0, 4, 5, 1, 6, 8, 3, 9, 2, 7]
    assert Permutation(10**12, 42).rows_at(np.array([0, 1, 10**12])).tolist() == [
        254601651220,
        68594934002,
        724354265934,
    ]


@pytest.mark.parametrize("rows", [0, -1, 2**62 + 1])
def test_rows_out_of_range(rows: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        Permutation(rows, 0)


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0).rows_at(np.array([1, -1]))


@given(
    rows=st.integers(1, 700),
    block=st.integers(1, 40),
    window=st.none() | st.integers(1, 800),
    seed=SEEDS,
    epoch=st.integers(0, 1000),
)
def test_blocks_and_windows_permute_too(rows: int, block: int, window: int | None, seed: int, epoch: int) -> None:
    got = Permutation(rows, seed, block, window).rows_at(epoch * rows + np.arange(rows))
    size = min(window or rows, rows)
    for first in range(0, rows, size):
        part = got[first : first + size]
        assert np.array_equal(np.sort(part), np.arange(first, min(first + size, rows)))
        if size % block == 0 and part.size == size:
            numbers = part // block
            assert all(len(set(numbers[i : i + block].tolist())) == 1 for i in range(0, size, block))


@pytest.mark.parametrize("window", [pytest.param(None, id="whole"), pytest.param(250, id="windows")])
def test_blocks_and_their_rows_change_places(window: int | None) -> None:
    got = Permutation(1000, 3, 50, window).rows_at(np.arange(2000)).reshape(2, 20, 50)
    assert (got[0] == got[1]).mean() < 0.05
    inside = got % 50
    assert len({tuple(order) for order in inside[0].tolist()}) == 20
    assert (np.diff(inside[0]) == 1).mean() < 0.1


def test_a_window_is_known_before_the_end() -> None:
    """The rows of a full window don't depend on how many rows there will be."""
    short, long = Permutation(130, 5, window=60), Permutation(10**9, 5, window=60)
    assert np.array_equal(short.rows_at(np.arange(120)), long.rows_at(np.arange(120)))


@pytest.mark.parametrize(("block", "window"), [(0, None), (1, 0), (-1, 5)])
def test_sizes_out_of_range(block: int, window: int | None) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(10, 0, block, window)


@pytest.mark.full
@pytest.mark.parametrize("modulus", [2, 3, 8, 17, 64])
@pytest.mark.parametrize(
    ("rows", "block", "window"),
    [
        pytest.param(65_536, 1, None, id="a-power-of-two"),
        pytest.param(100_003, 1, None, id="a-prime"),
        pytest.param(99_999, 100, None, id="blocks"),
        pytest.param(100_000, 1, 10_000, id="windows"),
    ],
)
def test_residues_are_independent_of_the_place(rows: int, block: int, window: int | None, modulus: int) -> None:
    """Chi-square of (place mod m) against (row mod m): a stride of ranks must not pick rows of a kind."""
    got = Permutation(rows, 11, block, window).rows_at(np.arange(rows))
    table = np.zeros((modulus, modulus))
    np.add.at(table, (np.arange(rows) % modulus, got % modulus), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / rows
    freedom = (modulus - 1) ** 2
    assert abs(((table - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_state_continues() -> None:
    assert check_state(build_state(123, "abc"), lambda rows: "abc" if rows == 123 else "xyz") == 123


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        pytest.param(build_state(1, "abc") | {"order": 0}, ["version 0", f"version {VERSION}"], id="other-order"),
        pytest.param(build_state(1, "abc"), ["abc", "xyz"], id="other-data"),
        pytest.param({}, ["version"], id="nothing"),
    ],
)
def test_state_of_other_data_is_refused(saved: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_state(saved, lambda rows: "xyz")
    assert all(word in str(refusal.value) for word in words)
