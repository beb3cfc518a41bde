"""Figures of published studies, and what titan makes of them: `make tables` prints the same table."""

from __future__ import annotations

import pytest

from tests.measure import published_tables, tables
from tests.measure.published_tables import MissingTableError
from tests.measure.tables import STUDIES
from tests.support.tiers import full

SLOW = ("Gadre",)
"""Studies whose check takes more than a second."""


@pytest.mark.parametrize("study", [full(name, id=name) if name in SLOW else name for name in STUDIES])
def test_titan_keeps_published_figures(study: str) -> None:
    try:
        checks = list(STUDIES[study]())
    except MissingTableError as error:
        pytest.skip(str(error))
    assert checks and [check for check in checks if not check.passed] == []


def test_a_missing_table_is_a_row_and_a_failed_check_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published_tables, "FOLDER", tmp_path)
    failed = published_tables.FigureCheck("mine", "a figure", "1", "2", False)
    monkeypatch.setattr(tables, "STUDIES", {"RegMix": STUDIES["RegMix"], "mine": lambda: iter([failed])})
    assert tables.main([]) == 1
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["DATA", "FAILED"]


def test_named_studies_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    passed = published_tables.FigureCheck("mine", "a figure", "1", "1", True)
    monkeypatch.setattr(published_tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "STUDIES", {"RegMix": STUDIES["RegMix"], "mine": lambda: iter([passed])})
    assert (tables.main([]), tables.main(["RegMix"]), tables.main(["mine"])) == (1, 1, 0)
    with pytest.raises(SystemExit, match="2"):
        tables.main(["another"])
