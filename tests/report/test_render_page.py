"""The page of a comparison: whole, offline, safe, and small."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from tests.support import shown_report
from tests.support.page_reader import PageReader, read_whole
from tests.support.page_style import compute_contrast, find_least_difference, list_drawings, read_themes
from tests.support.shown_report import (
    NASTY,
    make_comparison,
    make_failures,
    make_many_variants,
    make_mixed,
    make_quality,
    make_variant,
)
from titan.report.findings import Comparison
from titan.report.render.comparison_report import render_page

COMPARISONS = [pytest.param(make(), id=name) for name, make in shown_report.ALL.items() if name != "many"]
COMPARISONS.append(pytest.param(make_many_variants(12, 50), id="twelve"))


def test_the_policy_allows_the_script_of_the_page_and_no_other() -> None:
    page = render_page(make_mixed())
    ((script,), (policy,)) = (
        re.findall(p, page, re.S) for p in (r"<script>(.*?)</script>", r'Policy" content="(.*?)"')
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"<[^>]*\son\w+=", page)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_it_is_whole_needs_nothing_and_says_it_all(comparison: Comparison) -> None:
    read = read_whole(render_page(comparison, "made today"))
    for variant in comparison.variants:
        assert variant.label in read.text
        assert all(run.directory in read.text and run.label in read.text for run in variant.runs)
        assert variant.learning is None or variant.learning.text in read.text
        assert all(quality.text[1:] in read.text for quality in variant.quality)
    for failed in comparison.failed:
        assert failed.reason in read.text and failed.directory in read.text
    assert all(note.rstrip(".") in read.text for note in comparison.notes) and "made today" in read.text
    assert {str(i) for i in range(len(comparison.variants))} == set(read.list_values("data-variant"))


def test_labels_can_not_break_out() -> None:
    assert NASTY in PageReader(render_page(make_mixed())).text
    read = PageReader(render_page(make_comparison(*make_mixed().variants, title=NASTY, question='"><img src=x>')))
    assert read.tags.count("script") == 1 and "img" not in read.tags
    assert all(name in KNOWN for name, _ in read.attributes)


KNOWN = {
    "aria-hidden", "aria-label", "charset", "class", "clip-path", "content", "cx", "cy", "d", "data-variant", "height",
    "http-equiv", "id", "lang", "name", "points", "preserveaspectratio", "r", "role", "scope", "text-anchor", "title",
    "viewbox", "width", "x", "y",
}  # fmt: skip


def test_sections_come_in_order() -> None:
    read = render_page(make_mixed())
    told = re.findall(r"<h2>(.*?)</h2>", read)
    assert told == ["Answers", "Results", "By source", "Charts", "Failures", "Notes", "Settings", "Runs"]
    assert re.findall(r"<h3>(.*?)</h3>", read) == [
        "Training loss", "Validation loss", "Difference to the baseline", "Speed", "Memory", "Speed and memory",
    ]  # fmt: skip
    assert re.findall(r"<h2>(.*?)</h2>", render_page(make_failures())) == ["Failures", "Settings"]


@pytest.mark.full
def test_a_large_comparison_stays_small() -> None:
    text = render_page(make_many_variants(64, 10_000))
    assert len(text) < 1_000_000
    assert max(points.count(",") for points in re.findall(r'points="([^"]*)"', text)) <= 400


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_distinct_and_readable(theme: str) -> None:
    colours = read_themes("page.css", "plan.css")[theme]
    parts = {name: colour for name, colour in colours.items() if re.fullmatch(r"c\d+", name)}
    assert len(parts) == 14 and find_least_difference(parts)[0] > 20
    for name in (*parts, "rest"):
        assert compute_contrast(colours[name], colours["paper"]) > 3, name
        assert compute_contrast(colours[name], colours["panel"]) >= 3, name
    for text, paper in [("ink", "paper"), ("faint", "paper"), ("faint", "panel"), ("good", "good-paper"),
                        ("bad", "bad-paper"), ("open", "open-paper"), ("c1", "paper")]:  # fmt: skip
        assert compute_contrast(colours[text], colours[paper]) > 4.5, text
    for name in ("c1", "c2", "c5", "c11"):  # of the timetable, whose actions have numbers inside
        assert compute_contrast(colours[name], colours["inside"]) > 4.5, name


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_it_fits_a_phone(comparison: Comparison) -> None:
    text = render_page(comparison)
    drawings = list_drawings(text)
    assert 'content="width=device-width, initial-scale=1"' in text
    assert sum(drawing.width == 880 for drawing in drawings) == sum(drawing.width == 360 for drawing in drawings)
    for drawing in drawings:
        assert not drawing.list_cut_texts() and not drawing.list_overlaps(), drawing.width
    rules = re.findall(r"([^{}\n]+) \{([^{}]*)\}", text.partition("<style>")[2].partition("</style>")[0])
    wide = [(selector, width) for selector, rule in rules for width in re.findall(r"min-width: (\d+)px", rule)]
    assert all(int(width) <= 360 or selector.startswith(".scroll ") for selector, width in wide)
    assert not re.findall(r">[^<]*(?:\d\.\d{7}|\de[-+]0)[^<]*</text>", text)


def test_lines_of_a_narrow_chart_have_letters() -> None:
    (training,) = re.findall(r"<h3>Training loss</h3>.*?</figure>", render_page(make_mixed()), re.S)
    legend, drawing = re.findall(r'<p class="legend">(.*?)</p><svg(.*?)</svg>', training, re.S)[0]
    letters = re.findall(r'data-variant="(\d)"><span class="key (c\d)"></span>(\w): ', legend)
    assert [letter for *_, letter in letters] == list("ABCDEF")
    for variant, colour, letter in letters:
        assert re.search(rf'<g class="{colour}" data-variant="{variant}">.*?>{letter}</text>', drawing)


def test_the_loss_is_never_out_of_sight() -> None:
    heads = re.findall(r"<th title=[^>]*>(\w+)", render_page(make_mixed()))
    assert heads[:2] == ["answer", "validation"]
    style = render_page(make_mixed()).partition("<style>")[2].partition("</style>")[0]
    assert int(re.findall(r"main { max-width: (\d+)px", style)[0]) > 1600
    assert ".scroll td small { white-space: normal; }" in style  # an interval widens no column


def test_what_qualifies_an_answer_is_in_the_table() -> None:
    lost = make_quality("undecided", better=4, worse=2, pairs=6, diverged=2)
    variant = make_variant("lr=3", quality=(lost,), same_science=False)
    read = PageReader(render_page(make_comparison(make_variant("base", baseline=True), variant)))
    assert "better on 4 of 6 seeds2 diverged" in read.text and "(2 diverged)" in read.text
