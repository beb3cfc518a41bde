"""The page of a comparison: whole, offline, safe, and small."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from tests.support import shown_report
from tests.support.page_reader import PageReader
from titan.report.findings import Comparison
from titan.report.render.html import render_page
from titan.report.render.template import POLICY

COMPARISONS = [pytest.param(make(), id=name) for name, make in shown_report.ALL.items() if name != "many"]
COMPARISONS.append(pytest.param(shown_report.make_many_variants(12, 50), id="twelve"))


def test_the_policy_allows_the_script_of_the_page_and_no_other() -> None:
    page = render_page(shown_report.make_mixed())
    ((script,), (policy,)) = (
        re.findall(p, page, re.S) for p in (r"<script>(.*?)</script>", r'Policy" content="(.*?)"')
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"<[^>]*\son\w+=", page)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_it_is_whole_and_needs_nothing(comparison: Comparison) -> None:
    text = render_page(comparison)
    read = PageReader(text)
    assert read.open == []
    assert (
        not read.list_values("src")
        and not read.list_values("href")
        and not re.search(r"https?:|@import|//[a-z]", without_script(text))
    )
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", text))
    assert len(read.list_values("id")) == len(set(read.list_values("id")))
    assert any(value.startswith(f"{POLICY}; script-src 'sha256-") for value in read.list_values("content"))
    assert "nan" not in " ".join(read.list_values("points") + read.list_values("d") + read.list_values("width")).lower()


def without_script(text: str) -> str:
    return re.sub(r"<script>.*?</script>", "", text, flags=re.S)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_it_says_it_all(comparison: Comparison) -> None:
    read = PageReader(render_page(comparison, "made today"))
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
    assert shown_report.NASTY in PageReader(render_page(shown_report.make_mixed())).text
    read = PageReader(
        render_page(
            shown_report.make_comparison(
                *shown_report.make_mixed().variants, title=shown_report.NASTY, question='"><img src=x>'
            )
        )
    )
    assert read.tags.count("script") == 1 and "img" not in read.tags
    assert all(name in KNOWN for name, _ in read.attributes)


KNOWN = {
    "aria-hidden", "aria-label", "charset", "class", "clip-path", "content", "cx", "cy", "d", "data-variant", "height",
    "http-equiv", "id", "lang", "name", "points", "preserveaspectratio", "r", "role", "scope", "text-anchor", "title",
    "viewbox", "width", "x", "y",
}  # fmt: skip


def test_sections_come_in_order() -> None:
    read = render_page(shown_report.make_mixed())
    told = re.findall(r"<h2>(.*?)</h2>", read)
    assert told == ["Answers", "Results", "By source", "Charts", "Failures", "Notes", "Settings", "Runs"]
    assert re.findall(r"<h3>(.*?)</h3>", read) == [
        "Training loss", "Validation loss", "Difference to the baseline", "Throughput", "Memory", "Speed and memory",
    ]  # fmt: skip
    assert re.findall(r"<h2>(.*?)</h2>", render_page(shown_report.make_failures())) == ["Failures", "Settings"]


def test_a_large_comparison_stays_small() -> None:
    text = render_page(shown_report.make_many_variants(64, 10_000))
    assert len(text) < 1_000_000
    assert max(points.count(",") for points in re.findall(r'points="([^"]*)"', text)) <= 400


def test_the_loss_is_never_out_of_sight() -> None:
    heads = re.findall(r"<th title=[^>]*>(\w+)", render_page(shown_report.make_mixed()))
    assert heads[:2] == ["answer", "validation"]
    style = render_page(shown_report.make_mixed()).partition("<style>")[2].partition("</style>")[0]
    assert int(re.findall(r"main { max-width: (\d+)px", style)[0]) > 1600
    assert ".scroll td small { white-space: normal; }" in style  # an interval widens no column


def test_what_qualifies_an_answer_is_in_the_table() -> None:
    lost = shown_report.make_quality("undecided", better=4, worse=2, pairs=6, diverged=2)
    variant = shown_report.make_variant("lr=3", quality=(lost,), same_science=False)
    read = PageReader(
        render_page(shown_report.make_comparison(shown_report.make_variant("base", baseline=True), variant))
    )
    assert "better on 4 of 6 seeds2 diverged" in read.text and "(2 diverged)" in read.text
