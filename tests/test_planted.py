"""Planted faults: where they stand, and what is said of those that are found, are not, or have lost their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import rehearse
from tests.support import chaos, hangs, planted, tiers
from tests.support.planted import Fault
from tests.support.tiers import full

SUM = "def total(a, b):\n    return a + b\n"
TEST = "import code_\n\n\ndef test_sum():\n    assert code_.total(2, 2) == 4\n"


def a_fault(old: str, new: str) -> Fault:
    return Fault("sum", "code_.py", old, new, ("test_code.py::test_sum",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "code_.py").write_text(SUM)
    (tmp_path / "test_code.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    return tmp_path


def test_every_fault_has_its_place() -> None:
    lost = []
    for fault in planted.FAULTS:
        try:
            planted.find_file(fault, planted.ROOT)
        except LookupError as error:
            lost.append(f"{fault.name}: {error}")
        lost += [
            f"{fault.name}: no {test}" for test in fault.tests if not Path(planted.ROOT, test.split("::")[0]).exists()
        ]
    assert lost == []
    assert len({fault.name for fault in planted.FAULTS}) == len(planted.FAULTS) >= 60


def test_named_tests_are_in_the_quick_tier(request: pytest.FixtureRequest) -> None:
    """Of files that are collected in this session."""
    if tiers.choose_tier() != "quick":
        pytest.skip("another tier")
    names = {item.nodeid for item in request.session.items}
    starts = {name.partition("[")[0] for name in names}
    files = {name.partition("::")[0] for name in names}
    known = names | starts | files | {start.rpartition("::")[0] for start in starts}
    missing = {test for fault in planted.FAULTS for test in fault.tests if test.partition("::")[0] in files} - known
    assert not missing


@pytest.mark.parametrize(
    ("old", "new", "caught", "by"),
    [
        pytest.param("a + b", "a - b", True, "test_code.py::test_sum", id="caught"),
        full("a + b", "b + a", False, "its tests passed", id="not-caught"),
        pytest.param("a * b", "a - b", False, "the text occurs 0 times", id="text-gone"),
        full("return", "retur", False, "error", id="does-not-run"),
    ],
)
def test_what_comes_of_a_fault(old: str, new: str, caught: bool, by: str, root: Path) -> None:
    found = planted.judge_fault(a_fault(old, new), root)
    assert found.caught == caught and by in found.by, found
    assert (root / "code_.py").read_text() == SUM
    assert ("NOT CAUGHT" in found.format_row()) == (not caught)


@pytest.mark.full
def test_a_test_that_fails_without_a_fault_is_named(root: Path) -> None:
    fault = a_fault("a + b", "a - b")
    broken, slowest = planted.list_broken([fault], root)
    assert broken == []
    assert 0 <= slowest < 60
    (root / "code_.py").write_text(SUM.replace("+", "-"))
    assert planted.list_broken([fault], root)[0] == ["test_code.py::test_sum"]


def test_failed_tests_are_named_once_and_without_their_errors() -> None:
    output = (
        "FAILED t.py::test_a: AssertionError: b - c\nFAILED t.py::test_a - AssertionError\nERROR t.py::test_d[x y]\n"
    )
    assert planted.parse_failures(output) == ["t.py::test_a", "t.py::test_d[x y]"]


@pytest.mark.parametrize("program", [planted, chaos, hangs, rehearse], ids=lambda module: module.__name__)
def test_a_name_of_no_case_is_an_error(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse.build, "find_obstacle", lambda: "")
    try:
        code = program.main(["--runs", "no such"] if program is chaos else ["no such"])
    except SystemExit as ended:
        code = ended.code
    assert code == 2


def test_nothing_rehearsed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse.build, "find_obstacle", lambda: "no compiler")
    assert rehearse.main([]) == 1


@pytest.mark.parametrize(
    ("named", "code", "seconds", "start", "holds"),
    [
        pytest.param("1", 1, 20.0, 8.0, True, id="in-time"),
        pytest.param("1", 1, 60.0, 8.0, False, id="late"),
        pytest.param("1", 1, 60.0, 40.0, True, id="slow-machine"),
        pytest.param("0", 1, 20.0, 8.0, False, id="another-rank"),
        pytest.param("1", 0, 20.0, 8.0, False, id="not-failed"),
    ],
)
def test_which_hangs_hold(named: str, code: int, seconds: float, start: float, holds: bool) -> None:
    result = hangs.HangResult(((4.0, f"no step for 12 s: waiting for rank {named} in the step"),), code, seconds, start)
    assert result.holds(1) == holds
