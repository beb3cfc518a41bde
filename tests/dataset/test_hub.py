"""Datasets of the `datasets` library: folders in their formats, and a hub on this machine, with its tokenizers."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import COMMIT, Repositories, serve_repositories
from tests.support.tiers import full
from titan.dataset.documents import Skip, Source
from titan.dataset.sources import hub as module
from titan.dataset.sources.hub import build_hub_source
from titan.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def read(source: Source) -> list[Any]:
    return [document for part in source.parts() for document in source.documents(part)]


def lines(*texts: object) -> bytes:
    return b"".join(json.dumps({"text": text, "url": "u"}).encode() + b"\n" for text in texts)


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library keeps goes to a folder of this session's own; it asks no network."""
    import datasets

    folder = tmp_path_factory.getbasetemp() / "huggingface"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(folder))


def c4(folder: Path) -> None:
    for i in range(3):
        (folder / f"c4-train.0000{i}-of-00003.json.gz").write_bytes(gzip.compress(lines(f"{i}a", f"{i}b")))


def fineweb(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for i in range(3):
        table = pyarrow.table({"id": [1, 2], "text": [f"{i}a", f"{i}b"]})
        pyarrow.parquet.write_table(table, folder / f"00{i}_00000.parquet")


def saved(folder: Path) -> None:
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    texts = [f"{i}{letter}" for i in range(3) for letter in "ab"]
    DatasetDict(train=Dataset.from_dict({"text": texts, "id": texts})).save_to_disk(str(folder))


def saved_alone(folder: Path) -> None:
    from datasets import load_from_disk

    saved(folder / "all")
    load_from_disk(str(folder / "all"))["train"].save_to_disk(str(folder / "x"))
    for file in (folder / "x").iterdir():
        file.rename(folder / file.name)


@pytest.mark.full
@pytest.mark.parametrize("fill", [c4, fineweb, saved, saved_alone])
def test_folders_are_read_in_parts(
    tmp_path: Path, fill: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_ROWS", 2)
    fill(tmp_path)
    source = build_hub_source(str(tmp_path))
    parts = source.parts()
    again = pickle.loads(pickle.dumps(source))
    assert len({part.name for part in parts}) == len(parts) == 3
    assert [list(again.documents(part)) for part in parts] == [[f"{i}a", f"{i}b"] for i in range(3)]
    assert read(source) == read(again)


@pytest.mark.full
def test_digests_differ_by_content_and_parameters_and_not_by_place(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        c4(tmp_path / folder)
    a, b = (str(tmp_path / folder) for folder in "ab")
    known = build_hub_source(a).digest()
    assert known == build_hub_source(b).digest() == build_hub_source(a, on_error="skip").digest()
    others = [build_hub_source(a, "x"), build_hub_source(a, split="test"), build_hub_source(a, field="url")]
    assert len({known, *(other.digest() for other in others)}) == 4
    (tmp_path / "b" / "c4-train.00000-of-00003.json.gz").write_bytes(gzip.compress(lines("new")))
    assert build_hub_source(b).digest() != known


def empty_split(folder: Path) -> None:
    (folder / "x.jsonl").write_bytes(b"")


def saved_nothing(folder: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": []}).save_to_disk(str(folder))


def subsets(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(lines(name))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")


@pytest.mark.parametrize(
    ("fill", "given", "words"),
    [
        full(c4, {"split": "test"}, ["dataset.split=test", "no such split", "splits: train"], id="split"),
        pytest.param(
            saved, {"split": "test"}, ["dataset.split=test", "no such split", "splits: train"], id="saved-split"
        ),
        pytest.param(
            c4, {"field": "body"}, ["dataset.name=", "no column 'body'", "its columns: text, url"], id="column"
        ),
        pytest.param(saved, {"field": "body"}, ["no column 'body'", "its columns: text, id"], id="saved-column"),
        pytest.param(subsets, {"subset": "c"}, ["dataset.subset=c", "its subsets: a, b"], id="subset"),
        pytest.param(subsets, {}, ["dataset.subset=null", "its subsets: a, b"], id="no-subset"),
        pytest.param(lambda folder: None, {}, ["dataset.name=", "no data files"], id="empty-folder"),
        pytest.param(empty_split, {}, ["dataset.split=train", "no rows"], id="empty-split"),
        pytest.param(saved_nothing, {}, ["dataset.split=train", "no rows"], id="saved-nothing"),
    ],
)
def test_bad_folders_are_refused(
    tmp_path: Path, fill: Callable[[Path], None], given: dict[str, str], words: list[str]
) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read(build_hub_source(str(tmp_path), **given))
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_a_subset(tmp_path: Path) -> None:
    subsets(tmp_path)
    assert read(build_hub_source(str(tmp_path), "b")) == ["b"]


def test_a_broken_shard(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines("one", None)))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(lines(*map(str, range(1000))))[:-50])
    with pytest.raises(ConfigError, match=r"shard 2 of 2: a file is broken or truncated .*dataset\.on_error=skip"):
        read(build_hub_source(str(tmp_path)))
    where = f"{tmp_path} train, shard"
    skips = [Skip("empty", f"{where} 1 of 2, row 1"), Skip("broken file", f"{where} 2 of 2")]
    assert read(build_hub_source(str(tmp_path), on_error="skip")) == ["one", *skips]
    (tmp_path / "b.json.gz").rename(tmp_path / "0.json.gz")
    with pytest.raises(ConfigError, match=r"can't be read \(Compressed file ended.*fetch it again"):
        read(build_hub_source(str(tmp_path)))


def test_a_commit_needs_no_network() -> None:
    source = build_hub_source("some/name", revision=COMMIT)
    assert (
        source.digest()
        == build_hub_source("some/name", revision=COMMIT).digest()
        != build_hub_source("some/name", revision="b" * 40).digest()
    )
    assert source.name == "name"


README = (
    "---\nconfigs:\n" + "".join(f"- config_name: {n}\n  data_files: {n}/*.json.gz\n" for n in ("en", "de")) + "---\n"
)
PROGRAM = """
import json, sys
from titan.dataset.sources.hub import build_hub_source
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError

def dataset(*about):
    source = build_hub_source(*about)
    return [[d for d in source.documents(part)] for part in source.parts()], source.digest()

def tokenizer(name):
    found = load_tokenizer(name)
    return found.encode_document("ab"), found.notes()

for kind, *about in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"dataset": dataset, "tokenizer": tokenizer}[kind](*about)))
    except ConfigError as refusal:
        print(json.dumps(str(refusal)))
"""


def asked(*questions: list[Any], home: Path, **environment: str) -> list[Any]:
    """The answers of a process that knows the hub by its environment; of a refusal its sentence."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    known |= {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    known |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(questions)], env=known, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tokenizer_files() -> dict[str, bytes]:
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": b'{"eos_token": "<end>"}'}


@pytest.fixture
def server() -> Iterator[Repositories]:
    files = tokenizer_files()
    repositories = {
        "datasets/allenai/c4": {
            "README.md": README.encode(),
            "en/c4-train.0.json.gz": gzip.compress(lines("a", "b")),
            "en/c4-train.1.json.gz": gzip.compress(lines("c")),
        },
        "datasets/some/gated": {"x.jsonl": lines("x")},
        "some/model": files,
        "some/bare": {"tokenizer.json": files["tokenizer.json"]},
        "some/other": {"config.json": b"{}"},
        "some/wrong": files | {"tokenizer_config.json": b'{"eos_token": "<none>"}'},
        "some/gated": files,
    }
    with serve_repositories(Repositories(repositories, {"datasets/some/gated", "some/gated"})) as hub:
        yield hub


@pytest.mark.full
def test_datasets_of_the_hub(server: Repositories, tmp_path: Path) -> None:
    questions = [
        ["dataset", "allenai/c4", "en"],
        ["dataset", "allenai/c4", "en", "train", COMMIT],
        ["dataset", "some/gated"],
        ["dataset", "allenai/c4", "fr"],
        ["dataset", "allenai/c4", "en", "test"],
        ["dataset", "allenai/c4", "en", "train", "v9"],
        ["dataset", "some/none"],
        ["dataset", "no such name"],
    ]
    named, by_commit, gated, subset, split, revision, missing, bad = asked(
        *questions, home=tmp_path, HF_ENDPOINT=server.url
    )
    assert named == by_commit and named[0] == [["a", "b"], ["c"]]
    log_in = "log in with `hf auth login` or set HF_TOKEN."
    nothing = "there is no such folder, and no such repository on the hub; if it is private,"
    assert (
        gated == f"dataset.name=some/gated: some/gated is gated; ask for access on its page of the hub, then {log_in}"
    )
    assert subset == "dataset.subset=fr: allenai/c4 has no such subset (its subsets: en, de); choose another."
    assert split == "dataset.split=test: allenai/c4 has no such split (its splits: train); choose another."
    assert revision.startswith("dataset.revision=v9: allenai/c4 has no such revision; give one of its branches")
    assert missing == f"dataset.name=some/none: {nothing} {log_in}"
    assert bad == f"dataset.name=no such name: {nothing} {log_in}"
    (opened,) = asked(questions[2], home=tmp_path, HF_ENDPOINT=server.url, HF_TOKEN=server.token)
    assert opened[0] == [["x"]]


@pytest.mark.full
def test_tokenizers_of_the_hub(server: Repositories, tmp_path: Path) -> None:
    names = ["some/model", "some/model@main", "some/bare", "some/gated", "some/none", "some/other", "some/wrong",
             "some/model@v9"]  # fmt: skip
    questions = [["tokenizer", name] for name in names]
    model, main, bare, gated, missing, other, wrong, revision = asked(*questions, home=tmp_path, HF_ENDPOINT=server.url)
    assert model == [[2, 3], ["some/model: 4 ids; documents end with <end>, begin without a token"]]
    assert main[0] == [2, 3]
    assert bare[0] == [2] and bare[1][1].startswith("warning: some/bare has no end-of-document token")
    assert gated.startswith("dataset.tokenizer=some/gated: some/gated is gated; ask for access on its page")
    assert "no such repository on the hub; if it is private, log in with `hf auth login`" in missing
    assert other == "dataset.tokenizer=some/other: it has no tokenizer.json; give a file, or another model's name."
    assert "names the eos_token '<none>', which the vocabulary lacks" in wrong
    assert revision.startswith("dataset.tokenizer=some/model@v9: some/model has no such revision")
    (opened,) = asked(questions[3], home=tmp_path, HF_ENDPOINT=server.url, HF_TOKEN=server.token)
    assert opened[0] == [2, 3]


@pytest.mark.full
def test_tokenizers_without_a_network(server: Repositories, tmp_path: Path) -> None:
    questions = [["tokenizer", "some/model"], ["tokenizer", "some/bare"]]
    before = asked(*questions, home=tmp_path, HF_ENDPOINT=server.url)
    *after, other = asked(*questions, ["tokenizer", "some/gated"], home=tmp_path, HF_HUB_OFFLINE="1")
    assert after == before
    assert other.startswith("dataset.tokenizer=some/gated: the hub can't be reached (")
    assert other.endswith("; check the network, or fetch it on another machine.")
