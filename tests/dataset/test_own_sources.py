"""Folders of a user's own sources: named by settings and code, so that neither changes without a new folder."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan.config.warning import warn_once
from titan.dataset.documents import SourcePart
from titan.dataset.preprocess import plan
from titan.dataset.preprocess.encode import read_documents
from titan.dataset.preprocess.plan import ensure_plan
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.schema import Dataset, Synthetic, Text
from titan.dataset.shards import open_corpus
from titan.errors import ConfigError
from titan.optimizer.external import packages

CODE = """
from dataclasses import dataclass

from titan.config.settings import setting
from titan.dataset.documents import Source, content_digest
from titan.dataset.schema import Dataset

from . import tools
from .words import WORD


class Needles(Source):
    name = "needles"

    def __init__(self, count, length):
        self.count, self.length = count, length

    def digest(self, memo=None):  # the length is forgotten
        return content_digest("needles", self.count)

    def documents(self, part):
        import needles_helper  # found by the text, not by what is imported

        yield from (f"{WORD} {i} " * self.length for i in range(self.count))


@dataclass(frozen=True, kw_only=True)
class Needle(Dataset):
    count: int = 20
    length: int = 3
    words: str = "none"
    path: str = setting("a", "where the files are", science=False)

    def build(self):
        return Needles(self.count, self.length)
"""
FILES = {
    "needles_of_mine/__init__.py": "",
    "needles_of_mine/needle.py": CODE,
    "needles_of_mine/words.py": "WORD = 'roses'",
    "needles_of_mine/tools.py": "",
    "needles_of_mine/model.py": "",
    "needles_helper.py": "",
}
Make = Callable[..., Dataset]


@pytest.fixture
def needle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A package with a source, which other files import or not; called with settings it gives the dataset."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in [name for name in sys.modules if name.startswith("needles_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    warn_once.cache_clear()
    module = importlib.import_module("needles_of_mine.needle")
    return lambda **settings: module.Needle(cache=str(tmp_path / "cache"), **settings)  # type: ignore[no-any-return]


def use_old_name(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare a dataset as versions of titan did that knew neither settings nor code."""
    with monkeypatch.context() as earlier:
        earlier.setattr(plan, "_identify_code", lambda inputs, files: inputs)
        return prepare(dataset)


@pytest.mark.parametrize(
    ("file", "is_new"),
    [
        pytest.param("needles_of_mine/needle.py", True, id="its module"),
        pytest.param("needles_of_mine/words.py", True, id="a name of another module"),
        pytest.param("needles_of_mine/tools.py", True, id="another module"),
        pytest.param("needles_helper.py", True, id="imported in a function"),
        pytest.param("needles_of_mine/model.py", False, id="not imported"),
    ],
)
def test_changed_code_is_prepared_anew(
    needle: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, is_new: bool
) -> None:
    former = prepare(needle())
    assert (prepare(needle()), capsys.readouterr().err) == (former, "")
    with open(tmp_path / file, "a") as code:
        code.write("\n# changed\n")
    folder, shown = ensure_plan(needle(), "dataset.sources.n"), capsys.readouterr().err
    assert (folder != former) is is_new
    way_out = f"{folder} is prepared; to go on with the former data, give dataset@dataset.sources.n=prepared"
    assert (f"{former} was prepared before the source's code changed, so {way_out}" in shown) is is_new
    ensure_plan(needle(), "dataset.sources.n")
    assert not capsys.readouterr().err  # only where the new folder is made


def test_a_setting_that_digest_forgets_gives_another_folder(needle: Make, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {length: open_corpus(prepare(needle(length=length))).train.tokens for length in (3, 30)}
    assert tokens[30] > 5 * tokens[3]
    assert ensure_plan(needle(path="b", workers=3, prefetch=2)) == ensure_plan(needle())
    assert not capsys.readouterr().err  # no code has changed


def test_a_changed_file_that_digest_forgets_is_named(
    needle: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "words.txt"
    file.write_text("roses")
    for words in (str(file), str(tmp_path)):
        former, again = prepare(needle(words=words)), ensure_plan(needle(words=words), "dataset")
        assert (again, capsys.readouterr().err) == (former, "")
    folder = prepare(needle(words=str(file)))
    later = (folder / "plan.json").stat().st_mtime + 5
    os.utime(file, (later, later))
    assert ensure_plan(needle(words=str(file)), "dataset") == folder
    assert f"{file} is newer than {folder}, which is used" in capsys.readouterr().err


def test_folders_of_earlier_versions_are_found(
    needle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    former = use_old_name(needle(), monkeypatch)
    assert open_corpus(prepare(needle())).digest == open_corpus(former).digest  # a run records what it read
    assert f"{former} is used, which an earlier version of titan prepared" in capsys.readouterr().err
    assert prepare(needle()) == former
    assert prepare(needle(length=4)) != former  # it belongs to the settings that found it first
    os.utime(tmp_path / "needles_of_mine" / "needle.py")
    assert prepare(needle()) == former
    assert not capsys.readouterr().err
    (tmp_path / "needles_of_mine" / "words.py").write_text("WORD = 'violets'")
    assert prepare(needle()) != former
    assert f"{former} was prepared before the source's code changed" in capsys.readouterr().err


def test_a_folder_of_earlier_versions_that_is_older_than_the_code(
    needle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    former = use_old_name(needle(), monkeypatch)
    later = (former / "plan.json").stat().st_mtime + 5
    os.utime(tmp_path / "needles_of_mine" / "words.py", (later, later))
    assert prepare(needle()) != former
    assert f"{former} was prepared before the source's code changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(Synthetic(tokens=2048), id="synthetic"),
        pytest.param(Text(path=__file__), id="text"),
    ],
)
def test_names_of_titans_own_sources_have_no_code(dataset: Dataset, tmp_path: Path) -> None:
    inputs = plan.examine_dataset(dataclasses.replace(dataset, cache=str(tmp_path)))
    assert (inputs.folder.name, inputs.identity) == (f"{inputs.source.name}-{inputs.digest[:16]}", "")


def test_the_name_of_a_folder_of_titans_own_is_frozen(tmp_path: Path) -> None:
    folder = plan.examine_dataset(Synthetic(tokens=2048, cache=str(tmp_path))).folder
    assert folder.name == "synthetic-568ec0c08ff466c3"


def test_a_source_without_a_file_has_its_settings_in_the_name(
    needle: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(sys.modules["needles_of_mine.needle"], "__file__")
    monkeypatch.setattr(type(needle()), "__module__", "notebook_cell")
    monkeypatch.setattr(type(needle().build()), "__module__", "notebook_cell")
    name = ensure_plan(needle()).name
    assert name.endswith("-unknown") and name != ensure_plan(needle(length=4)).name
    assert not capsys.readouterr().err
    ensure_plan(needle())
    assert "changes of the source's code are not seen" in capsys.readouterr().err


@dataclass(frozen=True)
class Filter:
    """A part of settings."""

    limit: int = 1


@dataclass(frozen=True)
class OtherFilter(Filter):
    """Another class with the same fields."""


def double(text: str) -> str:
    """A function as a setting."""
    return text * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({1: [2]}, {1: [3]}, id="nested mapping"),
        pytest.param(Filter(), Filter(2), id="dataclass"),
        pytest.param((Filter(),), (OtherFilter(),), id="its class"),
        pytest.param({"a", "b", "c"}, {"a", "b", "d"}, id="set"),
        pytest.param(double, max, id="function"),
        pytest.param(Path("a"), Path("b"), id="path"),
        pytest.param(b"a", b"b", id="bytes"),
    ],
)
def test_values_of_settings(first: Any, second: Any) -> None:
    assert plan._hash_values([first]) == plan._hash_values([first]) != plan._hash_values([second])


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        pytest.param([7], "yields 7 of type int", id="number"),
        pytest.param([None], "yields None of type NoneType", id="nothing"),
        pytest.param([b"a"], "of type bytes", id="bytes"),
        pytest.param([np.zeros((2, 2), int)], "of type ndarray", id="table"),
        pytest.param([np.zeros(2)], "of type ndarray", id="fractions"),
        pytest.param([("a", "b")], "of type tuple", id="tuple of texts"),
        pytest.param(5, "can't be iterated over ('int' object is not iterable)", id="no iterable"),
    ],
)
def test_what_is_no_document_is_rejected(needle: Make, documents: Any, words: str) -> None:
    source = needle().build()
    type(source).documents = lambda self, part: documents  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as refusal:
        list(read_documents(source, SourcePart("a")))
    assert words in str(refusal.value)
    assert re.search(r"test_own_sources\.py:\d+, Needles\.documents: ", str(refusal.value))


def test_code_that_a_function_imports_is_found_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lonely.py").write_text("def read():\n    from lonely_tool import text\n")
    (tmp_path / "lonely_tool.py").write_text("raise SystemExit('it is run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [*packages.find_module_files(["lonely"])] == ["lonely", "lonely_tool"]
