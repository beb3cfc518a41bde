"""Arithmetic of the charts: scales, ticks, thinning, fronts, and labels that do not overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shown_report import (
    make_comparison,
    make_failures,
    make_learning,
    make_many_variants,
    make_run_result,
    make_two_variants,
    make_variant,
)
from titan.console.numbers import format_tick
from titan.metrics import svg
from titan.metrics.svg import Scale
from titan.report.findings import Comparison, Variant
from titan.report.render import charts, curves
from titan.report.render.charts import ParetoSpot

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [
        pytest.param(Scale(0, 10, 100, 200), 5, 150, id="linear"),
        pytest.param(Scale(0, 10, 200, 100), 10, 100, id="upwards"),
        pytest.param(Scale(1e-4, 1, 0, 40, log=True), 1e-3, 10, id="log"),
        pytest.param(Scale(3, 3, 0, 40), 3, 0, id="one-value"),
    ],
)
def test_scale(scale: Scale, value: float, place: float) -> None:
    assert scale.at(value) == pytest.approx(place)


@given(low=FINITE, length=st.floats(1e-6, 1e6), wanted=st.integers(2, 12))
def test_round_values_lie_within_and_are_even(low: float, length: float, wanted: int) -> None:
    found = svg.compute_round_values(low, low + length, wanted)
    slack = 1e-6 * max(abs(low), length)
    assert len(found) <= wanted + 1 and all(low - slack <= value <= low + length + slack for value in found)
    assert len({f"{step:.4g}" for step in np.diff(found)}) <= 1 or length < 1e-3 * abs(low)


def test_ticks() -> None:
    assert Scale(0, 1.7e6, 0, 1).compute_ticks(4) == [0, 5e5, 1e6, 1.5e6]
    assert Scale(1e-7, 1, 0, 1, log=True).compute_ticks(4) == pytest.approx([1e-7, 1e-5, 1e-3, 1e-1])
    assert [format_tick(value) for value in (3.5966, 30_000, 0.1)] == ["3.5966", "30,000", "0.1"]


@given(wanted=st.lists(st.floats(0, 300), min_size=1, max_size=8), height=st.floats(5, 30))
def test_labels_do_not_overlap(wanted: list[float], height: float) -> None:
    tops = svg.spread_boxes(sorted(wanted), [height] * len(wanted), 0, 300)
    assert all(after - before >= height - 1e-9 for before, after in pairwise(tops))
    assert tops[0] >= -1e-9 and tops[-1] + height <= 300 + 1e-9


def test_a_lone_label_stands_at_its_line() -> None:
    assert svg.spread_boxes([100.0], [20.0], 0, 300) == [90.0]


def test_gap_is_of_steps_that_both_did() -> None:
    one, other = make_run_result("a", 0), make_run_result("b", 0)
    cut = replace(other.curves, **{name: getattr(other.curves, name)[100:200] for name in ("steps", "tokens")})
    moved = replace(other, curves=replace(cut, losses=other.curves.losses[100:200] + 0.25))
    tokens, sizes = curves.compute_median_gap(one, moved, 10)
    assert tokens.size == 10 and np.allclose(sizes, 0.25)
    assert tokens[0] > one.curves.tokens[100] and tokens[-1] < one.curves.tokens[200]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.integers(1, 8))
def test_thinning_keeps_spikes_and_ends(values: list[float], most: int) -> None:
    y = np.array(values)
    x, kept = curves.thin_to_extremes((np.arange(float(len(y))), y), most)
    assert (kept.min(), kept.max(), kept[0], kept[-1]) == (y.min(), y.max(), y[0], y[-1])
    assert len(kept) <= max(most, 2) + 2 and (np.diff(x) > 0).all() and (y[x.astype(int)] == kept).all()


def test_equal_runs_are_named_and_not_drawn() -> None:
    base = make_variant("base", baseline=True)
    chart = curves.draw_differences(make_comparison(base, replace(base, label="twin", baseline=False)))
    assert chart is not None and "Equal at every step and not drawn: twin." in chart.caption and not chart.html
    assert curves.draw_differences(make_comparison(base)) is None


def test_a_few_steps_that_differ_are_not_called_equal() -> None:
    base = make_variant("base", baseline=True)
    moved = [replace(run.curves, losses=run.curves.losses + 0.1 * (run.curves.steps == 7)) for run in base.runs]
    runs = tuple(replace(run, curves=curve) for run, curve in zip(base.runs, moved, strict=True))
    tied_weights = [replace(base, label=f"twin{k}", baseline=False, runs=runs[k:] + base.runs[:k]) for k in (0, 1, 2)]
    chart = curves.draw_differences(make_comparison(base, *tied_weights))
    assert chart is not None and "not drawn: twin2." in chart.caption


def test_repeats_are_held_against_the_same_repeat() -> None:
    def again(label: str, offset: float) -> Variant:
        variant = make_variant(label, (0, 0))
        moved = [replace(run.curves, losses=run.curves.losses + offset * k) for k, run in enumerate(variant.runs)]
        runs = [replace(run, repeat=k, curves=moved[k]) for k, run in enumerate(variant.runs)]
        return replace(variant, runs=tuple(runs), baseline=label == "base")

    chart = curves.draw_differences(make_comparison(again("base", 0.25), again("twin", 0.25)))
    assert chart is not None and "not drawn: twin" in chart.caption


@pytest.mark.parametrize(
    ("values", "cut"),
    [
        pytest.param(10 * np.arange(1, 501) ** -0.5, True, id="steep-beginning"),
        pytest.param(np.linspace(3, 2.9, 500), False, id="even"),
        pytest.param(np.full(500, 2.0), False, id="constant"),
        pytest.param(np.array([2.0]), False, id="one-point"),
    ],
)
def test_the_beginning_is_cut_off_where_it_takes_the_room(values: np.ndarray, cut: bool) -> None:
    low, high, told = curves.compute_loss_range([(np.arange(1.0, len(values) + 1), values)])
    assert told == cut and low < values.min() and high > values[-1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=20))
def test_front_has_those_that_none_beats(drawn: list[tuple[int, int, bool]]) -> None:
    spots = [ParetoSpot(i, x, y, out) for i, (x, y, out) in enumerate(drawn)]
    fair = [spot for spot in spots if not spot.is_excluded]
    best = {(s.x, s.y) for s in fair if not any(o.x >= s.x and o.y <= s.y and (o.x, o.y) != (s.x, s.y) for o in fair)}
    found = charts.select_front(spots)
    assert {(spot.x, spot.y) for spot in found} == best and len(found) == len(best)


def test_an_variant_that_learns_something_else_is_hollow() -> None:
    variants = [
        make_variant("base", baseline=True),
        make_variant("fast", tokens=90_000, memory=0.1, learning=make_learning("no")),
        make_variant("good", tokens=40_000, memory=0.9, learning=make_learning()),
    ]
    chart = charts.draw_pareto(make_comparison(*variants))
    assert chart is not None and chart.html.count('class="hollow"') == 1 and "Hollow" in chart.caption


@pytest.mark.parametrize(
    ("comparison", "wanted"),
    [
        pytest.param(make_two_variants(), [0, 1], id="all"),
        pytest.param(make_many_variants(20, 20), [], id="baseline-and-the-best"),
        pytest.param(make_failures(), [], id="none"),
    ],
)
def test_coloured(comparison: Comparison, wanted: list[int]) -> None:
    found = charts.choose_coloured(comparison)
    if len(comparison.variants) > charts.COLOURS + 1:
        others = list(range(1, len(comparison.variants)))
        fast = sorted((i for i in others if comparison.variants[i].same_science), key=lambda i: -speed(comparison, i))[
            :3
        ]
        good = sorted(
            (i for i in others if not comparison.variants[i].same_science), key=lambda i: loss(comparison, i)
        )[:3]
        wanted = [0, *sorted(fast + good)]
    assert found == wanted


def speed(comparison: Comparison, index: int) -> float:
    found = comparison.variants[index].speed
    assert found is not None
    return found.estimate


def loss(comparison: Comparison, index: int) -> float:
    found = comparison.variants[index].validation
    assert found is not None
    return found.estimate


def test_bars_are_sorted_and_their_whiskers_are_speeds() -> None:
    chart = charts.draw_speed(make_two_variants())
    assert chart is not None and chart.html.index("parallelism=fsdp") < chart.html.index("parallelism=single")
    longest = 39_600 / 0.96
    assert f'width="{100 * 39_600 / longest:.2f}"' in chart.html
    assert f"M{100 * 39_600 / 1.09 / longest:.2f} 8H100.00" in chart.html
    assert charts.draw_speed(make_comparison(make_variant("base", tokens=None))) is None
