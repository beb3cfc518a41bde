"""The tiers of tests: which cases each runs; and the CPU time of tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tiers

ROOT = Path(__file__).resolve().parents[1]
CASES = [pytest.param(number, id=f"case-{number}") for number in range(400)]


def item(name: str, *marks: str) -> Any:
    """A test with marks."""
    return SimpleNamespace(nodeid=name, iter_markers=lambda: [SimpleNamespace(name=name) for name in marks])


def marks_of(cases: list[Any]) -> list[str]:
    return [mark.name for case in cases for mark in case.marks]


@pytest.fixture
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tier that is chosen."""
    monkeypatch.setenv(tiers.VARIABLE, request.param)
    return str(request.param)


each_tier = pytest.mark.parametrize("tier", tiers.TIERS, indirect=True)


def test_the_quick_tier_is_chosen_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tiers.VARIABLE, raising=False)
    assert tiers.choose_tier() == "quick"


def test_an_unknown_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiers.VARIABLE, "ful")
    with pytest.raises(pytest.UsageError, match="TITAN_TESTS=ful: no such tier; choose one of quick, rest, all"):
        tiers.choose_tier()


@pytest.mark.parametrize(
    ("argument", "named", "tier"),
    [
        pytest.param("tests/test_x.py::test_y[case-1]", None, "all", id="a-case"),
        pytest.param("tests/test_x.py::test_y", None, "quick", id="a-test"),
        pytest.param("tests/test_x.py::test_y[case-1]", "quick", "quick", id="a-case-and-a-tier"),
    ],
)
def test_a_case_that_is_named_runs_in_whichever_tier(
    argument: str, named: str | None, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tiers.VARIABLE, named or "")
    if named is None:
        monkeypatch.delenv(tiers.VARIABLE)
    tiers.choose_by_arguments(["tests/test_z.py", argument])
    assert tiers.choose_tier() == tier


@each_tier
def test_each_test_is_in_the_tiers_of_its_marks(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiers.PART, "1/1")
    selected = [test.nodeid for test in tiers.select_items([item("plain"), item("further", "full")])]
    assert selected == {"quick": ["plain"], "rest": ["further"], "all": ["plain", "further"]}[tier]


@pytest.mark.parametrize("tier", ["rest", "all"], indirect=True)
def test_the_parts_together_are_all_cases_once(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a.py::test_{size}[{number}]" for size in (1, 7, 400) for number in range(size)]
    found: list[str] = []
    for part in range(1, 9):
        monkeypatch.setenv(tiers.PART, f"{part}/8")
        selected = [test.nodeid for test in tiers.select_items([item(name, "full") for name in names])]
        assert 25 < len(selected) < 80
        found += [*selected, *(case.id for case in tiers.list_further(lambda: CASES))]
    assert sorted(found) == sorted([*names, *(case.id for case in CASES)])


def test_changes_in_turn_run_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests/support").mkdir(parents=True)
    monkeypatch.setattr(tiers, "__file__", str(tmp_path / "tests/support/tiers.py"))
    parts = set()
    for rotation in range(30, 30 + tiers.ROTATION):
        (tmp_path / "pyproject.toml").write_text(f"[tool.titan]\nrotation = {rotation}\n")
        parts.add(tiers.parse_part(tiers.format_rotation()))
    assert parts == {(number, tiers.ROTATION) for number in range(tiers.ROTATION)}


@pytest.mark.parametrize("text", ["0/8", "9/8", "8", "a/8", "1/", "/8", "-1/8"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"TITAN_PART={text}: no part; give K/N, as 1/12"):
        tiers.parse_part(text)


def test_each_part_of_a_program_has_a_case() -> None:
    assert [tiers.take_part("abcde", f"{k}/2") for k in (1, 2)] == [["a", "c", "e"], ["b", "d"]]
    assert [tiers.take_part("ab", f"{k}/3") for k in (1, 2, 3)] == [["a"], ["b"], ["a"]]


def test_a_further_case_has_its_mark_beside_others() -> None:
    case = tiers.full(1, "a", id="x", marks=pytest.mark.skip)
    assert (case.values, case.id, marks_of([case])) == ((1, "a"), "x", ["full", "skip"])


@each_tier
def test_a_table_has_the_named_cases_first(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tiers.PART, raising=False)
    found = tiers.select_cases([*CASES, "a-text"], ("case-7", "a-text"))
    assert [(case.id, case.values) for case in found[:2]] == [("case-7", (7,)), ("a-text", ("a-text",))]
    assert marks_of(found[:2]) == [] and len({case.id for case in found}) == len(found)
    assert {"quick": len(found) == 2, "rest": 20 < len(found) < 60, "all": len(found) == 401}[tier]


def test_a_table_without_a_named_case_is_refused() -> None:
    with pytest.raises(LookupError, match="no such cases: case-x"):
        tiers.select_cases(CASES, ("case-7", "case-x"))
