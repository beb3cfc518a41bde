"""Divergence, missing runs, outliers and spikes; what the first sentence says of an ordinary grid; shared machines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_runs import (
    Story,
    StoryAttempt,
    compare_made,
    make_run,
    make_seeds,
    make_sweep,
    read_lines,
    write_failure,
    write_lines,
)
from tests.support.shown_report import show_text
from tests.support.tiers import full
from titan.report import rank
from titan.report.comparison import compare
from titan.report.findings import Comparison, Outcomes, Variant
from titan.report.render import sentences
from titan.report.render.curves import draw_settings
from titan.report.render.table_data import build_columns, format_answer
from titan.sweep.ledger import SweepSpec

S = Story()
WD = "optimizer.weight_decay=0.2"
NOISE = (0.0, 0.003, -0.002, 0.004, -0.001, 0.002)
ADAMW, MUON = "optimizer=adamw", "optimizer=muon"
Seeds = Sequence[float | None]
"""The level of each seed above the story's; None where it diverges."""


def tell(found: Comparison) -> str:
    return " ".join(sentences.format_lead(found))


def against(folder: Path, variant: Seeds, baseline: Seeds = NOISE) -> tuple[Comparison, Variant]:
    found = compare_made(folder, (make_seeds(*baseline), ()), (make_seeds(*variant), (WD,)))
    return found, found.variants[1]


ALL, BOTH = (-0.1, -0.1, -0.101, -0.099, -0.1, -0.098), (-0.1, None, -0.1)
SOME = (-0.1, None, -0.101, -0.099, None, -0.098)
TOLD = "better on 6 of 6 seeds, baseline: 2 diverged"
BASE, WON = "the baseline, weight_decay=0.1, validation loss 3.014.", "weight_decay=0.2, validation loss 2.91"
DIVERGED = [
    pytest.param(SOME, NOISE, "undecided", "better on 4 of 6 seeds|2 diverged|bad", BASE, id="better-if-it-survived"),
    full(ALL, (0.0, None, 0.1, 0.0, None, 0.0), "yes", f"better|{TOLD}|good", WON, id="the-baseline-diverged"),
    full((None,) * 6, NOISE, "yes", "worse|better on 0 of 6 seeds, 6 diverged|bad", BASE, id="all-diverged"),
    full(
        (*ALL, -0.1, -0.1, None), (*NOISE, 0.001, 0.0, 0.002), "undecided", "better on 8 of 9 seeds|1 diverged|bad",
        BASE[:40], id="significant-and-yet-not-plainly-better",
    ),
    pytest.param((-0.1, None), (0.0, 0.003), "undecided", "better on 1 of 2 seeds|1 diverged|bad", BASE[:40], id="few"),
    pytest.param(
        BOTH, (0.0, None, 0.003), "undecided", "better on 2 of 3 seeds|1 diverged, baseline: 1 diverged|bad",
        f"{WON}3 on the 2 of 3 seeds that did not diverge", id="as-many-on-both-sides",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "baseline", "verdict", "cell", "first"), DIVERGED)
def test_divergence_is_an_outcome(
    variant: Seeds, baseline: Seeds, verdict: str, cell: str, first: str, tmp_path: Path
) -> None:
    found, judged = against(tmp_path, variant, baseline)
    assert (judged.quality[0].answer, judged.quality[0].pairs) == (verdict, len(variant))
    shown = format_answer(judged)
    assert f"{shown.main}|{shown.detail}|{shown.mood}" == cell
    assert sentences.format_lead(found)[0].startswith(f"Best so far: {first}")


@pytest.mark.full
def test_the_first_sentence_and_the_table_say_what_the_means_do_not(tmp_path: Path) -> None:
    found, judged = against(tmp_path, (-0.1, None, -0.101, -0.099, None, -0.098))
    lead = tell(found)
    assert lead.startswith(
        "Best so far: the baseline, weight_decay=0.1, validation loss 3.014. weight_decay=0.2: better "
    )
    assert "weight_decay=0.2: better on 4 of 6 seeds, 2 diverged (not significant, p 0.69)." in lead
    cells = {column.name: column.cells[1] for column in build_columns(found)}
    assert cells["validation"].detail.endswith("without 2 diverged") and "2 diverged at 52%" in cells["runs"].detail
    assert judged.outcomes == Outcomes(ended=4, diverged=2)
    base, other = (variant.validation for variant in found.variants)
    assert base and other and other.estimate < base.estimate
    assert rank.rank_variants(found.variants) == [0, 1], "a lower loss of the seeds that survived is no better place"
    assert "failed for other reasons" not in lead and "not finished" not in " ".join(judged.notes)


def test_a_final_validation_that_is_not_finite_is_a_divergence(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    lines = [
        line | ({"validation_loss": None} if "validation_loss" in line else {}) for line in read_lines(tmp_path / "a")
    ]
    write_lines(tmp_path / "a", lines)
    assert compare([tmp_path]).variants[0].outcomes == Outcomes(diverged=1)


def test_a_run_that_gave_up_at_its_first_step_is_counted(tmp_path: Path) -> None:
    found = compare_made(tmp_path, (make_seeds(0.0), ()), ([replace(S, bad=0, attempts=(StoryAttempt(0, 0),))], (WD,)))
    assert found.variants[1].outcomes == Outcomes(diverged=1)
    assert "weight_decay=0.2: better on 0 of 1 seeds, 1 diverged" in tell(found)


MISSING = [
    pytest.param("rank 1 was killed", Outcomes(ended=1, failed=1), "1 of 2 runs not finished (1 failed)", id="machine"),
    pytest.param("3 steps in a row without finite values", Outcomes(1, 1), "1 of 2 runs diverged", id="recipe"),
    pytest.param(
        "3 steps in a row were not finite, the last one step 9: the loss of rank 0, rows 1 to 2", Outcomes(1, 1),
        "1 of 2 runs diverged", id="recipe, older titan",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "outcomes", "note"), MISSING)
def test_a_failed_machine_is_no_outcome_of_the_recipe(
    reason: str, outcomes: Outcomes, note: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "a", S)
    write_failure(make_run(tmp_path / "b", replace(S, seed=1, attempts=(StoryAttempt(0, 30),))), reason)
    (variant,) = compare([tmp_path]).variants
    assert variant.outcomes == outcomes and any(note in each for each in variant.notes)


def test_trials_that_have_not_begun_belong_to_their_variant(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", replace(S, seed=seed), WD)
    points = {f"a{seed}": (WD, f"training.seed={seed}") for seed in range(4)}
    make_sweep(tmp_path, SweepSpec(), points, {"event": "ended", "id": "a3", "code": 1, "reason": "no node was free"})
    found = compare([tmp_path])
    assert found.variants[0].outcomes == Outcomes(ended=2, failed=1, waiting=1)
    assert any(
        "1 of its trials failed without metrics, 1 of its trials have no metrics yet" in n
        for n in found.variants[0].notes
    )
    assert "1 failed for other reasons than divergence" in tell(found)


STOPS = [
    pytest.param([], "Stopped runs", id="alone"),
    pytest.param([{"event": "ended", "id": "b", "code": 1, "reason": "no node was free"}],
                 "Failures, and stopped runs", id="beside-a-failure"),
]  # fmt: skip


@pytest.mark.parametrize(("events", "heading"), STOPS)
def test_a_run_that_was_stopped_has_not_failed(events: list[dict[str, Any]], heading: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    make_run(tmp_path / "a1", replace(S, seed=1, attempts=(StoryAttempt(0, 30),)))
    points = {"a": ("training.seed=0",), "a1": ("training.seed=1",), "a2": ("training.seed=2",)}
    points |= {"b": ("training.seed=3",)} if events else {}
    stops = [{"event": "ended", "id": name, "code": 130} for name in ("a1", "a2")]
    make_sweep(tmp_path, SweepSpec(), points, *stops, *events)
    found = compare([tmp_path])
    lead = tell(found)
    assert "1 of 2 runs is not finished. 2 were stopped, listed below." in lead
    assert ("1 failed for other reasons than divergence, listed below." in lead) == bool(events) == ("failed" in lead)
    assert sentences.format_missing_heading(found) == heading
    notes = " ".join(found.variants[0].notes)
    assert "1 of its trials stopped without metrics" in notes
    assert ("1 of its trials failed without metrics" in notes) == bool(events)


@pytest.mark.full
def test_of_learning_rates_one_at_which_runs_diverged_is_not_the_best(tmp_path: Path) -> None:
    found = compare_made(
        tmp_path,
        (make_seeds(*NOISE), (ADAMW, "optimizer.lr=1e-3")),
        (make_seeds(-0.1, None, -0.101, -0.099, None, -0.098), (ADAMW, "optimizer.lr=3e-3")),
        (make_seeds(*NOISE), (MUON, "optimizer.lr=1e-3")),
    )
    assert found.variants[0].label == "optimizer=adamw lr=0.001"
    (lost,) = [variant for variant in found.variants if variant.label == "optimizer=adamw lr=0.003"]
    assert (format_answer(lost).main, format_answer(lost).detail) == (
        "better on 4 of 6 seeds",
        "2 diverged, another lr is best",
    )
    assert "lr=0.003: better on 4 of 6 seeds, 2 diverged (compared with its best" in tell(found)


OUTLIERS = [
    pytest.param((2.95, 2.951, 7.0), (2.96, 2.961, 2.962), [False, False, True], id="seven-among-three"),
    pytest.param((2.95, 2.951, 2.949), (2.96, 2.961, 2.962), [False] * 3, id="none"),
    pytest.param((2.95, 2.951, 2.965), (2.96, 2.961, 2.962), [False] * 3, id="within-the-margin"),
    pytest.param((2.9, 3.0, 3.3), (2.8, 3.1, 3.2), [False] * 3, id="a-wide-spread"),
    pytest.param((2.95, 7.0), (2.96, 2.961, 2.962), [False, False], id="two-seeds-tell-nothing"),
]


@pytest.mark.full
@pytest.mark.parametrize(("levels", "others", "far"), OUTLIERS)
def test_outliers(levels: Sequence[float], others: Sequence[float], far: list[bool], tmp_path: Path) -> None:
    variants = [[replace(S, seed=seed, level=level) for seed, level in enumerate(each)] for each in (others, levels)]
    found = compare_made(tmp_path, (variants[0], ()), (variants[1], (WD,)))
    assert [run.outlier for run in found.variants[1].runs] == far
    assert any(note.startswith("outlier: seed 2 with 7.0135; the median") for note in found.variants[1].notes) == any(
        far
    )
    assert ("1 outlier" in show_text(found, 200)) == any(far)


SPIKES = [
    pytest.param({}, [], id="none"),
    pytest.param({120: 2.0, 121: 1.0, 123: 1.5}, [120], id="one-of-several-steps"),
    pytest.param({120: 2.0, 190: 1.0}, [120, 190], id="two"),
    pytest.param({20: 2.0}, [], id="in-the-first-steps"),
    pytest.param({120: -1.0}, [], id="a-fall"),
    pytest.param({120: 0.1}, [], id="within-the-noise"),
]


@pytest.mark.parametrize("median", [None, "x", math.nan])
def test_marked_spikes_without_a_median_are_not_counted(median: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run", replace(S, steps=20))
    lines = read_lines(tmp_path / "run")
    lines[14] |= {"spike": 9.0, "spike_median": median}
    write_lines(tmp_path / "run", lines)
    (variant,) = compare([tmp_path]).variants
    assert variant.runs[0].spikes == () and "nan" not in " ".join(variant.notes)


@pytest.mark.parametrize(("rises", "steps"), SPIKES)
def test_loss_spikes(rises: Mapping[int, float], steps: list[int], tmp_path: Path) -> None:
    (variant,) = compare_made(tmp_path, ([replace(S, steps=200, rises=rises)], ())).variants
    assert [spike.step for spike in variant.runs[0].spikes] == steps
    assert any(note.startswith(f"loss spikes in 1 of 1 run: {len(steps)} in all") for note in variant.notes) == bool(
        steps
    )


def rated(optimizer: str, rate: str, *levels: float) -> tuple[list[Story], tuple[str, ...]]:
    return [replace(S, seed=s, level=level) for s, level in enumerate(levels)], (optimizer, f"optimizer.lr={rate}")


ADAMWS = rated(ADAMW, "1e-3", 6.9, 6.9), rated(ADAMW, "1e-2", 6.8, 6.88)


def test_the_first_sentence_of_an_ordinary_grid(tmp_path: Path) -> None:
    found = compare_made(tmp_path, *ADAMWS, rated(MUON, "1e-2", 6.40, 6.60))
    lead = sentences.format_lead(found)
    assert lead[0].startswith(
        "Best so far: optimizer=muon lr=0.01, validation loss 6.513, 0.340 below the baseline's (optimizer=adamw "
        "lr=0.01, best of 2 learning rates); not significant with 2 seeds (p 0.11; 1 more seed "
    )
    assert re.search(r"\(95% range 1 to \d+, estimated from 2\) would decide\)\.$", lead[0])
    rows = [line.split("  ")[0] for line in show_text(found, 250).splitlines() if line.startswith("optimizer=")]
    assert rows[:3] == ["optimizer=muon lr=0.01", "optimizer=adamw lr=0.01", "optimizer=adamw lr=0.001"]
    assert [variant.label for variant in found.variants if variant.baseline] == ["optimizer=adamw lr=0.01"]


def batches(folder: Path, every: int = 10, **options: Any) -> Comparison:
    """Batches for as many steps: the larger one sees more tokens, and so comes to less."""
    small = [replace(s, every=every) for s in make_seeds(0.0, 0.01, 0.005)]
    large = [replace(s, every=every) for s in make_seeds(-0.1, -0.09, -0.094)]
    return compare_made(
        folder, (small, ("training.global_batch=128",)), (large, ("training.global_batch=256",)), **options
    )


@pytest.mark.full
def test_variants_of_unequal_tokens_are_judged_at_equal_ones(tmp_path: Path) -> None:
    found = batches(tmp_path)
    lead = sentences.format_lead(found)
    assert lead[0].startswith(
        "The variants saw different numbers of tokens (5,120, 10,240), so their final losses are not ranked"
    )
    assert "compared at equal tokens" in lead[0] and lead[1] == "global_batch=256 compared with the baseline: worse."
    assert "5,120" in show_text(found, 200) and format_answer(found.variants[1]).detail == "at equal tokens"


@pytest.mark.full
def test_where_nothing_is_at_equal_tokens_nothing_is_ranked(tmp_path: Path) -> None:
    found = batches(tmp_path, every=0)
    lead = tell(found)
    assert "can't be compared at equal tokens: the runs have no validation at the same number of tokens" in lead
    assert format_answer(found.variants[1]).main == "inconclusive" and "Best" not in lead


@pytest.mark.full
def test_by_the_target_the_batch_that_needs_fewer_tokens_wins(tmp_path: Path) -> None:
    found = batches(tmp_path, target=3.3)
    lead = tell(found)
    assert "not ranked. They are ranked by the tokens to the loss 3.3. Fewest tokens: global_batch=128, " in lead
    told = found.variants[1].quality[0]
    assert (told.at, told.answer, format_answer(found.variants[1]).main) == ("the target", "yes", "worse")
    assert "times the baseline's tokens to reach the loss 3.3" in told.text


def test_a_target_before_the_first_validation_tells_nothing(tmp_path: Path) -> None:
    found = batches(tmp_path, target=9.0)
    assert "Runs had reached the target at their first validation: set a lower" in tell(found)
    assert found.variants[1].quality[0].answer == "undecided" and found.variants[1].quality[0].p is None


def test_a_run_that_never_comes_to_the_target_loses_to_those_that_do(tmp_path: Path) -> None:
    found = batches(tmp_path, target=2.96)
    told = found.variants[1].quality[0]
    assert (told.better, told.pairs, told.baseline_diverged, told.answer) == (3, 3, 3, "undecided")
    assert "baseline: 3 did not reach the loss 2.96" in told.text


TIMES = [
    pytest.param(("m", "m"), (0.0, 1000.0), False, id="one-after-the-other"),
    pytest.param(("m", "m"), (0.0, 20.0), True, id="at-the-same-time"),
    pytest.param(("m", "n"), (0.0, 20.0), False, id="on-two-machines"),
    pytest.param(("", ""), (0.0, 20.0), False, id="not-known"),
]


@pytest.mark.full
@pytest.mark.parametrize(("hosts", "begins", "shared"), TIMES)
def test_trials_that_shared_a_machine_are_neither_faster_nor_slower(
    hosts: tuple[str, str], begins: tuple[float, float], shared: bool, tmp_path: Path
) -> None:
    variants = []
    for host, begin, seconds in zip(hosts, begins, (0.5, 0.4), strict=True):
        story = replace(S, host=host, seconds=seconds, jitter=0.001)
        variants.append([replace(story, seed=seed, luck=seed, start_offset=begin + 5000 * seed) for seed in range(3)])
    found = compare_made(tmp_path, (variants[0], ()), (variants[1], ("memory=full",)))
    variant = found.variants[1]
    assert (variant.speed_doubt == "trials ran on one machine at the same time") == shared
    said = " ".join(sentence for _, told in sentences.format_answers(found) for sentence in told)
    assert ("Faster: 1.25" in said) != shared and ("Speed is not ranked" in tell(found)) == shared
    assert variant.speed_ratio is not None and (variant.speed_ratio.low is None) == shared


@pytest.mark.full
def test_the_chart_over_a_varied_number(tmp_path: Path) -> None:
    variants = [
        rated(ADAMW, rate, level, level + 0.01) for rate, level in (("1e-3", 3.2), ("1e-2", 3.0), ("1e-1", 3.1))
    ]
    found = compare_made(tmp_path, *variants, (make_seeds(0.1, None), (MUON, "optimizer.lr=1e-2")))
    chart = draw_settings(found)
    assert chart is not None and chart.title == "Validation loss over lr" and "optimizer.lr (log scale)" in chart.html
    (points,) = re.findall(r'class="family" points="([^"]*)"', chart.html)
    xs = [float(point.split(",")[0]) for point in points.split()]
    assert len(xs) == 3 and xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert chart.html.count('class="cross"') == 1 and chart.html.count("<circle") == 7 and "Crosses" in chart.caption


@pytest.mark.full
def test_no_chart_where_no_number_was_varied(tmp_path: Path) -> None:
    assert draw_settings(compare_made(tmp_path, (make_seeds(0.0), (ADAMW,)), (make_seeds(0.1), (MUON,)))) is None


def test_the_chart_shows_losses_after_equal_tokens(tmp_path: Path) -> None:
    chart = draw_settings(batches(tmp_path))
    assert chart is not None and "After 5,120 tokens, the fewest that a variant saw." in chart.caption
    heights = [float(y) for y in re.findall(r'cy="([^"]*)"', chart.html)]
    assert max(heights[:3]) > min(heights[:3]) > max(heights[3:])  # larger losses lie higher, where cy is less
