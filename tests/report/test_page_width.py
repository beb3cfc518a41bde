"""Pages on a narrow screen, measured in a browser: nothing but boxes of tables scrolls sideways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import shown_report
from tests.support.browser import find_browser, measure_page
from tests.support.made_tables import chinchilla, make_table, thrifty
from titan.evidence.campaign import read_campaign
from titan.report.render import campaign_report, comparison_report, law_report
from titan.scaling.study import Question, Target, study_table

WIDTH = 390
LONG = "optimizer._target_=experiments.a_package_with_a_long_name.schema.AnOptimizerWithALongName"


def make_law_page() -> str:
    table = make_table((chinchilla, thrifty(0.8)), seed_sd=0.003)
    names = {"a": "", "b": LONG}
    table = replace(table, variant=tuple(names[name] for name in table.variant), notes=(f"left out: {LONG}",))
    return law_report.render_page(study_table(table, Question(Target(1.6e8, 3.2e9), replicates=100)), LONG * 2)


def make_campaign_page() -> str:
    events = [
        {"event": "opened", "baseline": [LONG, f"{LONG}2"], "baseline_id": "b", "metric": "validation_loss",
         "budget": 0.05, "margin": 0.0, "pairs": 12, "slope": 0.2},
    ]  # fmt: skip
    for number, idea in enumerate(("kept", "rejected", "withdrawn")):
        events.append({"event": "idea", "idea": idea, "changes": [f"{LONG}{idea}"], "hypothesis": LONG,
                       "baseline": min(number, 1), "result_id": idea, "pairs": 5})  # fmt: skip
        gain = 0.1 if idea == "kept" else -0.1
        for seed in range(16):
            stage = "screen" if seed < 5 else "confirm"
            if seed < 5 or idea == "kept":
                events.append({"event": "pair", "idea": idea, "stage": stage, "seed": 100 * number + seed,
                               "baseline_loss": 3.0, "loss": 3.0 - gain + seed / 999, "baseline": 0})  # fmt: skip
    events.append({"event": "withdrawn", "idea": "withdrawn", "reason": LONG})
    campaign = read_campaign(events)
    assert campaign is not None and [i.state for i in campaign.ideas.values()] == ["kept", "rejected", "withdrawn"]
    return campaign_report.render_page(campaign, LONG, LONG * 2)


def make_compare_page() -> str:
    return comparison_report.render_page(shown_report.make_mixed(), LONG * 2)


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make_law_page, id="law"),
        pytest.param(make_campaign_page, id="campaign"),
        pytest.param(make_compare_page, id="compare"),
        pytest.param(lambda: comparison_report.render_page(shown_report.make_many_variants(12, 50)), id="compare-many"),
    ],
)
def test_a_page_is_as_wide_as_a_telephone(make: Callable[[], str], tmp_path: Path) -> None:
    width, wide = measure_page(make(), WIDTH, tmp_path)
    assert width <= WIDTH, wide


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
def test_a_page_that_is_too_wide_is_seen(tmp_path: Path) -> None:
    width, wide = measure_page(f"<body><p style='white-space: nowrap'>{LONG}</p></body>", WIDTH, tmp_path)
    assert width > WIDTH and wide.startswith("P: optimizer")
