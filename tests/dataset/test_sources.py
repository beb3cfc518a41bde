"""Sources: which documents files hold, what names their content, and what is refused."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.dataset.documents import Skip, Source
from titan.dataset.sources import files, local
from titan.dataset.sources.local import (
    MarkovSource,
    build_jsonl_source,
    build_stdlib_source,
    build_text_source,
    split_documents,
    split_passages,
)
from titan.errors import ConfigError


def documents(source: Source) -> list[str]:
    every = (document for part in source.parts() for document in source.documents(part))
    return [document for document in every if not isinstance(document, Skip)]


def skipped(source: Source) -> list[Skip]:
    every = (document for part in source.parts() for document in source.documents(part))
    return [document for document in every if isinstance(document, Skip)]


@pytest.mark.full
def test_stdlib_is_the_library_without_tests() -> None:
    source = build_stdlib_source()
    found = [Path(part.name) for part in source.parts()]
    names = {file.name for file in found}
    places = {part for file in found for part in file.parts}
    assert {"argparse.py", "decoder.py", "base_events.py"} <= names
    assert not places & {"site-packages", "test", "__pycache__", "encodings"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    assert any("class ArgumentParser" in document for document in documents(source))
    assert source.digest() == build_stdlib_source().digest()


def test_a_library_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="dataset=text"):
        build_stdlib_source()


def test_the_few_files_that_are_not_utf8_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_bytes(b"# caf\xe9")
    (tmp_path / "b.py").write_text("# plain")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert documents(build_stdlib_source()) == ["# plain"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of mixed files."""
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    files = {"b.txt": "bee", "a.md": "eh", "sub/c.text": "sea", "d.csv": "dee", "e.txt": "", "sub/.git/h.txt": "hidden"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("", ["eh", "bee", "sea"], id="folder"),
        pytest.param("d.csv", ["dee"], id="file-of-any-name"),
        pytest.param("*.txt", ["bee"], id="glob"),
        pytest.param("**/*.t*", ["bee", "sea"], id="recursive-glob"),
    ],
)
def test_text_finds_files(library: Path, path: str, expected: list[str]) -> None:
    assert documents(build_text_source(str(library / path))) == expected


def test_a_folder_without_text_files_gives_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "x.rst").write_text("ex")
    (tmp_path / ".hidden").write_text("no")
    assert documents(build_text_source(str(tmp_path))) == ["ex"]


def test_a_separator_divides_and_blank_documents_vanish(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\n<|e|>two<|e|>\n <|e|>drei ä".encode())
    assert documents(build_text_source(str(tmp_path), "<|e|>")) == ["one\r\n", "two", "drei ä"]


@given(document=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\n\n \r")), step=st.integers(8, 40))
def test_passages_are_the_file_cut_at_lines(document: str, step: int) -> None:
    data = document.encode()
    parts = list(split_passages(io.BytesIO(data), step))
    assert b"".join(parts) == data
    assert all(len(part) < 2 * step for part in parts)
    assert "".join(part.decode() for part in parts) == document
    assert all(part.endswith(b"\n") or b"\n" not in part for part in parts[:-1])


@given(data=st.text("ab<>"), chunk=st.integers(1, 5))
def test_separated_is_split_whatever_the_chunks(data: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_CHUNK", chunk)
        assert list(split_documents(io.BytesIO(data.encode()), b"<>")) == data.encode().split(b"<>")


def test_a_single_megabyte_has_passages_enough(tmp_path: Path) -> None:
    content = "".join(f"line {i} of a long story\n" for i in range(40_000))
    (tmp_path / "story.txt").write_text(content)
    parts = documents(build_text_source(str(tmp_path / "story.txt")))
    assert "".join(parts) == content
    assert 100 < len(parts) < 200
    assert all(part.endswith("\n") for part in parts)


def test_jsonl_gives_the_field_of_each_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one"}), "", json.dumps({"id": 2, "text": "zwei ü\n"}, ensure_ascii=False), "  "]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    (tmp_path / "b.json").write_text(r'{"text": "half \ud800 a pair"}')
    (tmp_path / "c.txt").write_text("no JSON")
    assert documents(build_jsonl_source(str(tmp_path))) == ["one", "zwei ü\n", "half \ufffd a pair"]
    (tmp_path / "d.jsonl").write_text('{"text": "t", "body": "b"}')
    assert documents(build_jsonl_source(str(tmp_path / "d.jsonl"), "body")) == ["b"]


def test_documents_of_nothing_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n{"text": null}\n\n{"text": " \\n"}\n')
    (tmp_path / "y.txt").write_text(" \n")
    where = f"{tmp_path / 'x.jsonl'}, line "
    assert skipped(build_jsonl_source(str(tmp_path / "x.jsonl"))) == [Skip("empty", f"{where}{n}") for n in (1, 2, 4)]
    assert [skip.reason for skip in skipped(build_text_source(str(tmp_path / "y.txt")))] == ["empty"]


GOOD = b'{"text": "fine"}\n'
TEXT_FILES: dict[str, dict[str, bytes]] = {
    "missing": {}, "empty": {"x.txt": b""}, "empty-ones": {"x.txt": b"", "y.txt": b""}, "bytes": {"x.txt": b"abc\xff"},
    "bytes-after-a-mark": {"x.txt": b"\xef\xbb\xbfabc\xff"},
    "bytes-in-a-later-passage": {"x.txt": b"ab\n" * 5000 + b"\xc3"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "path", "words"),
    [
        pytest.param("missing", "x.txt", ["dataset.path", "no such"], id="missing-path"),
        pytest.param("missing", "*.txt", ["dataset.path", "matches"], id="glob-without-match"),
        pytest.param("missing", "", ["dataset.path", "matches"], id="empty-folder"),
        pytest.param("empty", "x.txt", ["x.txt", "the file is empty"], id="empty-file"),
        pytest.param("empty-ones", "", ["all 2 files are empty"], id="folder-of-empty-files"),
        pytest.param("bytes", "x.txt", ["x.txt", "byte 3", "UTF-8"], id="bytes"),
        pytest.param("bytes-after-a-mark", "x.txt", ["byte 6"], id="bytes-after-a-mark"),
        pytest.param("bytes-in-a-later-passage", "", ["byte 15000"], id="bytes-in-a-later-passage"),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, found: str, path: str, words: list[str]) -> None:
    _refuse(build_text_source, tmp_path, TEXT_FILES[found], path, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", ["x.jsonl", "empty"], id="empty"),
        pytest.param(GOOD + b"\n{oops\n", ["x.jsonl, line 3", "not JSON"], id="broken-line"),
        pytest.param(GOOD + b"[1]\n", ["x.jsonl, line 2", "object"], id="line-of-another-kind"),
        pytest.param(b'{"body": ""}', ["line 1", "'text'", "body", "dataset.field"], id="no-field"),
        pytest.param(b'{"text": 5}', ["line 1", "is 5, not text"], id="field-that-is-no-text"),
        pytest.param(b"[" * 100_000, ["line 1", "not JSON"], id="nested-without-end"),
        pytest.param(GOOD + b'{"text": "\xff"}', ["x.jsonl", "byte 27", "UTF-8"], id="bytes"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    _refuse(build_jsonl_source, tmp_path, {"x.jsonl": content}, "", words)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    _refuse(build_jsonl_source, tmp_path, {"x.txt": b"hello"}, "", ["matches", ".jsonl"])


def _refuse(kind: Callable[[str], Source], folder: Path, files: dict[str, bytes], path: str, words: list[str]) -> None:
    """Expect one sentence with these words."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        documents(kind(str(folder / path)))
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_bad_bytes_after_a_separator_are_placed_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"one<>two<>\xff")
    with pytest.raises(ConfigError, match="byte 10 "):
        documents(build_text_source(str(tmp_path), "<>"))


def test_an_empty_separator_is_refused(library: Path) -> None:
    with pytest.raises(ConfigError, match="separator"):
        build_text_source(str(library), "")


def test_the_digest_is_the_content_not_its_place(tmp_path: Path) -> None:
    for folder, content in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(content)
    a, b, c = (build_text_source(str(tmp_path / folder)).digest() for folder in "abc")
    separated, lines = build_text_source(str(tmp_path / "a"), "\n"), build_jsonl_source(str(tmp_path / "a" / "x.txt"))
    assert a == b != c
    assert len({a, separated.digest(), lines.digest()}) == 3


def test_a_big_file_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "x.txt", tmp_path / "memo"
    file.write_bytes(b"a" * 2**20)
    os.utime(file, (1e9, 1e9))
    digest = build_text_source(str(file)).digest(memo)
    monkeypatch.setattr(files, "_hash_file", lambda path: pytest.fail("read again"))
    assert build_text_source(str(file)).digest(memo) == digest
    monkeypatch.undo()
    file.write_bytes(b"b" * 2**20)
    assert build_text_source(str(file)).digest(memo) != digest
    os.utime(file, (1.1e9, 1.1e9))
    assert build_text_source(str(file)).digest(memo) != digest


def test_a_memo_that_can_not_be_written_does_no_harm(tmp_path: Path) -> None:
    file, memo = tmp_path / "x.txt", tmp_path / "memo"
    file.write_bytes(b"a" * 2**20)
    os.utime(file, (1e9, 1e9))
    memo.write_text("a file where a folder should be")
    assert build_text_source(str(file)).digest(memo) == build_text_source(str(file)).digest()


def test_markov_documents() -> None:
    source = MarkovSource(tokens=30_000, vocab_size=50, seed=1)
    drawn = list(documents(source))
    assert sum(document.size for document in drawn) == 30_000
    assert all(100 <= document.size <= 500 for document in drawn[:-1])
    assert np.bincount(np.concatenate(drawn), minlength=50).min() > 300
    assert all(np.array_equal(a, b) for a, b in zip(drawn, documents(source), strict=True))
    digests = {
        MarkovSource(*about).digest() for about in [(30_000, 50, 1), (30_001, 50, 1), (30_000, 51, 1), (30_000, 50, 2)]
    }
    assert len(digests) == 4


def test_markov_can_be_learnt() -> None:
    """The entropy of the next token given the last is far below that of a token alone, and as documented."""
    tokens = np.concatenate(documents(MarkovSource(tokens=200_000, vocab_size=16, seed=3)))
    pairs = np.zeros((16, 16))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    rates = pairs / pairs.sum(axis=1, keepdims=True)
    entropy = -(pairs / pairs.sum() * np.log(np.where(rates > 0, rates, 1))).sum()
    assert entropy < 1.2 < np.log(16)


@pytest.mark.parametrize("path", [None, ("a", "b"), 3, "b", "nowhere"])
def test_what_is_left_out_is_not_known_of_another_path(tmp_path: Path, path: Any, monkeypatch: Any) -> None:
    """As of a source of one's own, whose setting `path` need not be where its files are."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.txt", "b/x.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("abc")
    found = files.describe_selection(path, build_text_source("a").parts())
    assert found == {"reads": "1 file of .txt, 3 bytes"}


@pytest.mark.parametrize(
    ("names", "reads", "leaves_out"),
    [
        pytest.param(["a.txt", "b.md"], "1 file of .txt, 3 bytes; 1 file of .md, 3 bytes", None, id="all"),
        pytest.param(["a.md", "b.py", "c/d.py"], "1 file of .md, 3 bytes", "2 files of .py, 6 bytes", id="code"),
        pytest.param(["a.txt.gz", "b.jsonl.zst"], "1 file of .txt.gz, 3 bytes", "1 file of .jsonl.zst", id="records"),
        pytest.param(["a.py", "b.jsonl"], "1 file of .py, 3 bytes", "1 file of .jsonl, 3 bytes", id="any other"),
        pytest.param(["a.txt", *(f"b.{i}" for i in range(12))], "1 file", "4 files of other suffixes", id="many"),
    ],
)
def test_what_is_read_and_left_out(tmp_path: Path, names: list[str], reads: str, leaves_out: str | None) -> None:
    for name in [*names, "empty.log", ".hidden"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.log" else "abc")
    found = files.describe_selection(str(tmp_path), build_text_source(str(tmp_path)).parts())
    assert reads in found["reads"] and (leaves_out or "") in found.get("leaves out", "")
    assert ("leaves out" in found) is (leaves_out is not None)


@pytest.mark.parametrize(
    ("name", "path", "kind"),
    [
        pytest.param("a.jsonl", "", "jsonl", id="folder of JSON Lines"),
        pytest.param("a.jsonl.gz", "a.jsonl.gz", "jsonl", id="file"),
        pytest.param("a.parquet", "*.parquet", "parquet", id="glob of Parquet files"),
    ],
)
def test_records_are_no_text(tmp_path: Path, name: str, path: str, kind: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=rf"dataset\.path=.*: .*{name} holds records.*dataset={kind} dataset\.p"):
        build_text_source(str(tmp_path / path))
