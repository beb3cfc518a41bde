"""Files: compressed, of other machines, cut into parts, broken."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from titan.dataset.documents import Skip, Source
from titan.dataset.sources import files, local
from titan.dataset.sources.local import build_jsonl_source, build_parquet_source, build_text_source
from titan.errors import ConfigError

LINES = b"".join(b'{"text": "document number %d, not a short one"}\n' % i for i in range(2000))
TEXTS = [f"document number {i}, not a short one" for i in range(2000)]


def read(source: Source) -> tuple[list[str], list[Skip]]:
    """The documents of all parts, and what was left out."""
    every = [document for part in source.parts() for document in source.documents(part)]
    return [d for d in every if isinstance(d, str)], [d for d in every if isinstance(d, Skip)]


def zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def streamed_zst(data: bytes) -> bytes:
    """Without the size of the content in the frame's head, as pipes write it."""
    import zstandard

    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


PACKED = {
    "gz": ("x.jsonl.gz", gzip.compress(LINES)),
    "gz-members": ("x.jsonl.gz", gzip.compress(LINES[:30_000]) + gzip.compress(LINES[30_000:])),
    "zst": ("x.jsonl.zst", zst(LINES)),
    "zst-streamed": ("x.jsonl.zst", streamed_zst(LINES)),
    "zst-frames": ("x.json.ZST", zst(LINES[:30_000]) + zst(b"") + streamed_zst(LINES[30_000:])),
}


@pytest.mark.parametrize(("name", "packed"), PACKED.values(), ids=PACKED)
def test_compressed_files_are_read_whole(tmp_path: Path, name: str, packed: bytes) -> None:
    (tmp_path / name).write_bytes(packed)
    (tmp_path / "other.csv.gz").write_bytes(b"")
    assert read(build_jsonl_source(str(tmp_path))) == (TEXTS, [])


@pytest.mark.parametrize("separator", [None, "\n"])
def test_compressed_text_is_divided_as_plain_text(tmp_path: Path, separator: str | None) -> None:
    """Passages differ with the size of the files; here it is below what counts."""
    for name, data in (("a.txt", LINES), ("b.txt.gz", gzip.compress(LINES)), ("c.md.zst", zst(LINES))):
        (tmp_path / name).write_bytes(data)
    plain, *packed = (read(build_text_source(str(file), separator))[0] for file in sorted(tmp_path.iterdir()))
    assert packed == [plain, plain]


@pytest.mark.parametrize("name", ["gz", "zst"])
@pytest.mark.parametrize("share", [0.001, 0.8])
def test_a_truncated_download(tmp_path: Path, name: str, share: float) -> None:
    file = tmp_path / PACKED[name][0]
    lines = b"".join(json.dumps({"text": f"{i} {i * 7919 % 1_000_003}"}).encode() + b"\n" for i in range(12_000))
    packed = gzip.compress(lines) if name == "gz" else zst(lines)
    file.write_bytes(packed[: int(share * len(packed))])
    with pytest.raises(ConfigError) as refusal:
        read(build_jsonl_source(str(file)))
    assert str(refusal.value).startswith(f"{file}: ends too early (truncated download?) after ")
    assert str(refusal.value).endswith("fetch it again, or give dataset.on_error=skip to use the content before it.")
    came, skips = read(build_jsonl_source(str(file), on_error="skip"))
    assert skips == [Skip("broken file", str(file))]
    assert came == [f"{i} {i * 7919 % 1_000_003}" for i in range(len(came))]
    assert (len(came) > 2000) == (share > 0.5)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("x.jsonl.gz", b"no gzip", id="gz-of-something-else"),
        pytest.param("x.jsonl.gz", gzip.compress(LINES) + b"rubbish", id="gz-with-rubbish"),
        pytest.param("x.jsonl.gz", gzip.compress(LINES)[:-8] + b"\0" * 8, id="gz-with-a-wrong-sum"),
        pytest.param("x.jsonl.zst", b"no zstd", id="zst-of-something-else"),
        pytest.param("x.jsonl.zst", zst(LINES) + b"rubbish", id="zst-with-rubbish"),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"x\.jsonl\.\w+: is broken after \d+ bytes.*dataset\.on_error=skip"
    ) as refusal:
        read(build_jsonl_source(str(tmp_path)))
    assert "\n" not in str(refusal.value)
    came, skips = read(build_jsonl_source(str(tmp_path), on_error="skip"))
    assert came == TEXTS[: len(came)]
    assert [skip.reason for skip in skips] == ["broken file"]


PIECES = st.lists(st.sampled_from(["a", "b", "\n", "\r\n", "<", ">", "<>", "é", "漢", " ", "ab" * 20]), max_size=60)


@given(pieces=PIECES, separator=st.sampled_from(["<>", "\n", "\n\n", "aba", "a", "é"]), size=st.integers(1, 40))
@example(pieces=["\n"] * 9 + ["a"], separator="\n\n", size=2)
def test_parts_are_the_file_divided_by_a_separator(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], separator: str, size: int
) -> None:
    content = "\ufeff" + "".join(pieces)
    file = tmp_path_factory.getbasetemp() / "separated.txt"
    file.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", size)
        source = build_text_source(str(file), separator)
        came = [d for part in source.parts() for d in source.documents(part)]
    expected = content.encode().split(separator.encode())
    texts = [piece.decode() for piece in [expected[0].removeprefix("\ufeff".encode()), *expected[1:]]]
    assert [d for d in came if isinstance(d, str)] == [t for t in texts if t and not t.isspace()]
    assert len(came) == len(texts)


@given(
    texts=st.lists(st.none() | st.text(st.sampled_from('ab é漢\n"'), max_size=30), min_size=1, max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    size=st.integers(1, 80),
)
def test_parts_are_the_file_divided_by_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None], end: str, last: bool, size: int
) -> None:
    lines = ["" if t is None else json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    file = tmp_path_factory.getbasetemp() / "lines.jsonl"
    file.write_bytes("".join(["\ufeff", end.join(lines), end if last else ""]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", size)
        assert read(build_jsonl_source(str(file)))[0] == [t for t in texts if t is not None and t and not t.isspace()]


@given(pieces=PIECES, size=st.integers(1, 60), step=st.integers(8, 20))
def test_passages_do_not_depend_on_the_parts(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], size: int, step: int
) -> None:
    content = "".join(["x", *pieces])
    file = tmp_path_factory.getbasetemp() / "passages.txt"
    file.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "MIN_PASSAGE_BYTES", step)
        source = build_text_source(str(file))
        whole = [d for part in source.parts() for d in source.documents(part)]
        patch.setattr(files, "PART_BYTES", size)
        assert len(source.parts()) >= len(content.encode()) // max(size, step)
        assert [d for part in source.parts() for d in source.documents(part)] == whole
    assert all(len(d.encode()) < 2 * step for d in whole if isinstance(d, str))
    if not any(isinstance(d, Skip) for d in whole):
        assert "".join(d for d in whole if isinstance(d, str)) == content


def test_parts_survive_pickling_and_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 10_000)
    (tmp_path / "x.jsonl").write_bytes(LINES)
    source = pickle.loads(pickle.dumps(build_jsonl_source(str(tmp_path))))
    parts = pickle.loads(pickle.dumps(source.parts()))
    assert len({part.name for part in parts}) == len(parts) == -(-len(LINES) // 10_000)
    assert sum(part.bytes for part in parts) == len(LINES)
    assert [d for part in parts for d in source.documents(part)] == TEXTS


def test_a_bad_line_in_a_later_part_is_placed_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    (tmp_path / "x.jsonl").write_bytes(LINES[:10_040].rpartition(b"\n")[0] + b"\n{oops\n" + LINES)
    place = LINES[:10_040].rindex(b"\n") + 1
    with pytest.raises(ConfigError, match=rf"x\.jsonl, byte {place}: not JSON"):
        read(build_jsonl_source(str(tmp_path)))
    assert len(read(build_jsonl_source(str(tmp_path), on_error="skip"))[0]) > len(TEXTS)


BUILDERS: dict[str, Callable[..., Source]] = {
    "x.jsonl": build_jsonl_source, "x.txt": build_text_source, "x.parquet": build_parquet_source
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "reasons", "texts"),
    [
        pytest.param("x.jsonl", b'{"text": "a"}\n{oops\n{"text": "b"}', ["not JSON"], ["a", "b"], id="no-json"),
        pytest.param("x.jsonl", b'[1]\n{"text": "b"}', ["not JSON"], ["b"], id="no-object"),
        pytest.param("x.jsonl", b'{"text": "\xe9"}\n{"text": "b"}', ["not UTF-8"], ["b"], id="latin-line"),
        pytest.param("x.jsonl", b'{"t": "a"}\n{"text": 5}\n', ["no text", "no text"], [], id="no-text"),
        pytest.param("x.txt", b"a\xe9b", ["not UTF-8"], [], id="latin-text"),
        pytest.param("x.parquet", b"PAR1", ["broken file"], [], id="no-parquet"),
    ],
)
def test_what_is_bad_is_skipped(tmp_path: Path, name: str, data: bytes, reasons: list[str], texts: list[str]) -> None:
    (tmp_path / name).write_bytes(data)
    came, skips = read(BUILDERS[name](str(tmp_path), on_error="skip"))
    assert (came, [skip.reason for skip in skips]) == (texts, reasons)
    assert all(name in skip.location for skip in skips)
    with pytest.raises(ConfigError, match=name):
        read(BUILDERS[name](str(tmp_path)))


def test_mixed_encodings_cost_only_their_documents(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("grün<>".encode() + "grün".encode("latin-1") + b"<>end")
    came, skips = read(build_text_source(str(tmp_path), "<>", "skip"))
    assert (came, [skip.reason for skip in skips]) == (["grün", "end"], ["not UTF-8"])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of a file system that is not this machine's."""
    import fsspec

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    monkeypatch.setattr(type(memory), "pseudo_dirs", [""])
    memory.pipe("/bucket/c/a.jsonl", LINES)
    memory.pipe("/bucket/c/b.jsonl.gz", gzip.compress(LINES[:1000].rpartition(b"\n")[0]))
    memory.pipe("/bucket/c/notes.txt", b"notes")
    memory.pipe("/bucket/c/empty.jsonl", b"")
    return "memory://bucket/c"


@pytest.mark.parametrize(
    ("place", "count"),
    [
        pytest.param("", 2021, id="folder"),
        pytest.param("/a.jsonl", 2000, id="file"),
        pytest.param("/*.jsonl*", 2021, id="glob"),
        pytest.param("/*.gz", 21, id="compressed"),
    ],
)
def test_files_of_other_machines(bucket: str, place: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 9999)
    came, skips = read(build_jsonl_source(bucket + place))
    assert len(came) == count and not skips
    assert came[:20] == TEXTS[:20]


def test_the_digest_of_other_machines_files_reads_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr(files.SourceFile, "open_raw", lambda self: pytest.fail("read"))
    known = build_jsonl_source(bucket).digest()
    assert known == build_jsonl_source(bucket).digest() != build_jsonl_source(bucket, "other").digest()
    fsspec.filesystem("memory").pipe("/bucket/c/a.jsonl", LINES)
    assert build_jsonl_source(bucket).digest() != known


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("memory://bucket/none", ["no such file or folder"], id="missing"),
        pytest.param("memory://bucket/c/*.x", ["no file matches"], id="glob-without-match"),
        pytest.param("memory://bucket/c/empty.jsonl", ["the file is empty"], id="empty"),
        pytest.param("nope://bucket/c", ["nope"], id="unknown-protocol"),
    ],
)
def test_bad_urls_are_refused(bucket: str, path: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_jsonl_source(path)
    assert all(word in str(refusal.value) for word in [f"dataset.path={path}", *words])
    assert "\n" not in str(refusal.value)


def test_a_file_system_that_fails_is_refused_whatever_is_to_be_skipped(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClientError(Exception):
        __module__ = "botocore.exceptions"

    def fail(file: object, *about: object) -> int:
        raise ClientError("SlowDown\nplease")

    source = build_jsonl_source(f"{bucket}/a.jsonl", on_error="skip")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.readinto", fail, raising=False)
    with pytest.raises(ConfigError, match=r"a\.jsonl: can't be read \(SlowDown please\)"):
        read(source)


def test_a_file_url_is_a_file_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(LINES)
    assert build_jsonl_source(f"file://{tmp_path}/x.jsonl").digest() == build_jsonl_source(str(tmp_path)).digest()


def test_a_missing_package_is_named(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fsspec.core", "zstandard", "pyarrow"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / "x.jsonl.zst").write_bytes(zst_frame())
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for source, package in (
        (lambda: build_jsonl_source(bucket), "fsspec"),
        (lambda: read(build_jsonl_source(str(tmp_path))), "zstandard"),
        (lambda: read(build_parquet_source(str(tmp_path))), "pyarrow"),
    ):
        with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {package}"):
            source()


def zst_frame() -> bytes:
    """A frame of zstd, of nothing."""
    return bytes.fromhex("28b52ffd2000010000")


LONG = b'{"text": "' + b"a" * 64 * 2**20 + b'"}\n'


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "pack", "source", "kept"),
    [
        pytest.param("x.jsonl.gz", gzip.compress, build_jsonl_source, TEXTS * 2, id="jsonl-gz"),
        pytest.param("x.jsonl.zst", zst, build_jsonl_source, TEXTS * 2, id="jsonl-zst"),
        pytest.param("x.jsonl", bytes, build_jsonl_source, TEXTS * 2, id="jsonl"),
        pytest.param(
            "x.txt.gz",
            gzip.compress,
            lambda path, on_error: build_text_source(path, "\n", on_error),
            TEXTS,
            id="separated-gz",
        ),
    ],
)
def test_a_line_that_is_too_long_for_memory_is_told_and_not_held(
    name: str, pack: Any, source: Any, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 2**20)
    (tmp_path / name).write_bytes(pack(LINES + LONG + LINES))
    said = rf"{len(LINES)} has more than 1,048,576 bytes; split it, or give dataset.on_error=skip"
    with pytest.raises(ConfigError, match=said):
        read(source(str(tmp_path / name), on_error="refuse"))
    tracemalloc.start()
    documents, skipped = read(source(str(tmp_path / name), on_error="skip"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [skip.reason for skip in skipped] == ["too long"]
    assert [json.loads(d)["text"] if d[0] == "{" else d for d in documents] == kept
    assert peak < 40 * 2**20


def test_a_connection_that_ends_is_a_refusal() -> None:
    with (
        pytest.raises(ConfigError, match=r"^ftp://x: can't be read \(EOFError\); make it readable"),
        files.convert_read_errors("ftp://x"),
    ):
        raise EOFError
