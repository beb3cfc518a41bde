"""The page and the text of a plan: whole, offline, safe, and with the plan's figures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from tests.support.composing import compose_test_run
from tests.support.page_reader import PageReader, read_whole
from tests.support.page_style import list_drawings
from tests.support.tiers import select_cases
from titan.console.numbers import format_rounded
from titan.estimate import overhead, search
from titan.estimate.plan import Plan, build_plan, list_memory_parts
from titan.estimate.search import find_best_changes
from titan.estimate.step_time import CAUSES
from titan.report.render import plan_memory, plan_page, plan_text
from titan.report.render.plan_memory import ActionPhases
from titan.report.render.plan_text import PlanOutcome, list_figures

NASTY = '<script>alert("x")</script>'
COMMON = (
    "model=llama1b",
    "model.layers=8",
    "training.seq_len=2048",
    "dataset=synthetic",
    "checkpoint=off",
    "cluster=h100",
    "compile=block",
)
RUNS = {
    "fsdp": ("parallelism=fsdp", "training.global_batch=32768", "parallelism.microbatches=2", "cluster.price=2.5"),
    "1f1b": ("parallelism=pp", "parallelism.pipeline=8", "training.global_batch=16384", "parallelism.microbatches=8"),
    "zero-bubble": (
        "parallelism=pp", "parallelism.pipeline=4", "parallelism.shard=2", "parallelism.schedule=ZBVZeroBubble",
        "memory=full", "training.global_batch=32768", "parallelism.microbatches=8",
    ),
    "experts": (
        "model=qwen3_30b_a3b", "parallelism=ep", "parallelism.expert=8", "training.global_batch=65536",
        "parallelism.microbatches=1",
    ),
    "few-steps-of-one-row": ("parallelism=fsdp", "training.global_batch=16384", "training.steps=20"),
}  # fmt: skip


@cache
def made(name: str, *more: str) -> tuple[PlanOutcome, int, ActionPhases]:
    given = (*COMMON[RUNS[name][0].startswith("model=") :], *RUNS[name], *more)
    run = compose_test_run([*given], remote=True)
    planned = build_plan(run, run.layout, run.microbatches, run.machine)
    changes = find_best_changes(run, run.layout, run.microbatches, run.machine)
    rank = planned.memory.index(planned.fullest)
    steps = overhead.list_step_phases(run, run.layout, run.microbatches, rank, run.machine.device)
    return PlanOutcome(run, planned, changes, None, given), rank, steps


@cache
def searched() -> tuple[PlanOutcome, int, ActionPhases]:
    outcome, rank, steps = made("fsdp")
    found = search.search_layouts(outcome.run, 8, outcome.run.machine, keep=3)
    return replace(outcome, search_result=found), rank, steps


def page(name: str) -> str:
    return plan_page.render_page(*(searched() if name == "search" else made(name)), footer="made today")


def grid() -> str:
    return plan_page.render_grid_page([*RUNS], [made(name)[0].plan for name in RUNS], "made today")


PAGES = [*RUNS, "search", "grid"]


@pytest.mark.full
@pytest.mark.parametrize("name", select_cases(PAGES, ("fsdp", "few-steps-of-one-row", "grid")))
def test_a_page_is_whole_and_needs_nothing(name: str) -> None:
    text = grid() if name == "grid" else page(name)
    assert "made today" in read_whole(text).text
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(drawings) >= 2 and all(ElementTree.fromstring(drawing) is not None for drawing in drawings)
    charts = [drawing for drawing in drawings if 'class="chart"' in drawing]
    assert all(re.search(r'class="name"[^>]*>[^<]*(GiB|, m?s|in their order)', chart) for chart in charts)


@pytest.mark.full
def test_each_part_has_a_colour_and_a_name() -> None:
    colours = {cause: colour for causes in plan_page.CAUSE_COLOURS.values() for cause, colour in causes.items()}
    assert set(colours) == set(CAUSES) and len(set(colours.values())) == len(CAUSES)
    categories = plan_memory.CATEGORIES
    assert len({colour for colour, _ in categories.values()}) == len(categories)
    for name in ("experts", "1f1b"):
        outcome = made(name)[0]
        assert set(outcome.plan.fullest.parts) <= set(categories)
        text = PageReader(page(name)).text
        assert all(part in text for part in list_memory_parts(outcome.plan))
    assert {"experts", "expert parallelism"} <= set(made("experts")[0].plan.step.parts)
    usage = replace(outcome.plan.fullest, parts={**outcome.plan.fullest.parts, "new": 2**30})
    chart = plan_memory.draw_at_peak(replace(outcome.plan, memory=(usage,)))
    assert '>new</th><td><svg viewBox="0 0 100 16"' in chart.html and 'class="rest"' in chart.html


@pytest.mark.parametrize("name", select_cases(PAGES, ("experts", "fsdp", "grid")))
def test_a_page_fits_a_phone(name: str) -> None:
    text = grid() if name == "grid" else page(name)
    for drawing in list_drawings(text):
        assert not drawing.list_cut_texts() and not drawing.list_overlaps(), drawing.width
    assert name == "grid" or {drawing.width for drawing in list_drawings(text)} == {880.0, 360.0}
    assert not re.findall(r">[^<]*(?:\d\.\d{7}|\de[-+]0)[^<]*</text>", text)


@pytest.mark.parametrize("name", ["fsdp", "1f1b"])
def test_a_page_has_the_figures_of_the_plan(name: str) -> None:
    outcome, _, _ = made(name)
    text = PageReader(page(name)).text
    for figure in list_figures(outcome.plan):
        assert figure.value in text and figure.interval in text and figure.unit in text, figure
    assert outcome.format_command() in text
    assert all(" ".join(outcome.build_overrides(result)) in text for result in outcome.faster)
    parts = re.findall(r">([\d.]+) GiB <small>\d+%", plan_memory.draw_at_peak(outcome.plan).html)
    assert sum(map(float, parts[:-1])) == pytest.approx(outcome.plan.fullest.gib, rel=0.01)


@pytest.mark.full
def test_a_search_is_shown_with_its_command_lines_and_its_front() -> None:
    outcome, _, _ = searched()
    assert outcome.search_result is not None
    text = PageReader(page("search")).text
    for result in (*outcome.search_result.best, *outcome.search_result.front):
        assert outcome.format_command(result) in text
    assert "as given" in text
    chart = plan_memory.draw_speed_and_memory(outcome)
    assert chart is not None and chart.html.count('class="dot c1"') == len(outcome.search_result.front)


def test_a_command_line_gives_each_setting_once() -> None:
    outcome, _, _ = made("fsdp")
    (result,) = [r for r in outcome.changes if outcome.build_overrides(r) == ("parallelism.microbatches=1",)]
    assert outcome.format_command().count("parallelism.microbatches=2") == 1
    assert outcome.format_command(result).count("parallelism.microbatches=") == 1
    assert outcome.format_command(result).endswith(" parallelism.microbatches=1")


def bars(html: str) -> list[tuple[float, float]]:
    """Where each bar of a chart begins and how long it is."""
    return [
        (float(x), float(w)) for x, w in re.findall(r'<rect class="bar \w+" x="([\d.]+)"[^>]* width="([\d.]+)"', html)
    ]


@pytest.mark.parametrize("name", ["fsdp", "1f1b"])
def test_each_bar_of_the_waterfall_begins_where_the_one_before_ended(name: str) -> None:
    planned = made(name)[0].plan
    *falls, (start, total) = bars(plan_page.draw_waterfall(planned.step, planned.step_seconds).html)
    assert len(falls) == len(planned.step.parts)
    unit, at = total / planned.step.seconds, start
    for (left, width), seconds in zip(falls, planned.step.parts.values(), strict=True):
        assert left == pytest.approx(at, abs=0.02)
        assert width == pytest.approx(max(1.0, unit * seconds), abs=0.02)
        at += unit * seconds
    assert at == pytest.approx(start + total, abs=0.05)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_the_timetable_has_every_action_and_what_is_idle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = made(name)[0].plan.step
    ranks, end = 1 + max(span.rank for span in step.spans), max(span.end for span in step.spans)
    chart = plan_page.draw_timetable(step)
    assert chart is not None and chart.html.count('class="bar idle"') == ranks
    assert len(bars(chart.html)) == len(step.spans) + ranks
    busy = sum(span.end - span.start for span in step.spans if span.rank == 0)
    assert f">{1 - busy / end:.0%} idle<" in chart.html
    monkeypatch.setattr(plan_page, "MANY", 4)
    few = plan_page.draw_timetable(step)
    assert few is not None and few.html.count("<path") <= 1 + ranks * len({span.action.kind for span in step.spans})
    assert len(re.findall(r"M[\d.]+ [\d.]+h", few.html)) == len(step.spans)
    assert plan_page.draw_timetable(made("fsdp")[0].plan.step) is None


@pytest.mark.parametrize("name", ["fsdp", "1f1b", "zero-bubble"])
def test_memory_over_the_step_has_the_peak_and_the_limit(name: str) -> None:
    outcome, rank, steps = made(name)
    planned = replace(outcome.plan, memory_gib=1.5 * outcome.plan.fullest.gib)
    html = plan_memory.draw_over_step(planned, rank, steps).html
    (peak,) = re.findall(r'<circle class="peak"[^>]* cy="([\d.]+)"', html)
    (limit,) = re.findall(r'<path class="level" d="M[\d.]+ ([\d.]+)H', html)
    assert (340 - float(limit)) / (340 - float(peak)) == pytest.approx(1.5, rel=0.01)
    assert f"peak {format_rounded(planned.fullest.gib)} GiB: {planned.fullest.phase}" in html
    areas = re.findall(r'<path class="bar layer \w+" d="M([^"]*)z"', html)
    tops = [min(float(point.split(",")[1]) for point in re.split("L", area)) for area in areas]
    assert min(tops) == pytest.approx(float(peak), abs=0.11) and len(areas) >= 6
    assert "beyond the scale" in plan_memory.draw_over_step(replace(planned, memory_gib=1e3), rank, steps).caption


def test_a_long_step_stays_small() -> None:
    outcome, rank, steps = made("1f1b")
    few = plan_memory.draw_over_step(outcome.plan, rank, steps)
    in_order = replace(outcome.plan, step=replace(outcome.plan.step, spans=()))
    many = plan_memory.draw_over_step(in_order, 0, [*steps] * 60)
    assert len(many.html) < 250_000
    assert re.findall(r"peak [\d.]+", many.html) == re.findall(r"peak [\d.]+", few.html)


def test_names_can_not_break_out() -> None:
    outcome, rank, steps = made("fsdp")
    run = replace(outcome.run, machine=replace(outcome.run.machine, name=NASTY), choices={"model": NASTY})
    hostile = replace(outcome, run=run, arguments=(*outcome.arguments, f"name={NASTY}"))
    for text in (
        plan_page.render_page(hostile, rank, steps, NASTY),
        plan_page.render_grid_page([NASTY], [outcome.plan], NASTY),
    ):
        read = PageReader(text)
        assert "script" not in read.tags and NASTY in read.text


def test_a_grid_has_every_trial() -> None:
    text = PageReader(grid()).text
    for name in RUNS:
        planned: Plan = made(name)[0].plan
        assert text.count(name) >= 3  # in the table and both charts
        assert all(figure.interval in text for figure in list_figures(planned)[:2])
    assert f"Plan of {len(RUNS)} trials" in text


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        pytest.param("few-steps-of-one-row", (), "; 1 micro-batch of 1 row\n", id="singular"),
        pytest.param("fsdp", (), "; 2 micro-batches of 1 row\n", id="plural"),
        pytest.param("few-steps-of-one-row", (), r"tokens: [\d.]+ s \([\d.]+ to [\d.]+\), ", id="seconds"),
        pytest.param("fsdp", ("training.steps=100000",), r"tokens: [\d.]+ hours \(", id="hours"),
        pytest.param("fsdp", ("training.steps=9000000",), r"tokens: [\d.]+ days \(", id="days"),
        pytest.param("fsdp", (), r"intervals    \(low to high\): ranges cover 90 %", id="interval"),
    ],
)  # fmt: skip
def test_the_text_in_words(name: str, more: tuple[str, ...], words: str) -> None:
    assert re.search(words, plan_text.format_plan(made(name, *more)[0]))


@pytest.mark.full
def test_what_fits_up_to_its_interval_says_so() -> None:
    outcome = searched()[0]
    assert outcome.search_result is not None
    largest = max(result.gib for result in outcome.search_result.best)
    marks = {}
    for factor in (1.01, 10.0):
        changed = replace(outcome, plan=replace(outcome.plan, memory_gib=factor * largest))
        page = plan_page.render_page(changed, *searched()[1:], footer="made today")
        marks[factor] = (re.search(r"\) +! ", plan_text.format_plan(changed)) is not None, ">fits closely<" in page)
    assert marks == {1.01: (True, True), 10.0: (False, False)}


@pytest.mark.parametrize(
    ("factor", "verdict", "shown"),
    [
        pytest.param(2.0, '"pill good">fits<', "fits", id="fits"),
        pytest.param(1.01, '"pill open">fits closely', "fits closely", id="closely"),
        pytest.param(0.5, '"pill bad">does not fit<', "does not fit", id="not"),
    ],
)
def test_pages_and_notebooks_judge_the_memory(factor: float, verdict: str, shown: str) -> None:
    outcome, rank, steps = made("fsdp")
    planned = replace(outcome.plan, memory_gib=factor * outcome.plan.fullest.gib)
    for text in (
        plan_page.render_page(replace(outcome, plan=planned), rank, steps),
        plan_page.render_grid_page(["fsdp"], [planned]),
    ):
        assert re.findall(r'"pill \w+">[\w ]+<?', text)[0].startswith(verdict.rstrip("<"))
    assert planned.list_facts()["memory"].endswith(f", {shown}")
    unknown = replace(outcome.plan, memory_gib=None)
    assert "pill" not in plan_page.render_grid_page(["fsdp"], [unknown]).partition("</style>")[2]
    assert unknown.list_facts()["memory"].endswith(")")


@pytest.mark.parametrize(
    ("speed", "words", "faster"),
    [pytest.param(1.037, "1.0x", False, id="hidden"), pytest.param(1.37, "1.4x", True, id="shown")],
)
def test_ratios_have_the_decimals_of_times(speed: float, words: str, faster: bool) -> None:
    outcome = made("fsdp")[0]
    (first, *_) = outcome.changes
    seconds = outcome.plan.step.seconds / speed
    result = replace(first, step=replace(first.step, parts={"matmuls": seconds}))
    changed = replace(outcome, changes=(result,))
    assert changed.format_speed(result) == words and bool(changed.faster) is faster
    text, page = plan_text.format_plan(changed), plan_page.render_page(changed, *made("fsdp")[1:])
    assert (f"{words}, " in text, f">{words}<" in page) == (faster, faster)
    assert ("no single change by more than 5 %" in text) is not faster
    assert not re.search(r"\b\d\.\d{3,}x", text + page)


@pytest.mark.full
def test_results_have_the_intervals_of_the_plan() -> None:
    outcome = searched()[0]
    assert outcome.search_result is not None
    text, read = plan_text.format_plan(outcome), PageReader(page("search")).text
    data = plan_text.build_plan_data(outcome)["search"]
    for result, figures in zip(outcome.search_result.best, data["best"], strict=True):
        for name, value, error in (
            ("step_seconds", result.step.seconds, outcome.plan.error),
            ("memory_gib", result.gib, outcome.plan.memory_error),
        ):
            low, high = value / (1 + error), value * (1 + error)
            assert figures[name] == pytest.approx({"value": value, "low": low, "high": high})
            words = f"{format_rounded(low)} to {format_rounded(high)}"
            assert f"({words})" in text and words in read


def test_a_sweep_marks_what_fits_up_to_its_interval() -> None:
    planned = made("fsdp")[0].plan
    plans = [replace(planned, memory_gib=factor * planned.fullest.gib) for factor in (0.9, 1.01, 10.0)]
    text, page = plan_text.format_grid("abc", plans), plan_page.render_grid_page("abc", plans)
    lines = text.splitlines()
    assert " x  " in lines[1] and " ! " in lines[2] and not re.search("[!x]", lines[3][5:])
    assert "!: fits closely: the interval reaches beyond the device" in lines and "x: does not fit" in lines
    assert page.count('"pill open">fits closely<') == 1 and page.count('"pill bad">does not fit<') == 1


def test_the_terminal_judges_the_memory_of_the_plan() -> None:
    outcome = made("fsdp")[0]
    closely = replace(outcome.plan, memory_gib=1.01 * outcome.plan.fullest.gib)
    assert "fits closely: the interval" in plan_text.format_plan(replace(outcome, plan=closely))
