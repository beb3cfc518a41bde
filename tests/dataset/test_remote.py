"""Prepared data elsewhere: fetched as they are read, kept as far as they may be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.dataset.folders import counting, write
from titan.dataset import remote
from titan.dataset.corpora import mixed, opened, ready
from titan.dataset.schema import Prepared
from titan.dataset.shards import open_corpus
from titan.settings import Failure, Refusal
from titan.training import Training

UNITS = [counting(100_000 // 2, start=i * 50_000, vocab_size=2**16) for i in range(4)]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Prepared data of four shards of 100 kB, on a file system of fsspec's."""
    return write(tmp_path / "there", UNITS, vocab_size=2**16).folder


def shards_here(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("train-*.tokens"))


def dataset(there: Path, **more: object) -> Prepared:
    return Prepared(path=f"file://{there}", cache=str(there.parent / "cache"), **more)  # type: ignore[arg-type]


def test_files_come_when_they_are_read(there: Path) -> None:
    (folder,) = ready(dataset(there)).values()
    corpus = open_corpus(folder)
    assert shards_here(Path(folder)) == []
    assert corpus.train.read(49_990, 20).tolist() == [i % 2**16 for i in range(49_990, 50_010)]
    assert shards_here(Path(folder)) == ["train-00000.tokens", "train-00001.tokens"]
    assert corpus.train.begins(0, 60_000).tolist() == [50_000]
    shutil.rmtree(there)
    assert open_corpus(folder).train.read(60_000, 1) == [60_000], "what is here is not fetched again"


def test_the_rows_are_those_of_the_folder_itself(there: Path) -> None:
    training = Training(seq_len=64, global_batch=640)
    near, far = (
        mixed(data, training, opened(ready(data))) for data in (Prepared(path=str(there)), dataset(there, block=20))
    )
    assert near.sources[0].corpus.digest == far.sources[0].corpus.digest
    numbers = np.arange(50)
    for mix in (near, far):
        _, rows = mix.locate(numbers)
        assert all(mix.sources[0].split.row(row, 64)[0] == row * 64 % 2**16 for row in rows.tolist())


def test_the_cache_keeps_what_it_may(there: Path) -> None:
    """250 kB: two shards, of which the one that came first goes when the next one comes."""
    (folder,) = ready(dataset(there, keep_gib=250e3 / 2**30)).values()
    corpus = open_corpus(folder)
    for number, token in enumerate((5, 50_005, 100_005, 150_005)):
        assert corpus.train.read(token, 1) == [token % 2**16]
        for i, path in enumerate(sorted(Path(folder).glob("train-*.tokens"))):
            os.utime(path, (1000 + i, 1000 + i))
        assert len(shards_here(Path(folder))) == min(2, number + 1)
    assert shards_here(Path(folder)) == ["train-00002.tokens", "train-00003.tokens"]
    assert corpus.train.read(5, 1) == [5], "and comes again"


def test_a_file_that_can_not_be_fetched_fails_with_its_address(there: Path) -> None:
    (folder,) = ready(dataset(there)).values()
    (there / "train-00002.tokens").unlink()
    with pytest.raises(
        Failure, match=r"there/train-00002.tokens: can't be fetched \(.*\); mend the connection"
    ) as error:
        open_corpus(folder).train.read(100_005, 1)
    assert "\n" not in str(error.value)
    assert not list(Path(folder).glob(".*")), "nothing half"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("file:///nowhere/at/all", "no prepared data can be read there", id="nothing-there"),
        pytest.param("nonsense://x", "nonsense", id="no-such-protocol"),
    ],
)
def test_an_address_without_data_is_refused(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=words) as refusal:
        ready(Prepared(path=url, cache=str(tmp_path)))
    assert f"dataset.path={url}" in str(refusal.value)


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> object:
        yield b"half"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        remote._write(tmp_path / "x", broken())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no prepared data there"):
        ready(Prepared(path=str(tmp_path)))
