"""The loader: each row once, in order, whatever the ranks, restarts, batches and sources (law 2)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prepared_folders import make_documents, publish_unit, read_row, write_corpus, write_manifest
from tests.support.tiers import select_cases
from titan.dataset import loader as loader_module
from titan.dataset.loader import (
    DOCUMENTS,
    IGNORED,
    POSITIONS,
    TARGETS,
    TOKENS,
    Batch,
    BatchShape,
    Loader,
    hash_key,
    hash_row,
    read_first_rows,
)
from titan.dataset.mixture import BLOCK, MixturePhase, RowMixture, TokenSequences
from titan.dataset.shards import Corpus, open_corpus
from titan.errors import RunError
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.schema import DataShard
from titan.training.schema import Training

SEQ_LEN = 4
ROWS = 37
LENGTHS = (15, 1, 3, 40, 2, 2, 20, 4, 4, 59)
UNITS = [make_documents(*LENGTHS[:4]), make_documents(*LENGTHS[4:7], start=59), make_documents(*LENGTHS[7:], start=83)]
BEGINS = np.cumsum((0, *LENGTHS[:-1])).tolist()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """37 rows of four tokens, every token different, in three shards and ten documents."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", UNITS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Another one of 8 rows, whose tokens are from 500 on."""
    return write_corpus(tmp_path_factory.mktemp("small") / "c", [make_documents(33, start=500)], digest="e")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Corpus]:
    """The same corpus, seen when none, one, two and all of its units were there; it is complete by now."""
    folder = tmp_path_factory.mktemp("live") / "c"
    seen, entries = [write_corpus(folder, UNITS, num_units=0)], []
    for number, unit in enumerate(UNITS):
        entries.append(publish_unit(folder, number, unit))
        seen.append(open_corpus(folder, partial=True))
    write_manifest(folder, entries)
    return [*seen, open_corpus(folder)]


def alone(corpus: Corpus, **more: Any) -> RowMixture:
    return RowMixture((TokenSequences("one", corpus, SEQ_LEN, 9, **more),), (MixturePhase(0, (BLOCK,)),))


def both(corpus: Corpus, small: Corpus) -> RowMixture:
    """Two stages of a mixture, with rows left out in both."""
    rows = tuple(TokenSequences(str(c.digest), c, SEQ_LEN, 9) for c in (corpus, small))
    return RowMixture(rows, (MixturePhase(0, (7000, 3000)), MixturePhase(23, (2000, 8000))), ((3, 5), (20, 31)), seed=9)


def plan(rows: int, *grow: tuple[int, int]) -> Training:
    """Steps of `rows` rows, which grow at row counts."""
    tokens = tuple((first * SEQ_LEN, batch * SEQ_LEN) for first, batch in grow)
    return Training(global_batch=rows * SEQ_LEN, seq_len=SEQ_LEN, grow=tokens)


def add_up(n: int, grow: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Row counts and the batches from them on, of the rows until each and those that it adds."""
    return [(sum(gap for gap, _ in grow[:k]), n + sum(more for _, more in grow[:k])) for k in range(1, len(grow) + 1)]


def read(
    mix: RowMixture, training: Training, share: DataShard, steps: int, microbatches: int = 1, step: int = 1, **more: Any
) -> list[Batch]:
    """The batches of one rank from `step` on."""
    shape = BatchShape(microbatches, -(-share.count_slots(training.rows) // microbatches), SEQ_LEN)
    with Loader(mix, training, share, shape, step=step, **more) as loader:
        return [next(loader) for _ in range(steps)]


def rows_of(batch: Batch) -> list[list[int]]:
    """The rows of weight one, checked against their targets."""
    tokens, targets = batch.tokens.reshape(-1, SEQ_LEN), batch.targets.reshape(-1, SEQ_LEN)
    real = (targets != IGNORED).all(axis=1)
    assert (targets[~real] == IGNORED).all()
    assert (tokens[~real] == 0).all()
    assert np.array_equal(tokens[real][:, 1:], targets[real][:, :-1])
    assert batch.valid == int((targets != IGNORED).sum())
    assert batch.pairs == int(real.sum()) * SEQ_LEN**2
    return [[*row, target[-1]] for row, target in zip(tokens[real].tolist(), targets[real].tolist(), strict=True)]


LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3)
GROW = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=2)
KINDS: dict[str, Callable[[Corpus, Corpus], RowMixture]] = {
    "alone": lambda corpus, small: alone(corpus),
    "blocks": lambda corpus, small: alone(corpus, block=5),
    "windows": lambda corpus, small: alone(corpus, window=11),
    "mixture": both,
}


@pytest.mark.parametrize("kind", select_cases(KINDS, ("mixture",)))
@given(n=st.integers(1, 20), grow=GROW, attempts=LIVES)
def test_every_row_once_in_order_under_any_layout(
    corpus: Corpus, small: Corpus, kind: str, n: int, grow: list[tuple[int, int]], attempts: list[tuple[int, int, int]]
) -> None:
    """Each attempt has its own number of ranks and micro-batches, and begins where the one before ended."""
    every_row_once(KINDS[kind](corpus, small), lambda: KINDS[kind](corpus, small), n, grow, attempts)


@pytest.mark.full
@given(n=st.integers(1, 20), grow=GROW, attempts=LIVES, done=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_every_row_once_in_order_while_data_are_prepared(
    stages: list[Corpus], small: Corpus, n: int, grow: list[tuple[int, int]], attempts: list[Any], done: list[int]
) -> None:
    """Each rank of each attempt has seen another part of the data when it begins."""
    seen = iter(done * 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "_POLL_SECONDS", 0.001)
        every_row_once(mixed_live(stages[-1], small), lambda: mixed_live(stages[next(seen)], small), n, grow, attempts)


def mixed_live(corpus: Corpus, small: Corpus) -> RowMixture:
    rows = (TokenSequences("live", corpus, SEQ_LEN, 9, window=6), TokenSequences("small", small, SEQ_LEN, 9))
    return RowMixture(rows, (MixturePhase(0, (BLOCK, 0)), MixturePhase(11, (6000, 4000))), seed=9)


def every_row_once(
    mix: RowMixture,
    anew: Callable[[], RowMixture],
    n: int,
    grow: list[tuple[int, int]],
    attempts: list[tuple[int, int, int]],
) -> None:
    """Attempts one after the other against the plain definition; `anew` gives each rank its rows."""
    training, step, position = plan(n, *add_up(n, grow)), 1, 0
    for ranks, microbatches, steps in attempts:
        shares = [read(anew(), training, DataShard(rank, ranks), steps, microbatches, step) for rank in range(ranks)]
        for batches in zip(*shares, strict=True):
            count = training.find_phase(step).rows
            numbers = mix.compute_row_numbers(np.arange(position, position + count))
            which, rows = mix.locate_rows(numbers)
            expected = [read_row(mix.sources[k].split, row, SEQ_LEN) for k, row in zip(which, rows, strict=True)]
            assert [row for batch in batches for row in rows_of(batch)] == [row.tolist() for row in expected]
            hashes = [hash_row(number, row) for number, row in zip(numbers.tolist(), expected, strict=True)]
            assert sum(batch.hash for batch in batches) % 2**64 == sum(hashes) % 2**64
            assert len({batch.tokens.shape for batch in batches}) == 1
            position, step = position + count, step + 1
            assert {(b.first, b.last, b.rows_read) for b in batches} == {(numbers[0], numbers[-1], position)}
    assert position == training.count_rows_before(step)


@given(n=st.integers(1, 50), grow=GROW, steps=st.integers(1, 60))
def test_batches_grow_at_the_first_step_after_their_tokens(n: int, grow: list[tuple[int, int]], steps: int) -> None:
    pairs = add_up(n, grow)
    training, before = plan(n, *pairs), 0
    for step in range(1, steps + 1):
        due = [rows for first, rows in pairs if first <= before]
        assert training.count_rows_before(step) == before
        assert training.find_phase(step).rows == (due[-1] if due else n)
        before += training.find_phase(step).rows


@pytest.mark.parametrize(
    ("n", "ranks", "microbatches", "shape"),
    [
        pytest.param(8, 2, 2, (2, 2, SEQ_LEN), id="even"),
        pytest.param(7, 2, 2, (2, 2, SEQ_LEN), id="short-last-rank"),
        pytest.param(5, 4, 1, (1, 2, SEQ_LEN), id="empty-last-rank"),
        pytest.param(1, 1, 3, (3, 1, SEQ_LEN), id="empty-micro-batches"),
    ],
)
def test_shapes(corpus: Corpus, n: int, ranks: int, microbatches: int, shape: tuple[int, ...]) -> None:
    for rank in range(ranks):
        batch = read(alone(corpus), plan(n), DataShard(rank, ranks), 1, microbatches)[0]
        assert batch.tokens.shape == batch.targets.shape == shape
        assert batch.fields.dtype == np.int32


def test_a_larger_batch_has_more_micro_batches_of_the_same_size(corpus: Corpus) -> None:
    batches = read(alone(corpus), plan(4, (8, 10)), DataShard(0, 2), 4, microbatches=2)
    assert [batch.tokens.shape for batch in batches] == [(2, 1, SEQ_LEN)] * 2 + [(5, 1, SEQ_LEN)] * 2


def test_the_order_is_asked_in_blocks_without_a_gap(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    training = plan(5, (31, 7))
    expected = [rows_of(batch) for batch in read(alone(corpus), training, DataShard(1, 2), 20, step=3)]
    monkeypatch.setattr(loader_module, "_ORDER_BLOCK", 7)
    assert [rows_of(batch) for batch in read(alone(corpus), training, DataShard(1, 2), 20, step=3)] == expected


def test_epochs_go_on_without_a_gap(corpus: Corpus) -> None:
    rows = [tuple(row) for batch in read(alone(corpus), plan(1), DataShard(0, 1), 2 * ROWS) for row in rows_of(batch)]
    assert len(set(rows[:ROWS])) == len(set(rows[ROWS:])) == ROWS
    assert rows[:ROWS] != rows[ROWS:]


@pytest.mark.parametrize("masks", [False, True])
def test_a_row_has_the_same_key_on_all_ranks_and_after_a_restart(masks: bool, corpus: Corpus) -> None:
    """A function of the seed and the row's number, which goes on where an epoch ends."""

    def read_keys(ranks: int, step: int, steps: int) -> list[list[int]]:
        shares = [DataShard(rank, ranks) for rank in range(ranks)]
        options: Any = {"mask_documents": masks, "has_keys": True}
        batches = [read(alone(corpus), plan(5), share, steps, step=step, **options) for share in shares]
        parts = [[Microbatches.from_fields(torch.from_numpy(b.fields).long()) for b in each] for each in batches]
        assert all(rows.documents is None or masks for each in parts for rows in each)
        assert all(
            torch.equal(part.to_fields(), Microbatches.from_fields(part.to_fields()).to_fields())
            for each in parts
            for part in each
        )
        return [[int(key) for each in parts for key in each[i].keys.flatten() if key] for i in range(steps)]  # type: ignore[union-attr]

    whole = read_keys(1, 1, 10)
    assert whole == [[hash_key(0, 5 * step + row) for row in range(5)] for step in range(10)]
    assert read_keys(3, 1, 10) == whole and read_keys(2, 8, 3) == whole[7:]
    assert len({key for keys in whole for key in keys}) == 50 and max(max(whole)) > 2**60
    first = read_first_rows(corpus.validation, SEQ_LEN, 2, masks, False, has_keys=True)
    assert all(0 <= value < 2**31 for value in first[-1].flatten())


def test_documents_are_kept_apart(corpus: Corpus) -> None:
    """Against the plain definition, token for token: every token is its own number, so it tells its document."""
    document = np.searchsorted(BEGINS, np.arange(200), side="right")
    batches = read(alone(corpus), plan(5), DataShard(0, 1), 8, 2, mask_documents=True)
    met = 0
    for batch in batches:
        rows = batch.fields.reshape(4, -1, SEQ_LEN).transpose(1, 2, 0)
        pairs = 0
        for row in rows[:5].tolist():
            mine = document[[token[TOKENS] for token in row]]
            for place, token in enumerate(row):
                crosses = document[token[TOKENS] + 1] != mine[place]
                assert token[TARGETS] == (IGNORED if crosses else token[TOKENS] + 1)
                assert token[POSITIONS] == (mine[: place + 1] == mine[place]).sum() - 1
                met += crosses
            numbers = [token[DOCUMENTS] for token in row]
            assert numbers == [len(set(mine[: i + 1])) - 1 for i in range(SEQ_LEN)]
            pairs += sum((mine == which).sum() ** 2 for which in set(mine))
        assert batch.pairs == pairs
        assert batch.valid == int((batch.targets != IGNORED).sum())
        empty = rows[5:]
        assert (empty[..., TARGETS] == IGNORED).all()
        assert (empty[..., DOCUMENTS] == 0).all()
        assert (empty[..., POSITIONS] == np.arange(SEQ_LEN)).all()
    assert met > 5
    plain = read(alone(corpus), plan(5), DataShard(0, 1), 8, 2)
    assert [batch.hash for batch in plain] == [batch.hash for batch in batches]


def test_tokens_that_do_not_count_are_no_targets(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS, masked=True)
    batch = read(alone(corpus), plan(6), DataShard(0, 1), 1)[0]
    assert (batch.targets == np.where((batch.tokens + 1) % 2 == 0, batch.tokens + 1, IGNORED)).all()
    assert batch.valid == 12


def test_a_rank_that_does_not_read_has_room_for_what_it_is_handed(corpus: Corpus) -> None:
    reading = read(alone(corpus), plan(7), DataShard(1, 2), 3, 2, mask_documents=True)
    silent = read(alone(corpus), plan(7), DataShard(1, 2), 3, 2, mask_documents=True, is_reader=False)
    for one, other in zip(reading, silent, strict=True):
        assert (one.first, one.last, one.rows_read) == (other.first, other.last, other.rows_read)
        assert one.fields.shape == other.fields.shape
        assert (other.hash, other.valid, other.pairs) == (0, 0, 0)


def test_the_hash_depends_on_place_and_content() -> None:
    row = np.arange(5, dtype="<u2")
    assert len({hash_row(0, row), hash_row(1, row), hash_row(0, row + 1)}) == 3
    assert hash_row(3, row) == 5501548783892418318


def test_training_waits_for_data_that_are_being_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and the batches are those of data that were there from the start."""
    monkeypatch.setattr(loader_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(loader_module, "_LOG_SECONDS", 0.01)
    whole = read(alone(write_corpus(tmp_path / "whole", UNITS), window=6), plan(5), DataShard(0, 1), 12)
    folder, lines, entries = tmp_path / "live", list[str](), list[Any]()

    def tell(line: str) -> None:
        lines.append(line)
        if len(entries) < len(UNITS):
            entries.append(publish_unit(folder, len(entries), UNITS[len(entries)]))
            if len(entries) == len(UNITS):
                write_manifest(folder, entries)

    live = read(alone(write_corpus(folder, UNITS, num_units=0), window=6), plan(5), DataShard(0, 1), 12, log=tell)
    assert [batch.hash for batch in live] == [batch.hash for batch in whole]
    assert len(lines) >= 3
    assert lines[0] == "waiting for data: one is still being prepared: 0 of 3 shards, 0 tokens, are done"


@pytest.mark.parametrize(
    ("failed", "patience", "words"),
    [
        pytest.param({"error": "x.txt: not UTF-8"}, 60.0, "x.txt: not UTF-8", id="the-preparation-failed"),
        pytest.param(None, 0.05, "waited 0 s for data: one is still", id="nobody-prepares"),
    ],
)
def test_waiting_in_vain_fails(
    tmp_path: Path, failed: Any, patience: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "_POLL_SECONDS", 0.01)
    corpus = write_corpus(tmp_path / "c", UNITS, num_units=1)
    if failed:
        (tmp_path / "c" / "failed.json").write_text(json.dumps(failed))
    with pytest.raises(RunError, match=words):
        read(alone(corpus, window=6), plan(5), DataShard(0, 1), 12, patience=patience)


def test_who_has_given_up_waiting_does_not_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that come after a void step must not be taken for those of the step after it."""
    monkeypatch.setattr(loader_module, "_POLL_SECONDS", 0.01)
    corpus = write_corpus(tmp_path / "c", UNITS, num_units=1)
    with Loader(
        alone(corpus, window=6), plan(5), DataShard(0, 1), BatchShape(1, 5, SEQ_LEN), is_stopped=lambda: True
    ) as loader:
        batches = [next(loader) for _ in range(4)]
        write_manifest(
            tmp_path / "c", [publish_unit(tmp_path / "c", number, unit) for number, unit in enumerate(UNITS)]
        )
        loader._thread.join(0.2)
        batches += [next(loader) for _ in range(3)]
    void = [batch.void for batch in batches]
    assert void == sorted(void) and void[3:] == [True] * 4
    assert all(batch.hash == batch.valid == 0 and (batch.targets == IGNORED).all() for batch in batches[3:])
    assert {batch.rows_read for batch in batches if batch.void} == {5 * void.count(False)}


def test_closing_ends_a_loader_that_waits(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS, num_units=1)
    loader = Loader(alone(corpus, window=6), plan(5), DataShard(0, 1), BatchShape(1, 5, SEQ_LEN))
    loader.close()
    assert not loader._thread.is_alive()


def test_an_error_in_the_background_reaches_next_each_time(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS)
    (tmp_path / "c" / "train-00001.tokens").unlink()
    with Loader(alone(corpus), plan(20), DataShard(0, 1), BatchShape(1, 20, SEQ_LEN)) as loader:
        for _ in range(2):
            with pytest.raises(RunError, match=r"train-00001\.tokens can't be read"):
                next(loader)


def test_reading_ahead_is_bounded_and_close_ends_it(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made, enough = [], threading.Event()
    original = Loader._build_batch

    def counted(self: Loader, step: int, *rows: np.ndarray) -> Batch:
        made.append(step)
        if len(made) == 3:
            enough.set()
        return original(self, step, *rows)

    monkeypatch.setattr(Loader, "_build_batch", counted)
    loader = Loader(alone(corpus), plan(2), DataShard(0, 1), BatchShape(1, 2, SEQ_LEN), prefetch=3)
    assert enough.wait(300)
    loader._thread.join(0.05)
    assert loader._thread.is_alive()
    assert len(made) == 3
    assert next(loader).first == 0
    loader.close()
    loader.close()
    assert not loader._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_waiting_is_measured(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, get = [7.0], Loader._wait_for_batch

    def slow(self: Loader) -> Any:
        clock[0] += 2.5
        return get(self)

    monkeypatch.setattr(Loader, "_wait_for_batch", slow)
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    assert read(alone(corpus), plan(5), DataShard(0, 1), 1)[0].wait_seconds == 2.5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"shape": BatchShape(0, 2, SEQ_LEN)}, id="microbatches"),
        pytest.param({"shape": BatchShape(1, 0, SEQ_LEN)}, id="rows"),
        pytest.param({"prefetch": 0}, id="prefetch"),
        pytest.param({"step": 0}, id="step"),
    ],
)
def test_impossible_sizes(corpus: Corpus, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Loader(alone(corpus), plan(2), DataShard(0, 1), **{"shape": BatchShape(1, 2, SEQ_LEN)} | change)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_shares(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        DataShard(rank, ranks)


@pytest.mark.parametrize(
    ("asked", "given"), [pytest.param(3, 3, id="some"), pytest.param(99, ROWS, id="all-there-are")]
)
def test_fixed_rows(corpus: Corpus, asked: int, given: int) -> None:
    fields = read_first_rows(corpus.train, SEQ_LEN, asked, mask_documents=False, masked=False)
    assert fields.shape == (2, given, SEQ_LEN)
    assert np.array_equal(fields[TOKENS].reshape(-1), corpus.train.read(0, given * SEQ_LEN))
    assert np.array_equal(fields[TARGETS].reshape(-1), corpus.train.read(1, given * SEQ_LEN))
