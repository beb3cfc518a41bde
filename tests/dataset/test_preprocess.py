"""The pieces of a preparation: claims, units, writers, copies, and sizes on paper."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_source import MadeSource
from titan.console.numbers import format_bytes
from titan.dataset.documents import Document, Skip, SourcePart, Turn
from titan.dataset.preprocess import plan, shard_job
from titan.dataset.preprocess.encode import group_documents, hash_document
from titan.dataset.preprocess.prepare import build_manifest, build_report, count_distinct
from titan.dataset.preprocess.writer import SplitWriter, compute_checksum, write_json
from titan.errors import ConfigError
from titan.files import leases


def claimed(file: Path, **owner: object) -> Path:
    file.write_text(json.dumps({"machine": leases.identify_machine(), "host": "here", "pid": os.getpid()} | owner))
    return file


def dead() -> int:
    """The number of a process that is gone: none has so high a one, nor gets it meanwhile."""
    return 2**22 + 1


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time by which locks are judged: however long a test takes, they do not get older."""
    now = time.time()
    monkeypatch.setattr(leases, "time", SimpleNamespace(time=lambda: now))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (leases.time.time() - seconds,) * 2)


def test_only_one_takes_a_claim(tmp_path: Path) -> None:
    claim, taken = tmp_path / "unit-00000.claim", list[bool]()
    threads = [threading.Thread(target=lambda: taken.append(leases.acquire(claim))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1
    assert leases.describe_holder(claim).startswith(f"process {os.getpid()} on ")
    leases.release(claim)
    assert not claim.exists() and leases.acquire(claim)


def test_a_claim_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leases.json, "dump", fail)
    with pytest.raises(OSError, match="No space"):
        leases.acquire(tmp_path / "unit-00000.claim")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("owner", "seconds", "stale"),
    [
        pytest.param({}, 0, False, id="mine"),
        pytest.param({}, 601, True, id="mine-and-untouched"),
        pytest.param({"pid": None}, 0, True, id="of-a-process-that-is-gone"),
        pytest.param({"machine": "another", "pid": 1}, 0, False, id="foreign"),
        pytest.param({"machine": "another", "pid": None}, 599, False, id="foreign-and-slow"),
        pytest.param({"machine": "another", "pid": 1}, 601, True, id="foreign-and-untouched"),
        pytest.param(None, 1, False, id="only-just-made"),
        pytest.param(None, 11, True, id="empty"),
    ],
)
def test_stale_claims(tmp_path: Path, owner: dict[str, object] | None, seconds: float, stale: bool) -> None:
    if owner and "pid" in owner and owner["pid"] is None:
        owner = owner | {"pid": dead()}
    claim = claimed(tmp_path / "unit-00000.claim", **(owner or {}))
    if owner is None:  # its owner's disk was full
        claim.write_text("")
    age(claim, seconds)
    assert leases.is_stale(claim) is stale
    assert leases.acquire(claim) is stale
    assert not stale or json.loads(claim.read_text())["pid"] == os.getpid()
    assert [f.name for f in tmp_path.iterdir()] == ["unit-00000.claim"]


@pytest.mark.parametrize(("seconds", "taken"), [pytest.param(0, False, id="new"), pytest.param(601, True, id="old")])
def test_a_claim_that_says_nothing_yet_is_held_a_while(tmp_path: Path, seconds: float, taken: bool) -> None:
    (tmp_path / "x.claim").touch()
    age(tmp_path / "x.claim", seconds)
    assert leases.acquire(tmp_path / "x.claim") is taken


def test_the_claim_of_another_is_not_released(tmp_path: Path) -> None:
    claim = claimed(tmp_path / "x.claim", machine="another")
    leases.release(claim)
    assert claim.exists()


@pytest.mark.parametrize("pid", ["x", None, [1], 1.5], ids=repr)
def test_a_claim_of_no_process_is_held_a_while(pid: object, tmp_path: Path) -> None:
    claim = claimed(tmp_path / "unit-00000.claim", pid=pid)
    assert not leases.acquire(claim)
    age(claim, leases.STALE_SECONDS + 60)
    assert leases.acquire(claim)


RECEIPT: dict[str, object] = {
    "unit": 0, "train": {"tokens": 1}, "validation": {"tokens": 0}, "documents": 1, "bytes": 1, "skipped": {},
    "files": {"train-00000.tokens": [2, "x"]}, "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "read"),
    [
        pytest.param({}, True, id="whole"),
        pytest.param({"files": None}, False, id="files-null"),
        pytest.param({"files": {"../../x": [1, "x"]}}, False, id="file-outside"),
        pytest.param({"files": {"x": []}}, False, id="file-without-size"),
        pytest.param({"train": [1]}, False, id="split-a-list"),
        pytest.param({"documents": "1"}, False, id="documents-a-text"),
    ],
)
def test_a_receipt_of_other_types_is_none(values: dict[str, object], read: bool, tmp_path: Path) -> None:
    shard_job.shard_manifest_file(tmp_path, 0).write_text(json.dumps(RECEIPT | values))
    assert (shard_job.read_shard_manifest(tmp_path, 0) is not None) is read


def test_touching_keeps_a_claim(tmp_path: Path) -> None:
    claim = claimed(tmp_path / "x.claim", machine="another")
    age(claim, 601)
    leases.refresh(claim)
    assert not leases.is_stale(claim)
    leases.refresh(tmp_path / "gone")


def test_sweeping_takes_what_the_dead_left(tmp_path: Path) -> None:
    gone, me = dead(), leases.identify_machine()
    for name, seconds in {
        f".unit-00001.{me}.{gone}.abcd": 0,
        f".unit-00002.{me}.{os.getpid()}.abcd": 0,
        ".unit-00003.another.1.abcd": 0,
        ".unit-00004.another.1.abcd": 601,
        ".hashes": 9999,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "hashes").touch()
        age(tmp_path / name / "hashes", seconds)
        age(tmp_path / name, seconds)
    (tmp_path / f".plan.json.{me}.{gone}.abcd").touch()
    claimed(tmp_path / "unit-00000.claim", pid=gone)
    leases.remove_leftovers(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        ".hashes",
        f".unit-00002.{me}.{os.getpid()}.abcd",
        ".unit-00003.another.1.abcd",
    ]


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=40)


@given(sizes=SIZES)
def test_units_are_runs_of_all_parts(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_SHARD_BYTES", 30)
        units = plan.divide_parts([SourcePart(str(i), size) for i, size in enumerate(sizes)])
    assert [first for first, _, _ in units] == [0, *(end for _, end, _ in units[:-1])]
    assert units[-1][1] == len(sizes)
    for first, end, size in units:
        assert size == sum(sizes[first:end]) and end > first
        assert size <= 30 or sum(map(bool, sizes[first:end])) == 1
    if not any(sizes):
        assert len(units) == len(sizes)


@pytest.mark.parametrize(
    ("total", "count"),
    [
        pytest.param(10 * 2**20, 3, id="small"),
        pytest.param(2**30, 64, id="middle"),
        pytest.param(2**40, 512, id="large"),
    ],
)
def test_units_are_neither_small_nor_large(total: int, count: int) -> None:
    assert len(plan.divide_parts([SourcePart(str(i), total // 4096) for i in range(4096)])) == count


def limit(documents: list[Document], share: float) -> int:
    source = MadeSource((tuple(documents),), 0, False)
    return plan.compute_hash_limit(source, source.parts(), share)


@given(
    texts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8), share=st.sampled_from([0.0, 1e-9, 0.3, 0.9])
)
def test_the_limit_holds_out_the_share_or_the_smallest(texts: list[str], share: float) -> None:
    hashes = {hash_document(text).hash for text in texts}
    expected = int(share * 2**64)
    if share and min(hashes) >= expected and len(hashes) > 1:
        expected = min(hashes) + 1
    assert limit(list(texts), share) == expected


def test_the_limit_is_found_without_reading_all() -> None:
    assert limit([*"abcdefghijklmnop", "refuse"], 0.5) == 2**63
    with pytest.raises(ConfigError, match="the source has no tokens"):
        limit([Skip("empty")], 0.5)


def test_content_is_told_by_texts_and_ids() -> None:
    turns = (Turn("one", trained=False), Turn("two", special=True))
    assert hash_document(turns) == hash_document((Turn("one"), Turn("two")))
    assert hash_document(turns).hash != hash_document((Turn("onet"), Turn("wo"))).hash
    assert hash_document(turns).bytes == 6
    assert hash_document(np.arange(3)) == hash_document(np.arange(3, dtype=np.uint16))
    assert hash_document("é").bytes == 2


def test_groups_are_bounded_and_keep_the_order() -> None:
    documents = [*"abc", Skip("empty"), "d" * 50, "e"]
    found = list(group_documents(documents, size=20))
    assert [len(group) for group in found] == [5, 1]
    assert [entry if isinstance(entry, Skip) else entry[1] for group in found for entry in group] == documents


@given(lengths=st.lists(st.integers(0, 30), max_size=30), chunk=st.sampled_from([1, 7, 60]))
def test_a_split_is_written_whole_in_chunks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int
) -> None:
    folder, start, documents = tmp_path_factory.mktemp("split"), 0, []
    writer = SplitWriter(folder, "train-00000", np.dtype("<u2"), "seed", masked=True)
    writer.chunk_tokens = chunk
    for length in lengths:
        documents.append(np.arange(start, start + length))
        writer.add_document(documents[-1], (documents[-1] % 2).astype(np.uint8))
        start += length
    counts, written = writer.close()
    assert counts == {"tokens": start, "documents": sum(map(bool, lengths)), "max_token": start - 1}
    assert {name: compute_checksum(folder / name) for name in written} == written
    if not start:
        assert not list(folder.iterdir())
        return
    tokens, mask = np.fromfile(folder / "train-00000.tokens", "<u2"), np.fromfile(folder / "train-00000.mask", np.uint8)
    offsets = np.fromfile(folder / "train-00000.offsets", "<u8").astype(int)
    assert np.array_equal(mask, tokens % 2)
    found = [tuple(document.tolist()) for document in np.split(tokens, offsets[1:])]
    assert Counter(found) == Counter(tuple(d.tolist()) for d in documents if d.size)
    if chunk == 1:  # a document a chunk: nothing to shuffle
        assert found == sorted(found)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    found = set()
    for seed in ("a", "b", "a"):
        writer = SplitWriter(tmp_path, "x", np.dtype("<u2"), seed)
        for i in range(50):
            writer.add_document(np.array([i]))
        writer.close()
        found.add((tmp_path / "x.tokens").read_bytes())
    assert len(found) == 2


def test_a_file_is_replaced_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def failing(descriptor: int) -> None:
        names.extend(file.name for file in tmp_path.iterdir())
        raise OSError(28, "No space left on device")

    (tmp_path / "x").write_text("before")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError):
        write_json(tmp_path / "x", {"after": 1})
    assert [f.read_text() for f in tmp_path.iterdir()] == ["before"]
    (temporary,) = set(names) - {"x"}
    assert temporary.startswith(f".x.{leases.identify_machine()}.{os.getpid()}.")  # so that `remove_leftovers` finds it


@given(
    files=st.lists(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2**64 - 1))), min_size=1, max_size=5),
    size=st.integers(1, 200),
)
def test_copies_are_counted_in_ranges(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], size: int
) -> None:
    folder = tmp_path_factory.mktemp("hashes")
    for i, hashes in enumerate(files):
        np.sort(np.array(hashes, dtype="<u8")).tofile(folder / str(i))
    assert count_distinct(sorted(folder.iterdir()), size) == len({h for hashes in files for h in hashes})


def test_sizes_in_words() -> None:
    found = [format_bytes(n) for n in (0, 999, 1000, 12_345, 123_456_789, 60e12, 5e15)]
    assert found == ["0 bytes", "999 bytes", "1.0 kB", "12.3 kB", "123 MB", "60.0 TB", "5,000.0 TB"]


def test_the_largest_corpora_have_small_plans() -> None:
    """As of 60 TB of text with 15e12 tokens."""
    units = plan.divide_parts([SourcePart(str(i), 2**31) for i in range(60 * 10**12 // 2**31)])
    identity = {"name": "tokenizer.json", "fingerprint": "0" * 64, "file": "tokenizer.json"}
    largest = plan.PreparationPlan("0" * 64, "source", 128_256, False, identity, 2**64 // 100, units)
    counts = {"tokens": 536_000_000, "documents": 536_000, "max_token": 128_255}
    shard = {"train": counts, "validation": counts, "documents": 540_000, "bytes": 2**31, "skipped": {}, "seconds": 1.0}
    shards = [shard] * len(units)
    manifest = build_manifest(largest, shards, build_report(shards, 0, []))
    sizes = [len(json.dumps(content, separators=(",", ":"))) for content in (largest.build_content(), manifest)]
    assert len(units) == 27_939
    assert sizes[0] < 2**20 and sizes[1] < 2 * 2**20
