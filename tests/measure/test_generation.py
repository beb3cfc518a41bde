"""The suite of generation: each ratio is that of the speeds beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.test_bench import SMALL
from tests.measure import command


@pytest.mark.full
def test_generation_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert command.main(["suite=generate", "rounds=1", f"to={out}", "dataset=synthetic", *SMALL]) == 0
    found = json.loads(out.read_text())
    assert [line["new_tokens"] for line in found] == [64, 256, 512]
    for line in found:
        rates = line["tokens_per_second"]
        assert line["ratios"] == [pytest.approx(rates["cache"] / rates["uncached"])]
    assert len(capsys.readouterr().out.strip().splitlines()) == 6
