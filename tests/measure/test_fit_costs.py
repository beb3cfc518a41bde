"""`python -m tests.measure.fit_costs`: what it reads, and that the documentation states what it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.measure import fit_costs
from titan.estimate import constants
from titan.estimate.constants import load_constants

PAGE = (Path(__file__).parents[2] / "docs" / "plan_accuracy.md").read_text(encoding="utf-8")
ACCURACY = " ".join(PAGE.partition("## On GPUs")[2].partition("\n## ")[0].split())


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _figures(found: Sequence[float]) -> tuple[str, str]:
    return _percent(fit_costs.compute_median_error(found)), _percent(max(map(abs, found)))


def test_no_unseen_run_is_fitted() -> None:
    ignored = ("source", "url", "date", "notes", "dp_shard", "dp_repl", "zero")

    def runs(file: Path) -> list[tuple[str, ...]]:
        return [tuple(v for name, v in row.items() if name not in ignored) for row in fit_costs.read_runs(file)]

    unseen = runs(fit_costs.UNSEEN)
    assert len(unseen) == len(set(unseen)) == 62
    assert not set(unseen) & set(runs(fit_costs.PUBLISHED))
    assert all(row["url"].startswith("https://") for row in fit_costs.read_runs(fit_costs.UNSEEN))


def test_constants_are_written_where_the_user_says_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, stored = constants.FILE.read_bytes(), load_constants()
    monkeypatch.setattr(fit_costs, "fit_and_print", lambda: stored)
    assert fit_costs.main([]) == 0 and fit_costs.main([f"to={tmp_path}/new.json"]) == 0
    assert (tmp_path / "new.json").read_bytes() == shipped == constants.FILE.read_bytes()


@pytest.mark.parametrize("name", [*fit_costs.FITTED, "fragments"])
def test_the_page_states_the_fitted_constants(name: str) -> None:
    (stated,) = re.findall(rf"\| `{name}` \| ([\d.]+) \|", ACCURACY)
    assert float(stated) == float(f"{getattr(load_constants(), name):.3g}")


def test_the_page_states_the_intervals() -> None:
    known = load_constants()
    assert f"interval of the step time is {_percent(known.error, 0)}" in ACCURACY
    assert f"interval of memory is {_percent(known.memory_error, 0)}" in ACCURACY
    assert f"the geometric mean of these ratios, {known.experts:.2f}" in ACCURACY
    assert f"a largest of {_percent(known.experts_error, 0)}: the interval" in ACCURACY


@pytest.mark.full
def test_the_page_states_the_errors_of_the_fit() -> None:
    published = fit_costs.read_runs()
    median, largest = _figures(fit_costs.compute_errors(published, load_constants()))
    assert f"The median error on these runs is {median}, the largest {largest}" in ACCURACY
    left_out = [_figures(found) for _, found in fit_costs.cross_validate_sources(published)]
    assert re.findall(r"\| ([\d.]+ %) \| ([\d.]+ %) \|", ACCURACY)[:3] == left_out


@pytest.mark.full
def test_the_page_states_the_errors_on_unseen_runs() -> None:
    found = fit_costs.compute_errors(fit_costs.read_runs(fit_costs.UNSEEN), load_constants())
    inside = _percent(fit_costs.compute_coverage(found, load_constants()), 0)
    stated = f"the median error is {_figures(found)[0]}; {inside} of them lie in the interval"
    assert stated in ACCURACY
    ratios = [
        _figures(each)[0]
        for each in fit_costs.compute_ratio_errors(fit_costs.read_runs(fit_costs.UNSEEN), found).values()
    ]
    assert re.findall(r"only have a median error of ([\d.]+ %).*?stages\) ([\d.]+ %)", ACCURACY) == [tuple(ratios)]
    sources = [errors for _, errors in fit_costs.cross_validate_sources(fit_costs.read_runs())]
    assert load_constants().error == max(map(fit_costs._compute_error_bound, [found, *sources]))
    peaks = fit_costs.compute_memory_errors(
        fit_costs.collect_memory_pairs(fit_costs.read_runs(fit_costs.UNSEEN)), load_constants()
    )
    lowest = f"its median error is {_figures(peaks)[0]}; the lowest estimate is {_percent(-min(peaks))} too low"
    assert lowest in ACCURACY


@pytest.mark.full
def test_the_page_states_the_runs_of_models_with_experts() -> None:
    stated = re.findall(r"\| 2\d\.\d\d \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", ACCURACY)
    rows = fit_costs.read_runs(fit_costs.EXPERTS)
    predicted = [fit_costs.predict_step(row, load_constants()).tokens_per_second_per_device for row in rows]
    assert stated == [
        (f"{rate:,.0f}", f"{int(row['tok_s_gpu']):,}", f"{rate / int(row['tok_s_gpu']):.2f}")
        for row, rate in zip(rows, predicted, strict=True)
    ]
