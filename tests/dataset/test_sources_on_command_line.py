"""Kinds of sources on the command line, a user's own among them, from settings to tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.schema import KINDS
from titan.dataset.shards import open_corpus
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.run.identity import select_settings

ROOT = Path(__file__).resolve().parent.parent.parent
POEMS = """
from dataclasses import dataclass

from titan.config.settings import setting
from titan.dataset.documents import Source, SourcePart, content_digest
from titan.dataset.schema import Dataset


class Volumes(Source):
    name = "volumes"

    def __init__(self, count):
        self.count = count

    def digest(self, memo=None):  # the content that the settings and the code name, such as that of files
        return content_digest("volumes", 1, self.count)

    def parts(self):  # read independently, by several processes; one part by default
        return [SourcePart(f"volume {i}", location=(i,)) for i in range(self.count)]

    def documents(self, part):
        yield f"Volume {part.location[0]}: roses are red."


@dataclass(frozen=True, kw_only=True)
class Poems(Dataset):
    count: int = setting(3, "number of volumes", at_least=1)

    def build(self):
        return Volumes(self.count)
"""
"""A module with a source of several parts, as a user writes it; docs/data.md has another one."""


@pytest.fixture
def poems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a source, and a folder with its YAML file."""
    (tmp_path / "poems_of_mine.py").write_text(POEMS)
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "poems.yaml").write_text("# Poems of mine.\n_target_: poems_of_mine.Poems\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TITAN_CONF", str(tmp_path / "conf"))
    return tmp_path


@pytest.mark.full
def test_a_source_of_ones_own(poems: Path) -> None:
    run = compose_test_run(["dataset=poems", "+dataset.count=40", "modules=[poems_of_mine]"])
    corpus = open_corpus(prepare(run.dataset))
    tokenizer = load_tokenizer("titan4k")
    documents = [f"Volume {i}: roses are red." for i in range(40)]
    expected = sum(len(tokenizer.encode_document(document)) for document in documents)
    assert corpus.train.tokens + corpus.validation.tokens == expected
    other = compose_test_run(["dataset=poems", "+dataset.count=2", "modules=[poems_of_mine]"])
    assert prepare(other.dataset) != prepare(run.dataset)


@pytest.mark.full
def test_a_source_of_ones_own_must_be_trusted(poems: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\._target_=poems_of_mine\.Poems.*add modules=\[poems_of_mine\]"):
        compose_test_run(["dataset=poems"])
    with pytest.raises(ConfigError, match=r"dataset\.count=0: must be at least 1"):
        compose_test_run(["dataset=poems", "+dataset.count=0", "modules=[poems_of_mine]"])


def rows(path: Path, name: str, row: dict[str, Any]) -> None:
    (path / name).write_text((json.dumps(row) + "\n") * 50)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
def test_kinds_give_tokens(tmp_path: Path, kind: str) -> None:
    if kind == "text":
        (tmp_path / "x.txt").write_text("one two\n" * 50)
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["one two"] * 50}), tmp_path / "x.parquet")
    else:
        rows(tmp_path, "x.jsonl", {"text": "one two"})
    place = "name" if kind == "hub" else "path"
    dataset = compose_test_run([f"dataset={kind}", f"dataset.{place}={tmp_path}", "dataset.validation=0"]).dataset
    source = dataset.build()
    assert isinstance(dataset, KINDS[kind])  # type: ignore[arg-type]
    assert (source.masked, source.vocab_size) == (False, None)
    assert open_corpus(prepare(dataset)).train.tokens > 50


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param("c4", ("allenai/c4", "en", "train", "text"), id="c4"),
        pytest.param("fineweb_edu", ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", "text"), id="fineweb_edu"),
    ],
)
def test_presets(choice: str, expected: tuple[str, ...]) -> None:
    dataset: Any = compose_test_run([f"dataset={choice}"]).dataset
    assert (dataset.name, dataset.subset, dataset.split, dataset.field) == expected
    assert compose_test_run([f"dataset={choice}", "dataset.revision=x"]).dataset.revision == "x"  # type: ignore[attr-defined]


@pytest.mark.full
def test_where_the_data_are_is_no_science() -> None:
    def science(*overrides: str) -> dict[str, Any]:
        return select_settings(compose_test_run(list(overrides)), science=True)

    assert science("dataset=chat", "dataset.path=a") == science("dataset=chat", "dataset.path=b")
    assert science("dataset=hub", "dataset.name=a") == science("dataset=hub", "dataset.name=b")
    assert science("dataset=hub", "dataset.name=a") != science("dataset=hub", "dataset.name=a", "dataset.split=test")


@pytest.mark.full
def test_schemas_and_sources_need_no_heavy_package() -> None:
    heavy = ["torch", "datasets", "pyarrow", "zstandard", "tokenizers", "fsspec", "huggingface_hub"]
    modules = ["documents", "schema", "tokenizers.load", "tokenizers.tokenizer"]
    modules += [f"sources.{name}" for name in ("chat", "files", "hub", "local", "records")]
    program = (
        f"import sys, {', '.join(f'titan.dataset.{m}' for m in modules)}; print({{*{heavy}}} & sys.modules.keys())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stderr
