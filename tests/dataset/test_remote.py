"""Prepared data elsewhere: fetched as they are read, kept as far as they may be."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared_folders import make_documents, read_row, write_corpus
from titan.config import optional
from titan.console.text import is_url
from titan.dataset import remote
from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.schema import Dataset, Prepared, Synthetic, Text
from titan.dataset.shards import open_corpus
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError, RunError
from titan.training.schema import Training

UNITS = [make_documents(100_000 // 2, start=i * 50_000, vocab_size=2**16) for i in range(4)]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Prepared data of four shards of 100 kB, on a file system of fsspec's."""
    return write_corpus(tmp_path / "there", UNITS, vocab_size=2**16).folder


def shards_here(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("train-*.tokens"))


def dataset(there: Path, **more: object) -> Prepared:
    return Prepared(path=f"file://{there}", cache=str(there.parent / "cache"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("chain", ["simplecache::file://", "simplecache::"])
def test_a_chain_of_file_systems_is_a_url(there: Path, chain: str) -> None:
    folder = prepare_corpora(Prepared(path=f"{chain}{there}", cache=str(there.parent / "cache")))["data"].folder
    assert Path(folder) != there and open_corpus(folder).train.read(50_001, 1) == [50_001]
    assert is_url(f"{chain}{there}") and not is_url(str(there))


def test_files_come_when_they_are_read(there: Path) -> None:
    folder = prepare_corpora(dataset(there))["data"].folder
    corpus = open_corpus(folder)
    assert shards_here(Path(folder)) == []
    assert corpus.train.read(49_990, 20).tolist() == [i % 2**16 for i in range(49_990, 50_010)]
    assert shards_here(Path(folder)) == ["train-00000.tokens", "train-00001.tokens"]
    assert corpus.train.find_document_starts(0, 60_000).tolist() == [50_000]
    shutil.rmtree(there)
    assert open_corpus(folder).train.read(60_000, 1) == [60_000], "what is here is not fetched again"


def test_the_rows_are_those_of_the_folder_itself(there: Path) -> None:
    training = Training(seq_len=64, global_batch=640)
    near, far = (
        build_mixture(data, training, prepare_corpora(data))
        for data in (Prepared(path=str(there)), dataset(there, block=20))
    )
    assert near.sources[0].corpus.digest == far.sources[0].corpus.digest
    numbers = np.arange(50)
    for mix in (near, far):
        _, rows = mix.locate_rows(numbers)
        assert all(read_row(mix.sources[0].split, row, 64)[0] == row * 64 % 2**16 for row in rows.tolist())


def test_the_cache_keeps_what_it_may(there: Path) -> None:
    """250 kB: two shards, of which the one that came first goes when the next one comes."""
    folder = prepare_corpora(dataset(there, keep_gib=250e3 / 2**30))["data"].folder
    corpus = open_corpus(folder)
    for number, token in enumerate((5, 50_005, 100_005, 150_005)):
        assert corpus.train.read(token, 1) == [token % 2**16]
        for i, path in enumerate(sorted(Path(folder).glob("train-*.tokens"))):
            os.utime(path, (1000 + i, 1000 + i))
        assert len(shards_here(Path(folder))) == min(2, number + 1)
    assert shards_here(Path(folder)) == ["train-00002.tokens", "train-00003.tokens"]
    assert corpus.train.read(5, 1) == [5], "and comes again"


def test_a_file_that_can_not_be_fetched_fails_with_its_address(there: Path) -> None:
    folder = prepare_corpora(dataset(there))["data"].folder
    (there / "train-00002.tokens").unlink()
    with pytest.raises(
        RunError, match=r"there/train-00002.tokens: can't be fetched \(.*\); check the connection"
    ) as error:
        open_corpus(folder).train.read(100_005, 1)
    assert "\n" not in str(error.value)
    assert not list(Path(folder).glob(".*")), "nothing half"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("file:///nowhere/at/all", "can't read prepared data", id="nothing-there"),
        pytest.param("nonsense://x", "nonsense", id="no-such-protocol"),
    ],
)
def test_an_address_without_data_is_refused(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        prepare_corpora(Prepared(path=url, cache=str(tmp_path)))
    assert f"dataset.path={url}" in str(refusal.value)


@pytest.mark.parametrize("kind", ["text", "tokens", "json"])
def test_what_was_prepared_is_read_elsewhere(kind: str, tmp_path: Path) -> None:
    """With its tokenizer, whichever that is."""
    (tmp_path / "x.txt").write_text("abc def\n" * 2000)
    tokenizer = "titan4k"
    if kind == "json":
        from tests.dataset.test_tokenizer import byte_level_json

        byte_level_json(tmp_path, {"eos_token": "</s>"})
        tokenizer = str(tmp_path / "tokenizer.json")
    data: Dataset = Text(path=str(tmp_path / "x.txt"), tokenizer=tokenizer, cache=str(tmp_path / "c"))
    if kind == "tokens":
        data = Synthetic(tokens=5000, cache=str(tmp_path / "c"))
    folder = prepare(data)
    shutil.move(folder, tmp_path / "bucket")
    far = Prepared(path=f"file://{tmp_path}/bucket", cache=str(tmp_path / "other"))
    corpus = prepare_corpora(far)["data"]
    assert corpus.train.read(0, 100).tolist() == open_corpus(tmp_path / "bucket").train.read(0, 100).tolist()
    if kind != "tokens":
        shutil.rmtree(tmp_path / "bucket")
        assert load_tokenizer(corpus.tokenizer_path).fingerprint == corpus.tokenizer["fingerprint"]


def test_another_corpus_at_the_same_place_is_another_one(there: Path) -> None:
    first = prepare_corpora(dataset(there))["data"]
    assert first.train.read(5, 1) == [5]
    shutil.rmtree(there)
    write_corpus(there, [make_documents(1000, start=7)], vocab_size=2**16, digest="e")
    second = prepare_corpora(dataset(there))["data"]
    assert (second.digest, second.train.read(5, 1)) == ("e", [12])
    assert second.folder != first.folder


def test_a_file_that_was_cut_here_is_fetched_again(there: Path) -> None:
    folder = prepare_corpora(dataset(there))["data"].folder
    open_corpus(folder).train.read(5, 1)
    os.truncate(Path(folder) / "train-00000.tokens", 40)
    assert open_corpus(folder).train.read(40_000, 1) == [40_000]


def held() -> list[str]:
    """The files that this process has open; other threads may close theirs meanwhile."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_what_was_removed_to_make_room_is_closed(there: Path) -> None:
    folder = prepare_corpora(dataset(there, keep_gib=120e3 / 2**30))["data"].folder
    corpus = open_corpus(folder)
    for token in (5, 50_005, 100_005, 150_005):
        corpus.train.read(token, 1)
    assert not any("(deleted)" in name and str(folder) in name for name in held())


def test_another_machine_begins_with_nothing(there: Path) -> None:
    folders = {name: str(c.folder) for name, c in prepare_corpora(dataset(there)).items()}
    for folder in folders.values():
        shutil.rmtree(folder)
    assert open_corpora(folders, dataset(there))["data"].train.read(5, 1) == [5]


def test_errors_of_a_protocols_own_kind_are_a_sentence(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_corpora(dataset(there))["data"].folder

    class NoCredentialsError(Exception):
        pass

    def refuse(*arguments: object) -> None:
        raise NoCredentialsError("Unable to\nlocate credentials")

    monkeypatch.setattr("fsspec.open", refuse)
    with pytest.raises(RunError, match="NoCredentialsError: Unable to locate credentials"):
        open_corpus(folder).train.read(5, 1)


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> object:
        yield b"half"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        remote._write_file(tmp_path / "x", broken())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prepared data"):
        prepare_corpora(Prepared(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["../../../victim", "/victim", "..", "a::b"])
def test_a_manifest_that_names_a_file_elsewhere_writes_nothing_there(name: str, there: Path) -> None:
    manifest, victim = there / "manifest.json", there.parent / "victim"
    victim.write_text("precious")
    (there.parent.parent / "victim").write_text("to be fetched")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"tokenizer": {**content["tokenizer"], "file": name}}))
    with pytest.raises(ConfigError, match=r"dataset.path=\S+: can't read prepared data .*not a file in its folder"):
        prepare_corpora(dataset(there))
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("text", ["null", "{}", '{"url": 1, "keep_gib": null}', '{"url": "x", "keep_gib": "y"}', "["])
def test_a_damaged_note_of_where_shards_come_from_is_told(text: str, there: Path) -> None:
    folder = prepare_corpora(dataset(there))["data"].folder
    (Path(folder) / remote.ORIGIN).write_text(text)
    with pytest.raises(RunError, match=r"origin.json: is corrupt \(.*\); remove its folder, then resume"):
        open_corpus(folder).train.read(0, 1)


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that accepts connections and says nothing."""
    monkeypatch.setattr(optional, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("fsspec.config.conf", {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x"


def test_a_silent_server_is_given_up(silent_server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read prepared data \(OSError: SocketTimeoutError: "):
        remote.mirror_folder(silent_server, tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder, or its server gives no answer"):
        Text(path=silent_server).build()
