"""The loader: each row once, in order, whatever the ranks and restarts (law 2)."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataset.folders import write_folder
from titan.dataset import loader as loader_module
from titan.dataset.loader import IGNORED, Batch, Loader, Share, fixed_rows, row_hash
from titan.dataset.order import Order
from titan.dataset.shards import Split

SEQ_LEN = 4
ROWS = 37


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """37 rows of four tokens, every token different, in several shards."""
    folder = tmp_path_factory.mktemp("corpus")
    starts = range(0, ROWS * SEQ_LEN + 2, 15)
    documents = [np.arange(start, min(start + 15, ROWS * SEQ_LEN + 2)) for start in starts]
    return write_folder(folder, [documents[i : i + 3] for i in range(0, len(documents), 3)], 1000).train


def read(split: Split, share: Share, steps: int, n: int = 5, microbatches: int = 1, first: int = 0) -> list[Batch]:
    """The first batches of one rank."""
    order = Order(ROWS, 9)
    with Loader(
        split, order, seq_len=SEQ_LEN, rows_per_step=n, share=share, microbatches=microbatches, first_row=first
    ) as loader:
        return [next(loader) for _ in range(steps)]


def rows_of(batch: Batch) -> list[list[int]]:
    """The rows of weight one, checked against their targets."""
    tokens, targets = batch.tokens.reshape(-1, SEQ_LEN), batch.targets.reshape(-1, SEQ_LEN)
    real = (targets != IGNORED).all(axis=1)
    assert (targets[~real] == IGNORED).all()
    assert (tokens[~real] == 0).all()
    assert np.array_equal(tokens[real][:, 1:], targets[real][:, :-1])
    assert batch.tokens_valid == int((targets != IGNORED).sum())
    return [[*row, target[-1]] for row, target in zip(tokens[real].tolist(), targets[real].tolist(), strict=True)]


LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 50), lives=LIVES)
def test_every_row_once_in_order_under_any_layout(split: Split, n: int, lives: list[tuple[int, int, int]]) -> None:
    """Each life has its own number of ranks and micro-batches, and begins where the one before ended."""
    order, position = Order(ROWS, 9), 0
    for ranks, microbatches, steps in lives:
        shares = [read(split, Share(rank, ranks), steps, n, microbatches, position) for rank in range(ranks)]
        for step in range(steps):
            batches = [share[step] for share in shares]
            index = range(position, position + n)
            expected = [split.row(int(order.rows_at(i)), SEQ_LEN) for i in index]
            assert [row for batch in batches for row in rows_of(batch)] == [row.tolist() for row in expected]
            hashes = [row_hash(i, row) for i, row in zip(index, expected, strict=True)]
            assert sum(batch.hash for batch in batches) % 2**64 == sum(hashes) % 2**64
            assert {(b.first, b.last) for b in batches} == {(position, position + n - 1)}
            assert len({batch.tokens.shape for batch in batches}) == 1
            position += n


@pytest.mark.parametrize(
    ("n", "ranks", "microbatches", "shape"),
    [
        pytest.param(8, 2, 2, (2, 2, SEQ_LEN), id="even"),
        pytest.param(7, 2, 2, (2, 2, SEQ_LEN), id="short-last-rank"),
        pytest.param(5, 4, 1, (1, 2, SEQ_LEN), id="empty-last-rank"),
        pytest.param(1, 1, 3, (3, 1, SEQ_LEN), id="empty-micro-batches"),
    ],
)
def test_shapes(split: Split, n: int, ranks: int, microbatches: int, shape: tuple[int, ...]) -> None:
    for rank in range(ranks):
        batch = read(split, Share(rank, ranks), 1, n, microbatches)[0]
        assert batch.tokens.shape == batch.targets.shape == shape
        assert batch.tokens.dtype == batch.targets.dtype == np.int64


def test_the_order_is_asked_in_blocks_without_a_gap(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [rows_of(batch) for batch in read(split, Share(1, 2), 20, first=3)]
    monkeypatch.setattr(loader_module, "_ORDER_BLOCK", 7)
    assert [rows_of(batch) for batch in read(split, Share(1, 2), 20, first=3)] == expected


def test_epochs_go_on_without_a_gap(split: Split) -> None:
    rows = [tuple(row) for batch in read(split, Share(0, 1), 2 * ROWS, n=1) for row in rows_of(batch)]
    assert len(set(rows[:ROWS])) == len(set(rows[ROWS:])) == ROWS
    assert rows[:ROWS] != rows[ROWS:]


def test_the_hash_depends_on_place_and_content() -> None:
    row = np.arange(5, dtype="<u2")
    assert len({row_hash(0, row), row_hash(1, row), row_hash(0, row + 1)}) == 3
    assert row_hash(3, row) == 5501548783892418318


def test_an_error_in_the_background_reaches_next_each_time(split: Split, tmp_path: Path) -> None:
    order = Order(ROWS, 9)
    broken = Split(
        split.dtype, tuple(s.__class__(s.tokens, 0, s.start, tmp_path / "gone", s.offsets) for s in split.shards)
    )
    with Loader(broken, order, seq_len=SEQ_LEN, rows_per_step=2, share=Share(0, 1), microbatches=1) as loader:
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                next(loader)


def test_reading_ahead_is_bounded_and_close_ends_it(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    made, enough = [], threading.Event()
    original = Loader._batch

    def counted(self: Loader, first: int, rows: np.ndarray) -> Batch:
        made.append(first)
        if len(made) == 3:
            enough.set()
        return original(self, first, rows)

    monkeypatch.setattr(Loader, "_batch", counted)
    loader = Loader(
        split, Order(ROWS, 9), seq_len=SEQ_LEN, rows_per_step=2, share=Share(0, 1), microbatches=1, prefetch=3
    )
    assert enough.wait(10)
    loader._thread.join(0.05)
    assert loader._thread.is_alive()
    assert len(made) == 3
    assert next(loader).first == 0
    loader.close()
    loader.close()
    assert not loader._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_waiting_is_measured(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    original, gate = Loader._batch, threading.Event()

    def slow(self: Loader, first: int, rows: np.ndarray) -> Batch:
        gate.wait(0.05)
        return original(self, first, rows)

    monkeypatch.setattr(Loader, "_batch", slow)
    assert read(split, Share(0, 1), 1)[0].wait_seconds > 0.03


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"seq_len": 0}, id="seq_len"),
        pytest.param({"rows_per_step": 0}, id="rows_per_step"),
        pytest.param({"microbatches": 0}, id="microbatches"),
        pytest.param({"prefetch": 0}, id="prefetch"),
        pytest.param({"first_row": -1}, id="first_row"),
        pytest.param({"seq_len": SEQ_LEN + 1}, id="order-of-another-sequence-length"),
    ],
)
def test_impossible_sizes(split: Split, change: dict[str, int]) -> None:
    sizes = {"seq_len": SEQ_LEN, "rows_per_step": 2, "microbatches": 1} | change
    with pytest.raises(ValueError, match=r"at least|rows"):
        Loader(split, Order(ROWS, 0), share=Share(0, 1), **sizes)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_shares(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Share(rank, ranks)


@pytest.mark.parametrize(
    ("asked", "given"), [pytest.param(3, 3, id="some"), pytest.param(99, ROWS, id="all-there-are")]
)
def test_fixed_rows(split: Split, asked: int, given: int) -> None:
    tokens, targets = fixed_rows(split, SEQ_LEN, asked)
    assert tokens.shape == targets.shape == (given, SEQ_LEN)
    assert np.array_equal(tokens.reshape(-1), split.read(0, given * SEQ_LEN))
    assert np.array_equal(targets.reshape(-1), split.read(1, given * SEQ_LEN))
