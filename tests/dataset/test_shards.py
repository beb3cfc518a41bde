"""Shards: what is written is read, over the boundaries of files; damage is recognised."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.dataset.folders import write_folder
from titan.dataset.shards import Corpus, open_corpus
from titan.settings import Refusal


def write(folder: Path, lengths: list[int], shard_tokens: int = 50, vocab_size: int = 1000) -> Corpus:
    """A corpus whose training part counts upwards through documents of `lengths`; validation is empty."""
    start, units = 0, list[list[NDArray[Any]]]([[]])
    for length in lengths:
        if sum(map(len, units[-1])) >= shard_tokens:
            units.append([])
        units[-1].append(np.arange(start, start + length) % vocab_size)
        start += length
    return write_folder(folder, units, vocab_size)


def documents(corpus: Corpus) -> list[tuple[int, ...]]:
    """The documents of the training part, by its offsets."""
    out = []
    for shard in corpus.train.shards:
        offsets = np.fromfile(shard.offsets, "<u8").astype(int)
        tokens = corpus.train.read(shard.start, shard.tokens)
        out += [tuple(part.tolist()) for part in np.split(tokens, offsets[1:])]
    return out


def test_documents_survive_whole_and_shuffled(tmp_path: Path) -> None:
    lengths = [7, 1, 30, 12, 45, 3, 3, 60, 9]
    corpus = write(tmp_path / "c", lengths)
    expected = [tuple(range(sum(lengths[:i]), sum(lengths[: i + 1]))) for i in range(len(lengths))]
    assert len(corpus.train.shards) > 1
    assert sorted(documents(corpus)) == expected
    assert documents(corpus) != expected
    assert (corpus.train.tokens, corpus.train.documents, corpus.max_token) == (170, 9, 169)
    assert (corpus.validation.tokens, corpus.validation.rows(4)) == (0, 0)


def test_the_shuffle_is_the_same_each_time(tmp_path: Path) -> None:
    lengths = [3] * 40
    a, b = write(tmp_path / "a", lengths), write(tmp_path / "b", lengths)
    assert documents(a) == documents(b)


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 300), count=st.integers(0, 300))
def test_reads_cross_shards(tmp_path_factory: pytest.TempPathFactory, start: int, count: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "crossing"
    corpus = open_corpus(folder) if folder.exists() else write(folder, [20, 40, 10, 90, 50, 60], 60)
    whole = np.concatenate([np.fromfile(shard.file, "<u2") for shard in corpus.train.shards])
    if start + count <= whole.size:
        assert np.array_equal(corpus.train.read(start, count), whole[start : start + count])
    else:
        with pytest.raises(IndexError):
            corpus.train.read(start, count)


@pytest.mark.parametrize("seq_len", [1, 7, 16, 64])
def test_rows_overlap_by_one_token(tmp_path: Path, seq_len: int) -> None:
    split = write(tmp_path / "c", [33, 67, 29], 40).train
    rows = [split.row(i, seq_len) for i in range(split.rows(seq_len))]
    assert len(rows) == (129 - 1) // seq_len
    assert all(row.size == seq_len + 1 for row in rows)
    assert all(a[-1] == b[0] for a, b in pairwise(rows))
    with pytest.raises(IndexError):
        split.row(len(rows), seq_len)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [pytest.param(65536, "uint16", id="fits"), pytest.param(65537, "uint32", id="one-too-many")],
)
def test_the_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    corpus = write(tmp_path / "c", [70000], vocab_size=vocab_size)
    assert corpus.train.read(0, 5).dtype == dtype
    assert np.array_equal(corpus.train.read(65530, 10), np.arange(65530, 65540) % vocab_size)


def test_a_pickle_carries_no_data(tmp_path: Path) -> None:
    split = write(tmp_path / "c", [20_000], shard_tokens=2**20).train
    expected = split.read(5, 10).tolist()
    dump = pickle.dumps(split)
    assert len(dump) < 2000
    assert pickle.loads(dump).read(5, 10).tolist() == expected


def test_tokens_can_not_be_written_by_accident(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        write(tmp_path / "c", [20]).train.read(0, 5)[0] = 1


def _cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-2])


def _edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    "damage",
    [
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
    ],
)
def test_damage_is_refused_with_the_folder_to_delete(tmp_path: Path, damage: object) -> None:
    folder = tmp_path / "c"
    write(folder, [60, 60])
    damage(folder)  # type: ignore[operator]
    with pytest.raises(Refusal, match="delete that folder") as refusal:
        open_corpus(folder)
    assert str(folder) in str(refusal.value)
