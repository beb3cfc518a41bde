"""Atomic writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from titan.files.atomic import atomic_file, write_atomic, write_json


def test_a_reader_sees_the_old_content_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"n": 1}, sync=True)
    with atomic_file(file) as out:
        out.write(b"half")
        out.flush()
        assert json.loads(file.read_text()) == {"n": 1}
    assert file.read_bytes() == b"half" and os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomic(file, "old")
    with pytest.raises(OSError), atomic_file(file) as out:
        out.write(b"new")
        raise OSError
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    write_atomic(tmp_path / "secret", b"x", mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
