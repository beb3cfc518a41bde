"""The tiers of tests: which cases each runs; and the CPU time of tests."""

from __future__ import annotations

import subprocess
import sys
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
def test_each_test_is_in_the_tiers_of_its_marks(tier: str) -> None:
    tests = [item("plain"), item("further", "full"), item("beyond", "thorough"), item("both", "full", "thorough")]
    selected = [test.nodeid for test in tiers.select_items(tests)]
    assert selected == {"quick": ["plain"], "rest": ["further"], "all": [test.nodeid for test in tests]}[tier]


@pytest.mark.parametrize("tier", ["rest"], indirect=True)
def test_the_rest_tier_has_a_sample_of_the_cases_of_each_test(tier: str) -> None:
    cases = [item(f"a.py::test_{size}[{number}]", "full") for size in (1, 7, 40) for number in range(size)]
    whole = [item(f"a.py::test_whole[{number}]", "full", tiers.EVERY) for number in range(7)]
    selected = [test.nodeid for test in tiers.select_items([*cases, *whole])]
    assert [sum(f"test_{size}[" in name for name in selected) for size in (1, 7, 40, "whole")] == [1, 2, 7, 7]
    shuffled = {test.nodeid for test in tiers.select_items([*whole, *reversed(cases)])}
    assert shuffled == set(selected), "the sample does not depend on the order"


def test_a_further_case_has_its_mark_beside_others() -> None:
    case = tiers.full(1, "a", id="x", marks=pytest.mark.skip)
    assert (case.values, case.id, marks_of([case])) == ((1, "a"), "x", ["full", "skip"])


@each_tier
def test_further_cases_are_generated_where_they_run(tier: str) -> None:
    found = tiers.list_further(lambda: CASES, one_in=4)
    assert {"quick": found == [], "rest": 70 < len(found) < 130, "all": len(found) == len(CASES)}[tier]
    counts = {name: marks_of(found).count(name) for name in ("full", "thorough")}
    assert counts["thorough"] == (len(CASES) - counts["full"] if tier == "all" else 0)
    assert tier != "all" or 70 < counts["full"] < 130


@each_tier
def test_a_table_has_the_named_cases_first(tier: str) -> None:
    found = tiers.select_cases([*CASES, "a-text"], ("case-7", "a-text"), one_in=4)
    assert [(case.id, case.values) for case in found[:2]] == [("case-7", (7,)), ("a-text", ("a-text",))]
    assert marks_of(found[:2]) == [] and len({case.id for case in found}) == len(found)
    assert (len(found) == 2) == (tier == "quick") and (len(found) == 401) == (tier == "all")


@pytest.mark.parametrize("one_in", [1, 10**6])
@each_tier
def test_the_rest_tier_has_the_cases_that_are_named_for_it(tier: str, one_in: int) -> None:
    names = [f"case-{number}" for number in range(20)]
    found = tiers.select_cases(CASES, ("case-30",), one_in=one_in, rest=names)
    assert all(tiers.EVERY in marks_of([case]) for case in found if case.id in names), "they are not sampled again"
    further = [case.id for case in found if "full" in marks_of([case])]
    assert set(names) <= set(further) if tier != "quick" else further == []


def test_a_table_without_a_named_case_is_refused() -> None:
    for named in ({"quick": ("case-7", "case-x")}, {"quick": (), "rest": ("case-x",)}):
        with pytest.raises(LookupError, match="no such cases: case-x"):
            tiers.select_cases(CASES, **named)


PLUGIN = """
from tests.support import cpu_time
from tests.support.cpu_time import add_options as pytest_addoption
from tests.support.cpu_time import register as pytest_configure

cpu_time.measure_slowness = lambda: 1.0
"""
BURNING = """
import subprocess, sys, time
import pytest

def burn(seconds):
    while time.process_time() < seconds:
        pass

@pytest.fixture(scope="module")
def shared():
    burn(time.process_time() + 0.3)

def test_burns(): burn(time.process_time() + 0.3)
def test_sleeps(): time.sleep(0.3)
def test_starts_one_that_burns():
    code = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
def test_shares(shared): pass
"""


@pytest.mark.full
def test_what_takes_more_cpu_time_than_allowed_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_burning.py").write_text(BURNING)
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", ".", "--slowest", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--cpu-limit", "0.2", "."],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    failed = [line.split(":: ")[-1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    names = ("::test_burns:", "::test_starts_one_that_burns:", "::shared (fixture):")
    assert done.returncode == 1 and "4 passed" in done.stdout, done.stdout + done.stderr
    assert len(failed) == len(names) and all(any(name in line for line in failed) for name in names), done.stdout
    assert "CPU time: 1 s in 5 tests and shared fixtures" in done.stdout
