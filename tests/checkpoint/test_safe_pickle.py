"""A checkpoint's metadata are read as data: whatever a file holds, it is read or refused, and nothing else happens."""

from __future__ import annotations

import pickle
from pathlib import Path, PosixPath
from typing import Any

import pytest

from tests.support import pickle_fuzz
from tests.support.tiers import full
from titan.checkpoint import reader


@pytest.mark.parametrize("count", [300, full(10_000)], ids=lambda count: f"{count} streams")
def test_any_pickle_is_read_or_refused_and_changes_nothing(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its files are compared: other tests write to the repository's folder
    outcome = pickle_fuzz.fuzz_reader(count, seed=count)
    assert outcome["read"] > count / 200 and outcome["refused"] > count / 2 and outcome.total() == count


def test_what_was_written_is_read() -> None:
    saved = pickle_fuzz.make_metadata()
    found = reader.parse_metadata(pickle.dumps(saved))
    assert found.state_dict_metadata == saved.state_dict_metadata
    assert (found.storage_data, found.planner_data) == (saved.storage_data, saved.planner_data)


def test_long_names_and_large_files_are_read() -> None:
    name, far = "model." + "x" * 300, 2**40
    saved = pickle_fuzz.make_metadata(1)
    (tensor,) = saved.state_dict_metadata.values()
    saved.state_dict_metadata = {name: tensor}
    saved.storage_data = {
        pickle_fuzz.MetadataIndex(name, index.offset, index.index): pickle_fuzz._StorageInfo(
            place.relative_path, far, far
        )
        for index, place in saved.storage_data.items()
    }
    found = reader.parse_metadata(pickle.dumps(saved))
    assert found.state_dict_metadata == {name: tensor}
    assert found.storage_data == saved.storage_data


def harm(name: tuple[str, str], state: Any) -> bytes:
    """A true file that sets attributes of what a name stands for, in the way that a class with slots asks for."""
    first = pickle_fuzz.push_name(name) + pickle_fuzz.push_value((None, state)) + pickle.BUILD + pickle.POP
    return pickle.PROTO + b"\4" + first + pickle.dumps(pickle_fuzz.make_metadata(1), 4)[2:]


@pytest.mark.parametrize("name", sorted(reader.ALLOWED_NAMES - {("pathlib._local", "PosixPath")})[-12:], ids="-".join)
def test_no_attribute_of_a_class_is_set(name: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = pickle_fuzz.list_reachable()
    with pytest.raises(reader.UnknownContentError, match="can't be read"):
        reader.parse_metadata(harm(name, {"name": "/etc/passwd"}))
    assert pickle_fuzz.list_reachable() == before
    assert PosixPath("a/b").name == "b"


BOMBS = {
    "memo": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f",
    "text": pickle.BINUNICODE8 + (2**40).to_bytes(8, "little"),
    "bytes": pickle.BYTEARRAY8 + (2**40).to_bytes(8, "little"),
    "number": pickle.LONG4 + b"\xff\xff\xff\x7f",
    "key": pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 300_000 + pickle.NONE + pickle.SETITEM,
    "list": (pickle.EMPTY_LIST + pickle.TUPLE1) * 100_000,
    "nothing": b"",
    "missing": pickle.BINGET + b"\7",
    "mark": pickle.APPENDS,
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_what_would_end_the_process_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"byte [\d,]+ is invalid"):
        reader.parse_pickle(pickle.PROTO + b"\4" + content + pickle.STOP, reader.ALLOWED_NAMES)


@pytest.mark.parametrize("error", [MemoryError(), KeyError("x"), RecursionError("deep")], ids=repr)
def test_an_error_of_reading_is_corruption(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(content: bytes, known: object) -> Any:
        raise error

    monkeypatch.setattr(reader, "parse_pickle", load)
    with pytest.raises(reader.UnknownContentError, match="its metadata can't be read"):
        reader.parse_metadata(b"")
