"""Mixtures: the shares are exact, the rows of each source come in its own order, and nothing depends on history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prepared_folders import make_documents, publish_unit, write_corpus, write_manifest
from titan.dataset import mixture as module
from titan.dataset import schema
from titan.dataset.mixture import MixturePhase, RowMixture, TokenSequences, compute_block_pattern
from titan.dataset.permutation import Permutation
from titan.dataset.schema import BLOCK, compute_block_counts
from titan.dataset.shards import Corpus
from titan.errors import ConfigError, RunError

SIZES = (13, 40, 7)
SEQ_LEN = 3
QUOTAS = st.tuples(*[st.integers(0, 100)] * 3).filter(any)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Corpus]:
    """Three corpora of 13, 40 and 7 rows."""
    folder = tmp_path_factory.mktemp("c")
    return [write_corpus(folder / str(n), [make_documents(n * SEQ_LEN + 1)], digest=f"d{n}") for n in SIZES]


def shares(weights: tuple[int, ...]) -> tuple[int, ...]:
    return compute_block_counts({str(k): weight for k, weight in enumerate(weights)}, ["0", "1", "2"], "weights")


def mixture(corpora: list[Corpus], stages: list[tuple[int, tuple[int, ...]]], **more: Any) -> RowMixture:
    rows = tuple(TokenSequences(str(k), corpus, SEQ_LEN, 5) for k, corpus in enumerate(corpora))
    return RowMixture(
        rows, tuple(MixturePhase(first, shares(weights)) for first, weights in stages), **{"seed": 5} | more
    )


STAGES = st.lists(st.tuples(st.integers(1, 3000), QUOTAS), max_size=3)


def staged(first: tuple[int, ...], later: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    at, out = 0, [(0, first)]
    for gap, weights in later:
        at += gap
        out.append((at, weights))
    return out


@given(first=QUOTAS, later=STAGES, cuts=st.lists(st.integers(0, 4000), max_size=4))
def test_each_source_is_read_in_its_order_without_a_gap(
    corpora: list[Corpus], first: tuple[int, ...], later: list[Any], cuts: list[int]
) -> None:
    """Over stages and blocks too; however the numbers are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 700)
        patch.setattr(schema, "BLOCK", 700)
        mix = mixture(corpora, staged(first, later))
        numbers = np.arange(4000)
        which, rows = (
            np.concatenate(p) for p in zip(*map(mix.locate_rows, np.split(numbers, sorted(cuts))), strict=True)
        )
        for k, size in enumerate(SIZES):
            mine = rows[which == k]
            assert mine.tolist() == Permutation(size, 5).rows_at(np.arange(mine.size)).tolist()
            assert mix.count_rows_read(4000)[k] == mine.size


@given(weights=QUOTAS, start=st.integers(0, 3 * BLOCK), length=st.integers(1, 2000))
def test_any_stretch_is_mixed_in_the_weights(
    corpora: list[Corpus], weights: tuple[int, ...], start: int, length: int
) -> None:
    mix = mixture(corpora, [(0, weights)])
    which, _ = mix.locate_rows(np.arange(start, start + length))
    found = np.bincount(which, minlength=3)
    assert np.abs(found - length * np.array(shares(weights)) / BLOCK).max() <= 6


@given(weights=QUOTAS, seed=st.integers(0, 2**63), block=st.integers(0, 2**40))
def test_a_block_holds_exactly_its_quotas(weights: tuple[int, ...], seed: int, block: int) -> None:
    sources, ranks = compute_block_pattern(shares(weights), (1, 2, 3), seed, 0, block)
    assert tuple(np.bincount(sources, minlength=3)) == shares(weights)
    for k in range(3):
        assert ranks[sources == k].tolist() == list(range(shares(weights)[k]))


def test_blocks_differ(corpora: list[Corpus]) -> None:
    first, second, other = (
        compute_block_pattern((3333, 3333, 3334), (1, 2, 3), s, 0, b)[0] for s, b in ((1, 0), (1, 1), (2, 0))
    )
    assert (first == second).mean() < 0.9
    assert (first == other).mean() < 0.9


SKIP = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=4)


@given(gaps=SKIP, read=st.integers(0, 300))
def test_skipped_rows_are_left_out_and_all_others_read(
    corpora: list[Corpus], gaps: list[tuple[int, int]], read: int
) -> None:
    skip, at = [], 0
    for gap, length in gaps:
        skip.append((at + gap + 1, at + gap + 1 + length))
        at = skip[-1][1] + 1
    mix = mixture(corpora, [(0, (2, 1, 0)), (100, (1, 1, 1))], skip=tuple(skip))
    out = {n for first, last in skip for n in range(first, last + 1)}
    expected = [n for n in range(1000) if n not in out][:read]
    assert mix.compute_row_numbers(np.arange(read)).tolist() == expected
    which, _ = mix.locate_rows(np.array(expected, dtype=np.int64))
    assert mix.count_rows_read(read) == tuple(np.bincount(which, minlength=3))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param({"a": 1}, (10_000, 0, 0), id="one"),
        pytest.param({"a": 1, "b": 1, "c": 1}, (3334, 3333, 3333), id="thirds"),
        pytest.param({"a": 0.8, "b": 0.2}, (8000, 2000, 0), id="shares"),
        pytest.param({"b": 9999, "c": 1}, (0, 9999, 1), id="the-least"),
    ],
)
def test_quotas(weights: dict[str, float], expected: tuple[int, ...]) -> None:
    assert compute_block_counts(weights, ["a", "b", "c"], "w") == expected


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        pytest.param({"a": 1, "x": 1}, "no source 'x'", id="unknown"),
        pytest.param({"a": -1, "b": 2}, "at least 0", id="negative"),
        pytest.param({"a": 0}, "one of them above 0", id="none"),
        pytest.param({"a": float("nan")}, "at least 0", id="nan"),
        pytest.param({"a": 1, "b": 1e-6}, "the weight of b is less than one row in 10,000", id="too-little"),
    ],
)
def test_weights_that_can_not_be(weights: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compute_block_counts(weights, ["a", "b", "c"], "dataset.weights")


def test_the_fingerprint_tells_the_past_only(corpora: list[Corpus]) -> None:
    """What comes later may change; what was read may not, however it is said."""
    plain = RowMixture((TokenSequences("x", corpora[0], SEQ_LEN, 5),), (MixturePhase(0, (BLOCK,)),))
    only = mixture(corpora, [(0, (1, 0, 0))])
    later = mixture(corpora, [(0, (1, 0, 0)), (50, (1, 1, 0))])
    skipped = mixture(corpora, [(0, (1, 0, 0))], skip=((40, 45),))
    assert (
        plain.compute_fingerprint(40)
        == only.compute_fingerprint(40)
        == later.compute_fingerprint(40)
        == skipped.compute_fingerprint(40)
    )
    assert only.compute_fingerprint(50) == later.compute_fingerprint(50)
    assert only.compute_fingerprint(51) != later.compute_fingerprint(51)
    assert only.compute_fingerprint(41) != skipped.compute_fingerprint(41)
    others = [mixture(corpora, [(0, weights)]) for weights in ((1, 1, 0), (1, 2, 0), (0, 1, 0))]
    others += [mixture(corpora, [(0, (1, 1, 0))], seed=6), mixture(corpora, [(0, (1, 1, 0)), (20, (1, 2, 0))])]
    assert len({mix.compute_fingerprint(40) for mix in others}) == len(others)


@given(weights=QUOTAS, order=st.permutations([0, 1, 2]), unused=st.booleans())
def test_names_order_and_others_do_not_matter(
    corpora: list[Corpus], weights: tuple[int, ...], order: list[int], unused: bool
) -> None:
    """The same corpora in another order, and one that has no rows yet: the same rows, and the same fingerprint."""
    names = ["x", "y", "z"]
    one = mixture(corpora, [(0, weights)])
    shares_of = dict(zip("012", shares(weights), strict=True))
    first = [TokenSequences(names[k], corpora[k], SEQ_LEN, 5) for k in order]
    extra = [TokenSequences("extra", corpora[0], SEQ_LEN, 5, window=3)] if unused else []
    stages = (MixturePhase(0, (*(0 for _ in extra), *(shares_of[str(k)] for k in order))),)
    other = RowMixture((*extra, *first), stages, seed=5)
    numbers = np.arange(400)
    (a, rows), (b, other_rows) = one.locate_rows(numbers), other.locate_rows(numbers)
    assert rows.tolist() == other_rows.tolist()
    assert [one.sources[k].corpus.digest for k in a] == [other.sources[k].corpus.digest for k in b]
    assert one.compute_fingerprint(400) == other.compute_fingerprint(400)


def test_a_window_that_was_just_filled_is_as_it_stays() -> None:
    assert (
        Permutation(8, 0, 1, 8).rows_at(np.arange(8)).tolist()
        == Permutation(24, 0, 1, 8).rows_at(np.arange(8)).tolist()
    )


def test_rows_of_a_stream_are_those_of_the_whole(tmp_path: Path) -> None:
    """Windows of four rows: a row is there as soon as its window is, and is the same row as at the end."""
    units = [make_documents(20, start=20 * i) for i in range(5)]
    whole = TokenSequences("x", write_corpus(tmp_path / "whole", units), SEQ_LEN, 5, window=4)
    rows = TokenSequences("x", write_corpus(tmp_path / "live", units, num_units=0), SEQ_LEN, 5, window=4)
    done: list[int] = []
    told: list[str] = []

    def wait(line: str) -> None:
        told.append(line)
        done.append(len(done))
        entries = [publish_unit(tmp_path / "live", n, units[n]) for n in done]
        if len(done) == len(units):
            write_manifest(tmp_path / "live", entries)

    for index in range(70):
        expected = whole.rows_at(np.array([index]))
        assert rows.rows_at(np.array([index]), wait) == expected
        published = rows.split.count_rows(SEQ_LEN)
        assert rows.corpus.complete or (index // 4 + 1) * 4 <= published < (index // 4 + 1) * 4 + 7
    assert len(told) == 5
    assert "still being prepared: 1 of 5 shards, 20 tokens" in told[1]


@pytest.mark.parametrize(
    ("epochs", "seq_len", "words"),
    [
        pytest.param(0.5, SEQ_LEN, "may be read 0.5 times", id="too-often"),
        pytest.param(None, 500, "has 100 tokens, fewer than one row", id="too-little"),
    ],
)
def test_what_a_stream_turns_out_to_be(epochs: float | None, seq_len: int, words: str, tmp_path: Path) -> None:
    """What is checked beforehand, of data that are complete."""
    units = [make_documents(50), make_documents(50, start=50)]
    rows = TokenSequences("x", write_corpus(tmp_path / "c", units, num_units=1), seq_len, 5, window=2, epochs=epochs)
    write_manifest(tmp_path / "c", [publish_unit(tmp_path / "c", number, unit) for number, unit in enumerate(units)])
    with pytest.raises(RunError, match=words):
        rows.rows_at(np.array([31]), lambda line: None)


def test_rows_that_are_not_there_are_refused_without_anyone_to_wait(tmp_path: Path) -> None:
    rows = TokenSequences(
        "x", write_corpus(tmp_path / "c", [make_documents(50), make_documents(50)], num_units=1), SEQ_LEN, 5, window=2
    )
    with pytest.raises(ConfigError, match="1 of 2 shards, 50 tokens, are done; wait"):
        rows.rows_at(np.array([16]))
