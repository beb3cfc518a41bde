"""The data suite runs and its figures are consistent; speeds are not tested."""

from __future__ import annotations

import pytest

from tests.measure import loading, preparing


@pytest.mark.full
def test_whole_suite(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preparing, "KILLED_MB", 1)
    monkeypatch.setattr(loading, "CHECKED", 70_000)
    found = preparing.suite(rounds=1, megabytes=1, kills=1, sizes=(1,))
    speed = found["speed"]
    assert speed["of_bare"] == pytest.approx(speed["one"] / speed["bare"])
    assert speed["two_against_one"] == pytest.approx(speed["two"] / speed["one"])
    assert (found["kills"]["kills"], found["kills"]["made_again"]) == (1, 0)
    assert 10 < found["memory"][0]["peak_mebibytes"] < 2000
    assert found["order"]["bijective"] and found["order"]["residues"] < 5
    assert [row["seq_len"] for row in found["reading"]] == [256, 2048, 8192]
    assert capsys.readouterr().out.count("\n") == 9
