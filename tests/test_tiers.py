"""The tiers of tests: what full.txt says, and which tests it names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tiers
from tests.support.ranks import run_ranks

RULES = {"test_tiers.py": [tiers.Rule("test_tiers.py::*[x*", True), tiers.Rule("test_tiers.py::*[x-y]", False)]}


def uses_ranks() -> None:
    run_ranks(print, 1)


def uses_ranks_elsewhere() -> None:
    def inner() -> None:
        uses_ranks()

    inner()


def starts_a_program() -> None:
    subprocess.run(["true"], check=True)


def test_every_line_of_the_list_names_a_test(pytestconfig: pytest.Config) -> None:
    """Lines of tests that were renamed, moved or removed are found, in all files that this session collected."""
    assert pytestconfig.stash[tiers.NO_TEST] == []


def test_the_last_line_that_matches_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "rules", lambda: RULES)
    given = ("test_tiers.py::t[x-z]", "test_tiers.py::t[x-y]", "test_tiers.py::t[z]", "test_other.py::t[x-z]")
    assert [tiers.left_out(name) for name in given] == [True, False, False, False]


def test_a_sample_of_many_cases_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full.txt").write_text("~4 test_x.py::t[*\n!test_x.py::t[7]\n")
    monkeypatch.setattr(tiers, "LEFT_OUT", tmp_path / "full.txt")
    tiers.rules.cache_clear()
    try:
        stay = [number for number in range(400) if not tiers.left_out(f"test_x.py::t[{number}]")]
    finally:
        tiers.rules.cache_clear()
    assert 7 in stay and 70 < len(stay) < 130


def test_large_tables_are_sampled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full.txt").write_text("test_x.py::t[*\n!test_x.py::t[7]\n+2 test_x.py::t[*\n")
    monkeypatch.setattr(tiers, "LEFT_OUT", tmp_path / "full.txt")
    tiers.rules.cache_clear()
    try:
        names = [f"test_x.py::t[{number}]" for number in range(400)]
        assert [name for name in names if not tiers.left_out(name)] == ["test_x.py::t[7]"]
        assert 150 < sum(map(tiers.thorough, names)) < 250 and not tiers.thorough("test_x.py::t[7]")
    finally:
        tiers.rules.cache_clear()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        pytest.param(["t[x-y]"], [], id="both"),
        pytest.param(["t[x-z]"], ["test_tiers.py::*[x-y]"], id="one"),
        pytest.param([], [], id="not-collected"),
    ],
)
def test_a_line_that_names_no_test_is_found(
    names: list[str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "rules", lambda: RULES)
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/test_tiers.py::{name}") for name in names]
    assert tiers.names_no_test(items) == found


def test_a_line_of_a_file_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "rules", lambda: {"test_gone.py": [tiers.Rule("test_gone.py::*", True)]})
    assert tiers.names_no_test([]) == ["test_gone.py::*"]


def test_marks_follow_from_what_a_test_reaches() -> None:
    assert tiers.marks_of(uses_ranks) == {"ranks"}
    assert tiers.marks_of(uses_ranks_elsewhere) == {"ranks"}
    assert tiers.marks_of(starts_a_program) == {"process"}
    assert tiers.marks_of(test_the_last_line_that_matches_decides) == set()
