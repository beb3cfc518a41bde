"""Variants of different science: what may be said, by which measure, and by how many seeds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.made_runs import (
    H200,
    Story,
    StoryAttempt,
    compare_made,
    make_run,
    make_seeds,
    make_sweep,
    write_failure,
)
from tests.support.tiers import full
from titan.report.comparison import compare
from titan.report.findings import Comparison, Quality, Variant
from titan.report.render.sentences import format_lead
from titan.sweep.ledger import SweepSpec

S = Story()
WD = "optimizer.weight_decay=0.2"


BASE = make_seeds(0.0, 0.02, -0.01, 0.01)


def qualities(found: Comparison, variant: int = 1) -> dict[str, Quality]:
    return {quality.at: quality for quality in found.variants[variant].quality}


CASES = [
    pytest.param(make_seeds(-0.05, -0.03, -0.055, -0.04), "yes", "better", "-0.0487", id="better"),
    pytest.param(
        make_seeds(0.001, 0.021, -0.011, 0.011), "no", "no difference", "smaller than the equivalence margin", id="same"
    ),
    pytest.param(
        make_seeds(0.011, 0.03, 0.001, 0.02), "yes", "worse", "yet smaller than the equivalence margin", id="by-little"
    ),
    pytest.param(make_seeds(0.05, 0.00, -0.03, 0.02), "undecided", "inconclusive", " would decide", id="too-noisy"),
    pytest.param(make_seeds(-0.05), "undecided", "inconclusive", "one seed is not enough to compare", id="one-seed"),
    pytest.param(
        [replace(story, seed=story.seed + 10) for story in make_seeds(-0.05, -0.03, -0.055, -0.04)],
        "yes", "better", "unpaired", id="other-seeds",
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("variant", "answer", "first", "words"), CASES)
def test_whether_an_variant_learned_more_or_less(
    variant: list[Story], answer: str, first: str, words: str, tmp_path: Path
) -> None:
    found = qualities(compare_made(tmp_path, (BASE, ()), (variant, (WD,))))["the end"]
    assert found.answer == answer and found.text.startswith(f"{first}: ") and words in found.text
    pairs = len(variant) if variant[0].seed == 0 else 0
    assert (found.measure, found.pairs) == ("validation loss", pairs)


def test_one_pair_has_no_interval_and_no_p(tmp_path: Path) -> None:
    found = qualities(compare_made(tmp_path, (make_seeds(0.0), ()), (make_seeds(-0.05), (WD,))))["the end"]
    assert found.difference is not None and found.difference.estimate == pytest.approx(-0.05)
    assert (found.difference.low, found.p, found.p_holm, found.needed) == (None, None, None, 2)


EQUAL = [
    pytest.param(S, "no", "no difference: all losses are bitwise equal, in 1 pair", id="bitwise"),
    pytest.param(
        replace(S, first_off=1 + 3e-7), "no", "no difference: all losses are equal to rounding", id="rounding"
    ),
    pytest.param(replace(S, first_off=1 + 3e-5), "undecided", "one seed is not enough", id="beyond-rounding"),
    pytest.param(replace(S, rises={30: 1e-3}), "undecided", "one seed is not enough", id="one-step-beyond-rounding"),
]


@pytest.mark.parametrize(("variant", "answer", "words"), EQUAL)
@pytest.mark.parametrize("precision", ["fp32", full("bf16")])
def test_one_seed_shows_a_setting_without_effect(
    variant: Story, answer: str, words: str, precision: str, tmp_path: Path
) -> None:
    found = compare_made(tmp_path, ([S], (f"precision={precision}",)), ([variant], (WD, f"precision={precision}")))
    assert qualities(found)["the end"].answer == answer and words in qualities(found)["the end"].text
    lead = " ".join(format_lead(found))
    assert ("equal to rounding" in lead) == (answer == "no"), lead


@pytest.mark.full
@pytest.mark.parametrize(("steps", "answer"), [(1, "undecided"), (5, "undecided"), (6, "no")])
def test_losses_before_the_updates_show_no_setting_without_effect(steps: int, answer: str, tmp_path: Path) -> None:
    story = replace(S, steps=steps)
    found = compare_made(tmp_path, ([story], ("optimizer=adamw",)), ([story], ("optimizer=sgd",)))
    quality = qualities(found)["the end"]
    assert quality.answer == answer
    words = f"inconclusive: all losses are bitwise equal, in 1 pair, but of {steps} step"
    assert (quality.text.startswith(words) and quality.text.endswith("give training.steps=6 or more")) == (steps < 6)
    assert "no difference" not in " ".join(format_lead(found)) or steps == 6


def test_repeats_of_a_seed_are_no_repetition(tmp_path: Path) -> None:
    repeats = [replace(S, repeat=r, level=2.9 + r / 1000) for r in range(4)]
    found = qualities(compare_made(tmp_path, ([S], ()), (repeats, (WD,))))["the end"]
    assert (found.pairs, found.p) == (1, None)
    assert found.difference is not None and found.difference.estimate == pytest.approx(-0.0985)


@pytest.mark.full
def test_holms_correction_is_over_the_variants(tmp_path: Path) -> None:
    near = make_seeds(-0.03, 0.008, -0.035, 0.0)
    variants = [(near, (f"optimizer.weight_decay=0.{n}",)) for n in (2, 3, 4, 5)]
    alone = qualities(compare_made(tmp_path / "alone", (BASE, ()), variants[0]))["the end"]
    assert alone.answer == "yes" and alone.p == alone.p_holm and alone.p is not None
    several = compare_made(tmp_path / "several", (BASE, ()), *variants)
    for variant in (1, 2, 3, 4):
        found = qualities(several, variant)["the end"]
        assert found.answer == "undecided" and found.p_holm == pytest.approx(4 * alone.p)


def test_one_seed_each_that_is_not_the_same_says_nothing(tmp_path: Path) -> None:
    found = qualities(compare_made(tmp_path, (make_seeds(0.0), ()), ([replace(S, seed=7)], (WD,))))["the end"]
    assert found.difference is None and "no seed in common" in found.text


@pytest.mark.full
def test_an_unfinished_decay_is_not_ranked(tmp_path: Path) -> None:
    half = [replace(story, attempts=(StoryAttempt(0, 30),), level=2.0) for story in BASE]
    found = compare_made(tmp_path, (BASE, ()), (half, (WD,)))
    ends = qualities(found)
    assert ends["the end"].difference is None and "unfinished runs are not ranked" in ends["the end"].text
    on_the_way = ends["equal tokens"]
    assert on_the_way.answer == "undecided" and "not ranked" in on_the_way.text and on_the_way.p is None
    assert f"at {30 * 128:,} tokens" in on_the_way.text
    assert on_the_way.difference is not None and on_the_way.difference.estimate == pytest.approx(-1.005, abs=1e-6)
    assert found.variants[1].validation is None
    assert any("4 of 4 runs not finished" in note for note in found.variants[1].notes)


@pytest.mark.full
def test_more_tokens_are_named_and_compared_at_equal_ones(tmp_path: Path) -> None:
    longer = [replace(story, steps=80) for story in BASE]
    found = compare_made(tmp_path, (BASE, ()), (longer, ()))
    ends = qualities(found)
    assert f"after {80 * 128:,} tokens (baseline: {40 * 128:,})" in ends["the end"].text
    assert "not ranked" in ends["the end"].text
    assert (
        "the variant took 91% more device-hours: run the variant with training.steps=41"
        in ends["equal device-hours"].text
    )
    assert found.variants[1].quality[0] is ends["equal tokens"] and ends["equal tokens"].answer == "yes"
    assert f"at {40 * 128:,} tokens, where the longer runs were 50% through" in ends["equal tokens"].text


def timed(base: list[Story], seconds: float, level: float, step: float = 0.0002) -> list[Story]:
    """Stories of the same seeds whose steps take so many times as long; each comes to another level."""
    return [replace(s, seconds=s.seconds * seconds, level=level + step * s.seed) for s in base]


EVEN, MANY = make_seeds(0, 0.0001, 0, 0), make_seeds(*[0.0001 * n for n in range(9)])
BLIND = [replace(story, every=0) for story in BASE]
CUT = [replace(s, attempts=(StoryAttempt(0, 10),)) if s.seed < 5 else s for s in timed(MANY, 1.5, 2.96, 0.0001)]
HOURS = [
    pytest.param(EVEN, timed(EVEN, 0.8, 2.9), "better: .* with 18% fewer device-hours .* p ", id="less"),
    pytest.param(EVEN, timed(EVEN, 1.25, 3.1), "worse: .* with 23% more device-hours .* p ", id="more"),
    pytest.param(
        EVEN, timed(EVEN, 1.25, 2.9),
        r"better: .* by -0.08\d+ nats where the variant had taken as many device-hours .*23% more", id="slower",
    ),
    pytest.param(
        EVEN, timed(EVEN, 0.8, 3.1),
        r"worse: .* by \+0.08\d+ nats where the baseline had taken as many device-hours .*22% more", id="faster",
    ),
    pytest.param(EVEN, timed(EVEN, 1.25, 2.988), "no difference: .* smaller than the equivalence margin", id="small"),
    pytest.param(
        EVEN, timed(EVEN, 1.5, 2.96),
        r"inconclusive: .* took 4\d% more device-hours: run the variant with training.steps=2\d$", id="two-signs",
    ),
    pytest.param(EVEN, timed(EVEN, 1.01, 2.9), r"better: validation loss differs by \S+ nats \[", id="alike"),
    pytest.param(
        EVEN, [replace(s, every=20 * (s.seed != 2)) for s in timed(EVEN, 1.25, 2.9)],
        "better: .* more in all; without seed 2, whose evaluations do not span that time.* over 3 pairs",
        id="one-blind",
    ),
    pytest.param(MANY, CUT, "inconclusive: (?!.*fewer device-hours)", id="of-the-runs-that-are-ranked"),
    pytest.param(
        BLIND, timed(BLIND, 1.25, 2.9, 0.0), "inconclusive: .*run the variant with training.steps=32$", id="all-blind"
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("base", "other", "expected"), HOURS)
def test_unequal_time_is_ranked_by_bounds(base: list[Story], other: list[Story], expected: str, tmp_path: Path) -> None:
    end = qualities(compare_made(tmp_path, (base, ()), (other, (WD,))))["equal device-hours"]
    assert re.search(expected, end.text), end.text
    answers = {"better": "yes", "worse": "yes", "no difference": "no", "inconclusive": "undecided"}
    assert end.answer == answers[expected.split(":")[0]] and end.needed is None


@pytest.mark.full
def test_the_budget_of_a_sweep_decides(tmp_path: Path) -> None:
    shorter = [replace(story, steps=20, seconds=story.seconds * 2, level=2.9) for story in BASE]
    for budget, other, at in (
        ("flops", BASE, "equal FLOPs"), ("flops", shorter, "equal tokens"), ("time", shorter, "equal device-hours"),
        ("steps", shorter, "equal tokens"),
    ):  # fmt: skip
        root = tmp_path / f"{budget}-{other[0].steps}"
        trials = {}
        for letter, stories, overrides in (("a", BASE, ()), ("b", other, (WD,))):
            for index, story in enumerate(stories):
                make_run(root / f"{letter}{index}", story, *overrides)
                trials[f"{letter}{index}"] = (*overrides, f"training.seed={story.seed}")
        make_sweep(root, SweepSpec(budget=budget), trials)
        found = compare([root])
        assert found.budget == budget
        (verdict, *_) = found.variants[1].quality
        assert verdict.at == at


@pytest.mark.full
def test_no_difference_in_more_time_is_not_equality(tmp_path: Path) -> None:
    other = [
        replace(story, seconds=story.seconds * 2, level=story.level + 0.001 * (-1) ** story.seed) for story in BASE
    ]
    ends = qualities(compare_made(tmp_path, (BASE, ()), (other, (WD,))))
    assert ends["the end"].answer == "no" and ends["equal device-hours"].answer != "no"


@pytest.mark.full
def test_equal_device_hours_at_the_end_are_ranked(tmp_path: Path) -> None:
    faster = [replace(story, steps=80, seconds=S.seconds / 2, level=2.9) for story in BASE]
    found = qualities(compare_made(tmp_path, (BASE, ()), (faster, ())))
    assert found["equal device-hours"].answer == "yes" and found["the end"].answer == "undecided"


@pytest.mark.full
def test_device_hours_on_other_hardware_are_not_compared(tmp_path: Path) -> None:
    other = [replace(story, device=H200 | {"name": "AMD MI300X"}) for story in BASE]
    found = compare_made(tmp_path, (BASE, ()), (other, (WD,)))
    assert set(qualities(found)) == {"the end"}
    assert any("different hardware: AMD MI300X" in note for note in found.variants[1].notes)
    assert any(note.startswith("different hardware") for note in found.notes)


MEASURES = [
    pytest.param((), (WD,), "d", "validation loss", id="the-same-tokens"),
    full((), ("training.seq_len=32",), "d", "bits per byte", id="other-rows"),
    pytest.param((), ("dataset.tokenizer=other",), "e", "bits per byte", id="another-tokenizer"),
    full((), ("dataset.seed=5",), "e", None, id="other-text"),
    full((), ("dataset.validation=0.02",), "e", None, id="another-share-held-out"),
    full((), (WD, "evaluation.tokens=512"), "d", None, id="fewer-tokens"),
    pytest.param((), (WD,), "e", None, id="the-same-settings-of-other-files"),
]


@pytest.mark.full
@pytest.mark.parametrize(("one", "two", "digest", "measure"), MEASURES)
def test_by_what_variants_are_compared(
    one: tuple[str, ...], two: tuple[str, ...], digest: str, measure: str | None, tmp_path: Path
) -> None:
    others = [replace(story, digest=digest * 64) for story in make_seeds(-0.1, -0.09, -0.11, -0.1)]
    found = qualities(compare_made(tmp_path, (BASE, one), (others, two)))["the end"]
    if measure is None:
        assert found.difference is None and "validation sets are different texts" in found.text
        return
    assert found.measure == measure and found.difference is not None
    assert found.difference.estimate == pytest.approx(-0.105 * (0.4 if measure == "bits per byte" else 1))


@pytest.mark.full
def test_each_source_of_a_mixture(tmp_path: Path) -> None:
    sources = {"web": 0.0, "code": 0.1}
    other = {"web": 0.02, "code": 0.05}
    variants = [[replace(story, sources=s) for story in BASE] for s in (sources, other)]
    found = qualities(compare_made(tmp_path, (variants[0], ()), (variants[1], (WD,))))["the end"].by_source
    assert {name: round(each.estimate, 6) for name, each in found.items()} == {"web": 0.02, "code": -0.05}


def rated(rate: str, *levels: float, more: tuple[str, ...] = ()) -> tuple[list[Story], tuple[str, ...]]:
    return make_seeds(*levels), (f"optimizer.lr={rate}", *more)


@pytest.mark.full
def test_the_best_of_several_learning_rates_speaks_for_its_variant(tmp_path: Path) -> None:
    found = compare_made(
        tmp_path,
        rated("1e-3", 0.3, 0.3),
        rated("3e-3", 0.1, 0.11),
        rated("1e-2", 0.2, 0.2),
        rated("1e-3", 0.0, 0.01, more=(WD,)),
        rated("3e-3", 0.05, 0.05, more=(WD,)),
    )
    variants = {variant.label: variant for variant in found.variants}
    best = "best of 3 learning rates (0.001, 0.003, 0.01), selected by these same runs"
    assert variants["lr=0.003 weight_decay=0.1"].notes[0] == best
    assert "lowest or highest" in variants["lr=0.001 weight_decay=0.2"].notes[0]
    assert [label for label, variant in variants.items() if variant.quality] == ["lr=0.001 weight_decay=0.2"]
    end = variants["lr=0.001 weight_decay=0.2"].quality[0]
    assert end.difference is not None and end.difference.estimate == pytest.approx(
        -0.1
    )  # against the best of the other
    assert found.variants[0].label == "lr=0.003 weight_decay=0.1" and found.variants[0].baseline
    assert "the baseline is lr=0.003 weight_decay=0.1: the best of its 3 learning rates" in found.notes
    assert "rates is 0.001" in variants["lr=0.003 weight_decay=0.2"].notes[0]


@pytest.mark.full
def test_a_sweep_of_learning_rates_alone_compares_them(tmp_path: Path) -> None:
    found = compare_made(tmp_path, rated("1e-3", 0.3, 0.3), rated("3e-3", 0.1, 0.11))
    assert found.variants[1].quality and not any("tuned" in note or "best" in note for note in found.variants[1].notes)


@pytest.mark.full
def test_a_variant_with_one_learning_rate_says_that_it_is_not_tuned(tmp_path: Path) -> None:
    found = compare_made(tmp_path, (BASE, ()), (BASE, (WD,)))
    assert all("learning rate not tuned" in variant.notes for variant in found.variants)


def reached(variant: Variant) -> tuple[int, int, float | None]:
    assert variant.reached is not None
    return variant.reached.runs, variant.reached.reached, variant.reached.median_tokens


@pytest.mark.full
def test_the_time_to_a_target_is_censored(tmp_path: Path) -> None:
    make_run(tmp_path / "early", replace(S, seed=0, level=2.0))
    make_run(tmp_path / "middle", replace(S, seed=1, level=2.4))
    make_run(tmp_path / "never", replace(S, seed=2, level=4.0))
    make_run(tmp_path / "unfinished", replace(S, seed=3, level=4.0, attempts=(StoryAttempt(0, 10),)))
    found = {target: reached(compare([tmp_path], target=target).variants[0]) for target in (2.3, 2.6, 4.2)}
    assert found[2.3] == (4, 1, None)
    assert found[2.6][:2] == (4, 2) and found[4.2] == (4, 3, 10 * 128)
    losses = [2.4 + 2 * math.exp(-5 * step / 40) for step in (10, 20)]  # of the run that comes there between these
    between = 10 + 10 * (losses[0] - 2.6) / (losses[0] - losses[1])
    assert found[2.6][2] == pytest.approx(between * 128)
    assert compare([tmp_path]).variants[0].reached is None


def test_a_target_in_nats_is_none_for_other_tokens(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    make_run(tmp_path / "b", S, "training.seq_len=32")
    found = compare([tmp_path], target=4.0)
    assert found.variants[0].reached is not None and found.variants[1].reached is None


@pytest.mark.full
def test_a_failed_run_does_not_draw_equal_tokens_to_its_end(tmp_path: Path) -> None:
    longer = [replace(story, steps=80) for story in BASE[:2]]
    failed = replace(S, seed=2, steps=80, attempts=(StoryAttempt(0, 10),))
    compare_made(tmp_path, (BASE, ()), ([*longer, failed], (WD,)))
    write_failure(tmp_path / "b2", "not finite")
    found = qualities(compare([tmp_path]))["equal tokens"]
    assert f"at {40 * 128:,} tokens" in found.text and found.pairs == 2
