"""Shards: what is written is read, over the boundaries of files; damage is recognised."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prepared_folders import make_documents, publish_unit, read_row, write_corpus, write_manifest
from titan.dataset import shards
from titan.dataset.shards import Split, open_corpus
from titan.errors import ConfigError, RunError
from titan.files import leases

UNITS = [make_documents(20, 40), make_documents(10, 90, start=60), [], make_documents(50, 60, start=160)]
TOKENS, BEGINS = 270, [0, 20, 60, 70, 160, 210]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """270 tokens, 0 to 269, in six documents and three shards."""
    return write_corpus(tmp_path_factory.mktemp("c"), UNITS).train


@given(start=st.integers(0, 300), count=st.integers(0, 300))
def test_reads_cross_shards(split: Split, start: int, count: int) -> None:
    if start + count <= TOKENS:
        assert split.read(start, count).tolist() == list(range(start, start + count))
    else:
        with pytest.raises(IndexError):
            split.read(start, count)


@given(start=st.integers(0, TOKENS - 1), count=st.integers(0, 300))
def test_documents_begin_where_they_were_written(split: Split, start: int, count: int) -> None:
    count = min(count, TOKENS - start)
    assert split.find_document_starts(start, count).tolist() == [b - start for b in BEGINS if start < b < start + count]


def test_the_parts_count(split: Split) -> None:
    assert (split.tokens, split.documents, len(split.shards)) == (TOKENS, 6, 3)


def test_masks_are_read_like_tokens(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS, masked=True)
    assert corpus.masked
    assert corpus.train.read_loss_mask(55, 10).tolist() == [i % 2 == 0 for i in range(55, 65)]


@pytest.mark.parametrize("seq_len", [1, 7, 16, 64])
def test_rows_overlap_by_one_token(split: Split, seq_len: int) -> None:
    rows = [read_row(split, i, seq_len) for i in range(split.count_rows(seq_len))]
    assert len(rows) == (TOKENS - 1) // seq_len
    assert all(row.size == seq_len + 1 for row in rows)
    assert all(a[-1] == b[0] for a, b in pairwise(rows))
    with pytest.raises(IndexError):
        read_row(split, len(rows), seq_len)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [pytest.param(65536, "uint16", id="fits"), pytest.param(65537, "uint32", id="one-too-many")],
)
def test_the_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    corpus = write_corpus(tmp_path / "c", [make_documents(70_000, vocab_size=vocab_size)], vocab_size=vocab_size)
    assert corpus.train.read(0, 5).dtype == dtype
    assert np.array_equal(corpus.train.read(65530, 10), np.arange(65530, 65540) % vocab_size)


def test_a_pickle_carries_no_data(tmp_path: Path) -> None:
    split = write_corpus(tmp_path / "c", [make_documents(20_000)]).train
    expected = split.read(5, 10).tolist()
    dump = pickle.dumps(split)
    assert len(dump) < 2000
    assert pickle.loads(dump).read(5, 10).tolist() == expected


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_OPEN_FILES", 3)
    split = write_corpus(tmp_path / "c", [make_documents(10, start=10 * i) for i in range(12)]).train
    before = len(os.listdir("/proc/self/fd"))
    for start in [*range(0, 115, 7), *range(100, 0, -9)]:
        assert split.read(start, 5)[0] == start
        split.find_document_starts(start, 1)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3, "tokens and offsets, three each"


def test_tokens_can_not_be_written_by_accident(split: Split) -> None:
    with pytest.raises(ValueError, match="read-only"):
        split.read(0, 5)[0] = 1


def test_a_corpus_grows_while_it_is_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    corpus = write_corpus(folder, UNITS, num_units=1)
    assert (corpus.complete, corpus.shard_jobs, corpus.train.tokens) == (False, (1, 4), 60)
    entries = [publish_unit(folder, number, UNITS[number]) for number in (1, 3)]
    more = corpus.reopen()
    assert (more.shard_jobs, more.train.tokens) == ((2, 4), 160), "unit 3 counts once unit 2 is there"
    entries = [publish_unit(folder, number, unit) for number, unit in enumerate(UNITS)]
    write_manifest(folder, entries)
    whole = more.reopen()
    assert (whole.complete, whole.train.tokens) == (True, TOKENS)
    assert whole.reopen() is whole
    with pytest.raises(ConfigError):
        open_corpus(write_corpus(tmp_path / "other", UNITS, num_units=1).folder)


def test_a_preparation_that_failed_is_known(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS, num_units=1)
    corpus.check_alive()
    (tmp_path / "c" / "failed.json").write_text(json.dumps({"error": "x.jsonl, line 7: not JSON"}))
    with pytest.raises(RunError, match="line 7: not JSON"):
        corpus.check_alive()


def test_a_corpus_that_is_completed_while_it_is_opened_is_not_taken_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    write_corpus(folder, UNITS, num_units=1)
    original = shards._build_partial_manifest

    def slow(folder: Path) -> dict[str, object]:
        content = original(folder)
        write_manifest(folder, [publish_unit(folder, number, unit) for number, unit in enumerate(UNITS)])
        return content

    monkeypatch.setattr(shards, "_build_partial_manifest", slow)
    corpus = open_corpus(folder, partial=True)
    assert (corpus.complete, corpus.train.tokens) == (False, 60)
    assert (corpus.reopen().complete, corpus.reopen().train.tokens) == (True, TOKENS)


def test_a_failure_does_not_count_while_another_job_goes_on(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", UNITS, num_units=1)
    (tmp_path / "c" / "failed.json").write_text(json.dumps({"error": "x"}))
    assert leases.acquire(tmp_path / "c" / "unit-00002.claim")
    corpus.check_alive()
    leases.release(tmp_path / "c" / "unit-00002.claim")
    with pytest.raises(RunError):
        corpus.check_alive()


def _cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-2])


def _edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGE = [
    pytest.param(lambda f: (f / "manifest.json").unlink(), id="no-manifest"),
    pytest.param(lambda f: _cut(f, "manifest.json"), id="manifest-cut"),
    pytest.param(lambda f: (f / "manifest.json").write_text("[]"), id="manifest-of-another-kind"),
    pytest.param(lambda f: _edit(f, units=[{}]), id="manifest-without-splits"),
    pytest.param(lambda f: _edit(f, format=0), id="other-format"),
    pytest.param(lambda f: (f / "train-00001.tokens").unlink(), id="tokens-missing"),
    pytest.param(lambda f: _cut(f, "train-00000.tokens"), id="tokens-cut"),
    pytest.param(lambda f: _cut(f, "train-00000.offsets"), id="offsets-cut"),
    pytest.param(lambda f: _cut(f, "token_bytes.npy"), id="token-bytes-cut"),
    pytest.param(lambda f: np.save(f / "token_bytes.npy", np.ones(3)), id="token-bytes-of-another-vocabulary"),
    pytest.param(lambda f: (f / "token_bytes.npy").write_bytes(b"PK\3\4" * 9), id="token-bytes-an-archive"),
    pytest.param(lambda f: (f / "manifest.json").write_text("[" * 100_000), id="manifest-nested-deeply"),
    pytest.param(lambda f: _edit(f, units=None), id="units-null"),
    pytest.param(lambda f: _edit(f, bytes="many"), id="bytes-a-text"),
    pytest.param(lambda f: _edit(f, documents=-1), id="documents-below-0"),
    pytest.param(lambda f: _edit(f, vocab_size=1e300), id="vocabulary-a-float"),
    pytest.param(lambda f: _edit(f, tokenizer=None), id="tokenizer-null"),
    pytest.param(
        lambda f: _edit(f, tokenizer={"name": "x", "fingerprint": "x", "file": "../x.json"}), id="tokenizer-outside"
    ),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_with_the_way_out(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "c"
    write_corpus(folder, UNITS)
    damage(folder)
    with pytest.raises(ConfigError, match=r"titan\.prepare") as refusal:
        open_corpus(folder, check_sizes=True)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda f: (f / "train-00001.tokens").unlink(), "No such file", id="missing"),
        pytest.param(lambda f: _cut(f, "train-00001.tokens"), "is truncated", id="cut"),
    ],
)
def test_damage_that_comes_later_fails_with_the_file(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    split = write_corpus(tmp_path / "c", UNITS).train
    damage(tmp_path / "c")
    assert split.read(0, 60).size == 60
    with pytest.raises(RunError, match=words) as failure:
        split.read(150, 10)
    assert "train-00001.tokens" in str(failure.value)
    assert "titan.prepare" in str(failure.value)
