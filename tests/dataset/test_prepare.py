"""Preparation: cached by content, divided by content, complete or not there at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.dataset import prepare as module
from titan.dataset.prepare import cache_folder, prepare
from titan.dataset.schema import Jsonl, Stdlib, Synthetic, Text
from titan.dataset.shards import Corpus, Split, open_corpus, write_manifest
from titan.dataset.tokenizer import load_tokenizer
from titan.settings import Refusal


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """200 short documents as JSON Lines, of which some are equal."""
    lines = [json.dumps({"text": f"document {i % 150}, which tells of {i % 150 * 7} things\n"}) for i in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    return tmp_path / "x.jsonl"


def dataset(file: Path, **changes: object) -> Jsonl:
    return Jsonl(**{"path": str(file), "cache": str(file.parent / "cache"), "validation": 0.2} | changes)  # type: ignore[arg-type]


def texts(split: Split) -> list[str]:
    """The documents of a split as text, without the token that ends each."""
    tokenizer, out = load_tokenizer("titan4k"), []
    for shard in split.shards:
        offsets = np.fromfile(shard.offsets, "<u8").astype(int)
        for document in np.split(split.read(shard.start, shard.tokens), offsets[1:]):
            assert document[-1] == tokenizer.eos
            out.append(tokenizer.decode(document[:-1].tolist()))
    return out


def folders(file: Path) -> list[str]:
    place = file.parent / "cache" / "datasets"
    return sorted(os.listdir(place)) if place.exists() else []


def test_documents_are_divided_shuffled_and_complete(corpus_file: Path) -> None:
    corpus = open_corpus(prepare(dataset(corpus_file)))
    train, validation = texts(corpus.train), texts(corpus.validation)
    expected = [json.loads(line)["text"] for line in corpus_file.read_text().splitlines()]
    assert sorted(train + validation) == sorted(expected)
    assert not set(train) & set(validation)
    assert 15 < len(validation) < 70
    assert train != [document for document in expected if document in set(train)]
    assert (corpus.documents, corpus.bytes) == (200, sum(len(t.encode()) for t in expected))
    assert corpus.bytes == int(corpus.token_bytes[corpus.train.read(0, corpus.train.tokens)].sum()) + int(
        corpus.token_bytes[corpus.validation.read(0, corpus.validation.tokens)].sum()
    )
    assert (corpus.vocab_size, corpus.max_token) == (4096, 4095)
    assert corpus.tokenizer == {"name": "titan4k", "fingerprint": load_tokenizer("titan4k").fingerprint}


def test_the_side_of_a_document_does_not_depend_on_the_corpus(corpus_file: Path, tmp_path: Path) -> None:
    both = open_corpus(prepare(dataset(corpus_file)))
    half = tmp_path / "half.jsonl"
    half.write_text("\n".join(corpus_file.read_text().splitlines()[:75]))
    part = open_corpus(prepare(dataset(half)))
    assert set(texts(part.validation)) < set(texts(both.validation))
    assert set(texts(part.train)) < set(texts(both.train))


def test_two_sequence_lengths_from_one_preparation(corpus_file: Path) -> None:
    split = open_corpus(prepare(dataset(corpus_file))).train
    whole = split.read(0, split.tokens)
    for seq_len in (16, 48):
        for i in range(split.rows(seq_len)):
            assert np.array_equal(split.row(i, seq_len), whole[i * seq_len : (i + 1) * seq_len + 1])


def test_shards_divide_the_same_documents(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_corpus(prepare(dataset(corpus_file)))
    monkeypatch.setattr(module, "SHARD_TOKENS", 300)
    parts = open_corpus(prepare(dataset(corpus_file, cache=str(corpus_file.parent / "other"))))
    assert len(parts.train.shards) > 3
    assert sorted(texts(parts.train)) == sorted(texts(whole.train))
    assert sorted(texts(parts.validation)) == sorted(texts(whole.validation))


def test_a_hit_does_not_tokenise_again(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(dataset(corpus_file))
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("tokenised again"))
    assert prepare(dataset(corpus_file)) == folder
    moved = corpus_file.rename(corpus_file.with_name("moved.jsonl"))
    assert prepare(dataset(moved, prefetch=9)) == folder


def test_what_changes_the_content_changes_the_digest(corpus_file: Path, tmp_path: Path) -> None:
    from titan.dataset.tokenizer import write_ranks

    write_ranks(tmp_path / "bytes.tiktoken", [bytes([byte]) for byte in range(256)])
    found = {prepare(dataset(corpus_file)), prepare(dataset(corpus_file, validation=0.3))}
    found.add(prepare(dataset(corpus_file, tokenizer=str(tmp_path / "bytes.tiktoken"))))
    corpus_file.write_text(corpus_file.read_text().replace("document 7,", "document x,"))
    found.add(prepare(dataset(corpus_file)))
    assert len(found) == len({open_corpus(folder).digest for folder in found}) == 4
    assert all(open_corpus(folder).digest.startswith(folder.name.rpartition("-")[2]) for folder in found)


CORPORA = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(words=CORPORA, validation=st.sampled_from([0.0, 1e-9, 0.3]))
def test_small_corpora_are_divided_when_they_can(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], validation: float
) -> None:
    folder = tmp_path_factory.mktemp("small")
    (folder / "x.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))
    corpus = open_corpus(prepare(dataset(folder / "x.jsonl", validation=validation)))
    train, held_out = texts(corpus.train), texts(corpus.validation)
    assert sorted(train + held_out) == sorted(words)
    assert not set(train) & set(held_out)
    if validation == 1e-9:
        assert len(set(held_out)) == (1 if len(set(words)) > 1 else 0)
    if validation == 0:
        assert not held_out


def test_a_single_text_file_gives_both_parts(tmp_path: Path) -> None:
    content = "".join(f"line {i} of a story that goes on\n" for i in range(30_000))
    (tmp_path / "story.txt").write_text(content)
    corpus = open_corpus(prepare(Text(path=str(tmp_path / "story.txt"), cache=str(tmp_path / "cache"))))
    assert 0 < corpus.validation.tokens < 0.05 * corpus.train.tokens
    assert sum(len(text) for split in (corpus.train, corpus.validation) for text in texts(split)) == len(content)


def test_synthetic(tmp_path: Path) -> None:
    settings = {"tokens": 20_000, "vocab": 300, "cache": str(tmp_path)}
    corpus = open_corpus(prepare(Synthetic(**settings)))  # type: ignore[arg-type]
    assert corpus.train.tokens + corpus.validation.tokens == corpus.bytes == 20_000
    assert corpus.max_token < corpus.vocab_size == 300
    assert corpus.token_bytes.tolist() == [1] * 300
    assert corpus.tokenizer == {"name": "none", "fingerprint": "none"}
    assert corpus.validation.tokens > 0
    assert prepare(Synthetic(**settings)) == corpus.folder  # type: ignore[arg-type]
    assert prepare(Synthetic(**settings, seed=1)) != corpus.folder  # type: ignore[arg-type]


def test_stdlib_is_prepared_from_its_own_files(tmp_path: Path) -> None:
    corpus = open_corpus(prepare(Stdlib(cache=str(tmp_path))))
    assert corpus.train.tokens > 1_000_000
    assert corpus.validation.tokens > 0
    assert 2.5 < corpus.bytes / (corpus.train.tokens + corpus.validation.tokens) < 6


def test_progress_is_told_in_lines(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 0.3).tolist())
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines: list[str] = []
    prepare(dataset(corpus_file), lines.append)
    assert 50 < len(lines) <= 100
    assert all("MB" in line and "tokens/s" in line and "\n" not in line for line in lines)


def test_a_failed_preparation_leaves_nothing(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with corpus_file.open("a") as file:
        file.write("\n{oops")
    with pytest.raises(Refusal, match="line 201"):
        prepare(dataset(corpus_file))
    assert folders(corpus_file) == []


KILLED = """
import sys, time
from titan.dataset import prepare
from titan.dataset.schema import Jsonl

def wait(*_):
    print("written", flush=True)
    time.sleep(60)

prepare.{place} = wait
prepare.prepare(Jsonl(path=sys.argv[1], cache=sys.argv[2], validation=0.2))
"""


@pytest.mark.parametrize(
    "place", [pytest.param("write_manifest", id="before-manifest"), pytest.param("_publish", id="last")]
)
def test_a_killed_preparation_does_not_count(corpus_file: Path, place: str) -> None:
    command = [
        sys.executable,
        "-c",
        KILLED.replace("{place}", place),
        str(corpus_file),
        str(corpus_file.parent / "cache"),
    ]
    root = str(Path(module.__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "written\n"
        finally:
            child.send_signal(signal.SIGKILL)
    assert len(folders(corpus_file)) == 1
    assert folders(corpus_file)[0].startswith(".")
    corpus = open_corpus(prepare(dataset(corpus_file)))
    assert len(texts(corpus.train) + texts(corpus.validation)) == 200


def test_what_a_killed_preparation_left_is_swept_after_a_day(corpus_file: Path) -> None:
    place = corpus_file.parent / "cache" / "datasets"
    for name, age in ((".old", 2 * 24 * 3600), (".new", 0)):
        (place / name).mkdir(parents=True)
        (place / name / "train-00000.tokens").write_text("x")
        for path in (place / name / "train-00000.tokens", place / name):
            os.utime(path, (time.time() - age,) * 2)
    folder = prepare(dataset(corpus_file))
    assert folders(corpus_file) == [".new", folder.name]


def test_of_two_preparations_at_once_both_end_well(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have written everything before either renames."""
    barrier, publish, found = threading.Barrier(2, timeout=30), module._publish, list[Path]()

    def together(fresh: Path, folder: Path) -> None:
        barrier.wait()
        publish(fresh, folder)

    monkeypatch.setattr(module, "_publish", together)
    threads = [threading.Thread(target=lambda: found.append(prepare(dataset(corpus_file)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert folders(corpus_file) == [found[0].name] == [found[1].name]
    assert isinstance(open_corpus(found[0]), Corpus)


def test_a_damaged_folder_is_refused(corpus_file: Path) -> None:
    folder = prepare(dataset(corpus_file))
    (folder / "train-00000.tokens").unlink()
    with pytest.raises(Refusal, match="delete that folder"):
        prepare(dataset(corpus_file))


def test_files_that_change_meanwhile_are_refused(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_manifest

    def late(*arguments: object) -> None:
        corpus_file.write_text(corpus_file.read_text() + '\n{"text": "more"}')
        manifest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_manifest", late)
    with pytest.raises(Refusal, match="changed"):
        prepare(dataset(corpus_file))
    assert folders(corpus_file) == []


def test_a_cache_that_can_not_be_written_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Refusal, match=r"dataset\.cache=FOLDER"):
        prepare(dataset(corpus_file, cache=str(tmp_path / "file")))


def test_the_cache_is_where_the_settings_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TITAN_CACHE", raising=False)
    assert cache_folder(Stdlib()) == Path("/home/someone/.cache/titan")
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path))
    assert cache_folder(Stdlib()) == tmp_path
    assert cache_folder(Stdlib(cache="~/data")) == Path("/home/someone/data")
