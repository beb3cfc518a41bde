"""Laws 1 to 3 for every mix of parallelisms: against one device, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import EXACT, Case, Outcome, cases, outcome, worst

ALL = [pytest.param(case, id=case.id, marks=[] if case.quick else [pytest.mark.full]) for case in cases()]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Outcome]:
    return {
        science: outcome(tmp_path_factory.mktemp("one"), None, science)
        for science in {case.science for case in cases()}
    }


@pytest.mark.parametrize("case", ALL)
def test_a_layout_learns_what_one_device_learns(
    case: Case, one_device: dict[tuple[str, ...], Outcome], tmp_path: Path
) -> None:
    found = worst(outcome(tmp_path, case, case.science), one_device[case.science])
    assert found.pop("same start")
    assert found.pop("same rows")
    assert {name: value for name, value in found.items() if not value <= EXACT} == {}
