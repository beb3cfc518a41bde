"""The documentation's and the recipes' figures of plans are those that `python -m titan.plan` gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import full
from titan import plan
from titan.console.numbers import format_rounded
from titan.run.hydra_session import CONF

DOCS = Path(__file__).parents[2] / "docs"
TRACES = (DOCS / "plan_accuracy.md").read_text(encoding="utf-8").partition("\n## Traces\n")[2]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TRACES.splitlines() if line.startswith("| ")]
RUNS = [["recipe=bench_8b_8", "compile=off"], ["recipe=bench_8b_128", "compile=off"], ["recipe=bench_405b_512"]]
SEARCHED = "recipe=bench_405b_512 cluster.hardware.watts=500 cluster.hardware.memory_gb_per_second=2400"


def planned(folder: Path, *words: str) -> dict[str, Any]:
    """Return the figures of a plan."""
    assert plan.main([*words, f"to={folder}/plan.json"]) == 0
    content: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return content


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(RUNS)))
def test_the_page_states_the_closed_form(index: int, tmp_path: Path) -> None:
    found, row = planned(tmp_path, *RUNS[index]), dict(zip(ROWS[0], ROWS[index + 2], strict=True))
    assert row["step, closed form"] == f"{format_rounded(found['step_seconds']['value'])} s"


@pytest.mark.parametrize("index", [full(0), full(1), pytest.param(2, marks=pytest.mark.full)])
def test_the_page_states_the_traces(index: int, tmp_path: Path) -> None:
    row = dict(zip(ROWS[0], ROWS[index + 2], strict=True))
    found = planned(tmp_path, *RUNS[index], "plan.trace=true")["trace"]
    fullest = max(found["ranks"], key=lambda rank: rank["memory_gib"])
    assert row["rank"].split()[0] == str(fullest["rank"])
    assert row["live, traced"].startswith(f"{format_rounded(fullest['live_gib'])} GiB")
    assert row["reserved, and context"] == f"{format_rounded(fullest['memory_gib'])} GiB"
    assert row["step, traced"] == f"{format_rounded(found['step_seconds'])} s"


@pytest.mark.full
@pytest.mark.parametrize("name", ["bench_405b_512_interleaved", "bench_405b_512_mb32"])
def test_a_recipe_states_how_long_its_pipeline_is_idle(name: str, tmp_path: Path) -> None:
    def idle(recipe: str) -> str:
        found = planned(tmp_path, f"recipe={recipe}")
        return f"{found['parts']['step_seconds']['pipeline idle'] / found['step_seconds']['value']:.0%}"

    stated = re.findall(r"(\d+) (%)", (CONF / "recipe" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert ["".join(share) for share in stated] == [idle(name), idle("bench_405b_512")]


@pytest.mark.full
def test_the_page_states_how_many_layouts_a_search_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, *SEARCHED.split(), "cluster.memory_gib=95", "plan.search=true")
    (tried, predicted), *_ = re.findall(r"([\d,]+) layouts, ([\d,]+) predicted", capsys.readouterr().out)
    assert f"Of {tried} layouts the search predicts {predicted}, " in (DOCS / "plan.md").read_text(encoding="utf-8")
