"""What a comparison says in the terminal, in Markdown, in CSV and in JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support import shown_report
from tests.support.shown_report import (
    make_comparison,
    make_failures,
    make_learning,
    make_many_variants,
    make_mixed,
    make_quality,
    make_run_result,
    make_single_run,
    make_two_variants,
    make_variant,
    show_markdown,
    show_text,
)
from titan.report.findings import Comparison, FailedRun, Interval, Variant
from titan.report.render import sentences, table_data
from titan.report.render.comparison_report import COLUMNS, format_csv, format_json, render_page
from titan.report.render.document import format_table

COMPARISONS = [pytest.param(make(), id=name) for name, make in shown_report.ALL.items() if name != "many"]
COMPARISONS.append(pytest.param(make_many_variants(12, 50), id="twelve"))


def packed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_terminal_keeps_to_its_width(comparison: Comparison, width: int) -> None:
    assert max(map(len, show_text(comparison, width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 100, 300])
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_terminal_says_it_all(comparison: Comparison, width: int) -> None:
    text = packed(show_text(comparison, width))
    for failed in comparison.failed:
        assert packed(failed.label) in text and packed(failed.reason) in text and failed.directory in text
    for variant in comparison.variants:
        assert all(part in text for part in variant.label.split() if len(part) < 20)
    assert all(packed(note) in text for note in sentences.format_notes(comparison))
    assert all(packed(said) in text for _, told in sentences.format_answers(comparison) for said in told)


def test_terminal_in_one_line_an_variant() -> None:
    lines = show_text(make_two_variants(), 200).splitlines()
    (single,) = [line for line in lines if line.startswith("parallelism=single")]
    (fsdp,) = [line for line in lines if line.startswith("parallelism=fsdp  ")]
    assert re.split(r"\s{2,}", single)[1:6] == ["baseline", "2.6531 [2.6431, 2.6631]", "2", "1", "30,000"]
    assert re.split(r"\s{2,}", fsdp)[3:8] == ["2", "1.320 [1.300, 1.340]", "39,600", "103 (99.3-113)", "0.90"]


def test_terminal_leaves_the_heaviest_columns_out_and_says_so() -> None:
    text = show_text(make_two_variants(), 100)
    assert "terminal is too narrow: bits, device-hours, goodput, loss." in text.replace("MFU, ", "")
    assert "goodput" not in text.partition("Columns left out")[0]


def test_terminal_without_room_for_a_table_has_a_block_an_variant() -> None:
    lines = show_text(make_two_variants(), 40).splitlines()
    at = lines.index("parallelism=fsdp")
    assert lines[at + 1 : at + 4] == ["  answer: same", "  validation nats: 2.6531 [2.6431,", "    2.6631]"]


@pytest.mark.parametrize("width", [40, 100, 160])
def test_colours_change_nothing_else(width: int) -> None:
    plain, coloured = (show_text(make_mixed(), width, colour=colour) for colour in (False, True))
    assert ("\x1b" not in plain and "\x1b[32msame\x1b[0m" in coloured) or width == 40
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def with_ratio(low: float | None, high: float | None, answer: str = "yes", **changes: Any) -> Variant:
    variant = make_variant("layout=fast", learning=make_learning(answer), **changes)
    return replace(variant, speed_ratio=Interval(1.3, low, high))


OTHER = {"same_science": False}
LEADS = [
    pytest.param(
        [with_ratio(1.2, 1.4)],
        "learns the same as the baseline. It is faster: 1.300 times the baseline's tokens/s.",
        id="yes",
    ),
    pytest.param(
        [with_ratio(1.2, 1.4, speed_doubt="few")],
        "learns the same as the baseline. Speed is not ranked: few.",
        id="doubt",
    ),
    pytest.param(
        [with_ratio(0.9, 1.7)], "the same as the baseline. It is not shown to be faster", id="interval-spans-one"
    ),
    pytest.param([with_ratio(None, None)], "the same as the baseline. It is not shown to be faster", id="no-interval"),
    pytest.param([with_ratio(1.2, 1.4, "no")], "layout=fast does not learn the same as the baseline.", id="no"),
    pytest.param(
        [with_ratio(1.2, 1.4, "undecided")],
        "layout=fast: inconclusive whether it learns the same as the baseline.",
        id="undecided",
    ),
    pytest.param(
        [with_ratio(1.2, 1.4), with_ratio(1.2, 1.4, "no"), with_ratio(1.5, 1.6, "undecided")],
        "3 variants with the same hyperparameters: 1 learns the same, 1 does not learn the same, 1 inconclusive. "
        "Fastest of those that learn the same: layout=fast, 1.300 times",
        id="several",
    ),
    pytest.param(
        [make_variant("lr=3", quality=(make_quality(),), **OTHER), make_variant("lr=9", **OTHER)],
        "Best so far: lr=3, validation loss 2.653, 0.050 below the baseline's (base); significant with 2 seeds "
        "(p 0.006). 2 variants with other hyperparameters: 1 better, 1 not ranked.",
        id="better",
    ),
    pytest.param(
        [make_variant("lr=3", quality=(make_quality(difference=0.1),), **OTHER)],
        "Best so far: the baseline, base, validation loss 2.653, 0.100 below that of lr=3; significant",
        id="worse",
    ),
    pytest.param(
        [make_variant("lr=3", quality=(make_quality("no"),), **OTHER)],
        "shown to be smaller than the equivalence margin of 0.02 with 2 seeds.",
        id="equal",
    ),
    pytest.param(
        [make_variant("lr=3", quality=(make_quality("undecided"),), **OTHER)],
        "not significant with 2 seeds (p 0.006; more seeds are unlikely to decide).",
        id="open",
    ),
    pytest.param([make_variant("lr=3", state="running", **OTHER)], "2 of 4 runs are not finished.", id="running"),
]


@pytest.mark.parametrize(("variants", "said"), LEADS)
def test_lead(variants: list[Variant], said: str) -> None:
    told = " ".join(sentences.format_lead(make_comparison(make_variant("base", baseline=True), *variants)))
    assert said in told


def test_lead_of_failures_and_of_one_variant() -> None:
    failures = "No run has metrics. 3 failed for other reasons than divergence, listed below."
    assert " ".join(sentences.format_lead(make_failures())) == failures
    assert sentences.format_lead(make_single_run()) == ["There is only one variant, so nothing is compared."]


def test_a_note_of_many_variants_is_said_once() -> None:
    variants = [make_variant(f"lr={i}", notes=("not tuned",)) for i in range(9)]
    told = sentences.format_notes(make_comparison(make_variant("base", baseline=True), *variants))
    assert told[1:] == ["lr=0 | lr=1 | lr=2 | lr=3 | lr=4 | lr=5 | and 3 more: not tuned."]
    assert sentences.format_notes(make_comparison(*variants))[1:] == ["All variants: not tuned."]


def test_equal_verdicts_are_said_once_with_their_points() -> None:
    ends = [make_quality(at=at, text="Yes: by 0.05 nats.") for at in ("the end", "equal tokens")]
    hours = make_quality("undecided", at="equal device-hours", text="inconclusive: by 0.01 nats")
    variant = make_variant("lr=3", quality=(*ends, hours), same_science=False)
    ((_, told),) = sentences.format_answers(make_comparison(variant))
    assert told[:2] == [
        "At the end and at equal tokens: yes: by 0.05 nats.",
        "At equal device-hours: inconclusive: by 0.01 nats.",
    ]
    ((_, told),) = sentences.format_answers(make_comparison(replace(variant, quality=(hours,))))
    assert told[0] == "Inconclusive: by 0.01 nats."


def test_only_columns_with_figures() -> None:
    bare = make_variant("base", tokens=None, baseline=True, validation=None, bits=None)
    names = [column.name for column in table_data.build_columns(make_comparison(bare, bare))]
    assert names == ["answer", "runs", "device-hours", "goodput", "loss"]
    assert "speed" not in [column.name for column in table_data.build_columns(make_single_run())]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({}, "2", id="finished"),
        pytest.param({"state": "running", "steps_done": 100}, "2 (2 running at 25%)", id="running"),
        pytest.param({"seeds": (0, 0)}, "2 (1 seed)", id="repeats"),
        pytest.param({"seeds": (4,), "state": "failed", "steps_done": 200}, "1 (failed at 50%)", id="one-failed"),
    ],
)
def test_runs(changes: dict[str, Any], told: str) -> None:
    columns = {
        column.name: column for column in table_data.build_columns(make_comparison(make_variant("base", **changes)))
    }
    assert columns["runs"].cells[0].format_line() == told


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_markdown_tables_are_whole(comparison: Comparison) -> None:
    text = show_markdown(comparison)
    assert "<" not in text and ">" not in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(bars) == 1, block


def test_markdown_says_it_all() -> None:
    comparison = make_mixed()
    text = show_markdown(comparison).replace("\\", "").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert all(variant.label in text for variant in comparison.variants)
    assert all(failed.reason in text and failed.directory in text for failed in comparison.failed)
    assert "| optimizer=muon | validation loss at the end | -0.0100 | -0.0200 [-0.0300, -0.0100] |" in text
    assert "| parallelism | differs: single | fsdp | tp |" in text and "| model | debug |" in text


@pytest.mark.parametrize(
    ("label", "told"),
    [
        pytest.param("a|b", "a\\|b", id="table"),
        pytest.param("[x](javascript:1)", "[x]\\(javascript:1)", id="link"),
        pytest.param("<b>&", "&lt;b&gt;&amp;", id="tag"),
        pytest.param("a_b *c* `d`", "a\\_b \\*c\\* \\`d\\`", id="emphasis"),
        pytest.param("a\n# b", "a \\# b", id="line"),
    ],
)
def test_markdown_takes_labels_for_text(label: str, told: str) -> None:
    failed = FailedRun(label, "/data", "failed", "killed")
    assert f"\n| {told} | failed | killed | /data |\n" in show_markdown(make_comparison(failed=[failed]))


def test_csv_has_a_row_a_run() -> None:
    comparison = make_mixed()
    rows = list(csv.DictReader(io.StringIO(format_csv(comparison))))
    runs = [(variant, run) for variant in comparison.variants for run in variant.runs]
    assert list(rows[0])[: len(COLUMNS)] == list(COLUMNS)
    assert len(rows) == len(runs) + len(comparison.failed)
    for row, (variant, run) in zip(rows, runs, strict=False):
        assert (row["variant"], row["run"], row["directory"]) == (variant.label, run.label, run.directory)
        assert run.speed is not None and float(row["step_seconds"]) == run.speed.step_seconds.median
        assert float(row["loss"]) == run.loss and row["baseline"] == str(variant.baseline).lower()
        assert float(row["device_hours"]) == run.cost.device_hours and row["bits_per_byte/code"] == "0.9"
    assert rows[0]["setting/parallelism"] == "single" and rows[-4]["setting/parallelism"] == ""
    assert [row["reason"] for row in rows[-2:]] == [failed.reason for failed in comparison.failed]


def test_csv_has_a_failed_run_with_figures_once() -> None:
    variant = make_variant("base", (0,), state="failed", reason="killed")
    failed = FailedRun("base", variant.runs[0].directory, "failed", "killed")
    (row,) = csv.DictReader(io.StringIO(format_csv(make_comparison(variant, failed=[failed]))))
    assert (row["state"], row["reason"]) == ("failed", "killed")


def test_csv_leaves_empty_what_is_unknown() -> None:
    variant = make_variant("base")
    variant = replace(variant, runs=(make_run_result("base", 0, None, loss=float("nan"), bits=None),))
    (row,) = csv.DictReader(io.StringIO(format_csv(make_comparison(variant))))
    assert row["loss"] == row["bits_per_byte"] == row["mfu"] == row["step_seconds"] == row["reason"] == ""


def test_no_cell_of_a_csv_is_a_formula() -> None:
    cells = ["=1+2", "+cmd|x", "-x", "@SUM(A1)", "-", "a=b", "-1.5", "+1e-3", "-.5%", "\t=1", "x\r=1", "x\n=1", ""]
    text = format_table(["=heading", "n"], [{"=heading": cell, "n": -1.5} for cell in cells])
    assert text.startswith("'=heading,n\n")
    found = [row["'=heading"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert found == [*(f"'{cell}" for cell in cells[:5]), *cells[5:9], r"\t=1", r"x\r=1", r"x\n=1", ""]
    assert text.count(",-1.5\n") == len(cells)


def refuse(constant: str) -> None:
    raise ValueError(constant)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_json_is_strict_and_full(comparison: Comparison) -> None:
    found = json.loads(format_json(comparison), parse_constant=refuse)
    assert found["format"] == 2 and found["title"] == comparison.title
    assert [variant["label"] for variant in found["variants"]] == [variant.label for variant in comparison.variants]
    assert [failed["reason"] for failed in found["failed"]] == [failed.reason for failed in comparison.failed]
    for variant, told in zip(comparison.variants, found["variants"], strict=True):
        assert [run["validation"] for run in told["runs"]] == [run.validation for run in variant.runs]
        assert all("curves" not in run for run in told["runs"])


def test_json_has_null_for_what_is_not_finite() -> None:
    variant = replace(make_variant("base"), runs=(make_run_result("base", loss=float("nan"), validation=float("inf")),))
    (run,) = json.loads(format_json(make_comparison(variant)), parse_constant=refuse)["variants"][0]["runs"]
    assert run["loss"] is None and run["validation"] is None


def test_the_command_that_shows_the_difference_can_be_copied() -> None:
    made = make_two_variants()
    command = f"python -m titan.replay {'runs/' + 'x' * 60} against=runs/single step=4"
    learning = replace(next(v.learning for v in made.variants if v.learning), answer="no", command=command)
    variants = tuple(replace(v, learning=learning) if v.learning else v for v in made.variants)
    comparison = replace(made, variants=variants)
    assert f"  {command}" in show_text(comparison, 40).splitlines()
    assert f"    {command}" in show_markdown(comparison).splitlines()
    assert f"<code>{command}</code>" in render_page(comparison)
    assert "Where they differ first" not in show_text(made, 40)
