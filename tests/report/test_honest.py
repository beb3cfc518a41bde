"""What a comparison must not claim: of runs done twice, continued, diverged, of other versions, not begun, or few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

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
from tests.support.shown_report import make_comparison, make_quality, make_variant, show_text
from titan.metrics import svg
from titan.report.collect import collect_runs
from titan.report.comparison import compare
from titan.report.findings import Variant
from titan.report.render import sentences
from titan.sweep import job_exit
from titan.sweep.ledger import SweepSpec

S = Story()
SINGLE, FSDP = "parallelism=single", "parallelism=fsdp"


def rewritten(run: Path, number: int, **changes: Any) -> Path:
    """A run of which a document in run.yaml is changed; None takes a key away."""
    documents = list(yaml.safe_load_all((run / "run.yaml").read_text()))
    for name, value in changes.items():
        *path, last = name.split("__")
        at = documents[number]
        for key in path:
            at = at[key]
        at.pop(last) if value is None else at.update({last: value})
    (run / "run.yaml").write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return run


def held(tmp_path: Path, stories: Sequence[Story], *overrides: str, against: Sequence[Story] = (S,)) -> Variant:
    return compare_made(tmp_path, (against, ()), (stories, overrides)).variants[1]


def test_runs_done_twice_are_one_pair(tmp_path: Path) -> None:
    learning = held(tmp_path, [replace(S, off=0.01)] * 2, FSDP).learning
    assert learning is not None and (learning.answer, learning.pairs) == ("undecided", 1)


def test_of_a_seed_run_twice_the_run_that_ended_is_paired(tmp_path: Path) -> None:
    unfinished = replace(S, attempts=(StoryAttempt(0, 10),))
    learning = held(tmp_path, [S], FSDP, against=[unfinished, S]).learning
    assert learning is not None and (learning.answer, learning.pairs) == ("yes", 1)


def test_repeats_with_the_very_same_losses_count_once(tmp_path: Path) -> None:
    repeats = [replace(S, repeat=r) for r in range(2)]
    learning = held(tmp_path, [replace(story, off=0.01) for story in repeats], FSDP, against=repeats).learning
    assert learning is not None and (learning.answer, learning.pairs) == ("undecided", 1)
    assert "repeats with bitwise equal losses count once" in learning.text


def test_a_final_loss_that_is_not_finite_is_not_replaced_by_another_figure(tmp_path: Path) -> None:
    stories = [replace(S, seed=seed, off=1e-4 * (seed + 1)) for seed in range(2)]
    held(tmp_path, stories, FSDP, against=[replace(S, seed=seed) for seed in range(2)])
    for seed in range(2):
        spoilt(tmp_path / f"b{seed}", 40, "validation_loss")
    variant = compare([tmp_path]).variants[1]
    assert variant.learning is not None and variant.learning.answer == "undecided"
    assert "of 2 pairs, 2 diverged in this variant only" in variant.learning.text
    assert any(note.startswith("2 of 2 runs diverged (seed 0 at step 40") for note in variant.notes)


def spoilt(run: Path, step: int, *keys: str) -> None:
    """Let a run's lines from a step on have no finite value of some keys."""
    lines = read_lines(run)
    for line in lines:
        line.update({key: math.nan for key in keys if key in line and line["step"] >= step})
    write_lines(run, lines)


def test_steps_that_were_not_finite_are_told(tmp_path: Path) -> None:
    held(tmp_path, [S], "optimizer.lr=0.1")
    spoilt(tmp_path / "b0", 31, "grad_norm")
    note = "loss or gradient norm not finite in 1 of 1 runs: 10 steps, which did not update the weights"
    assert note in compare([tmp_path]).variants[1].notes


def test_a_run_that_ended_after_such_a_step_says_so(tmp_path: Path) -> None:
    spoilt(make_run(tmp_path / "a", replace(S, attempts=(StoryAttempt(0, 20),))), 20, "grad_norm")
    assert (
        collect_runs([tmp_path]).runs[0].reason == "it ended after step 20, whose loss or gradient norm is not finite"
    )


def test_a_continued_run_is_of_other_science(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    rewritten(
        make_run(tmp_path / "b", replace(S, attempts=(StoryAttempt(0, 20), StoryAttempt(20, 40)))),
        0,
        config__training__steps=20,
    )
    found = compare([tmp_path])
    assert [variant.label for variant in found.variants] == ["continued_from=no", "continued_from=20"]
    assert not found.variants[1].same_science and found.variants[1].learning is None
    assert any(note.startswith("continued: its schedule had 20 steps") for note in found.variants[1].notes)


def test_a_failed_run_never_comes_to_the_target(tmp_path: Path) -> None:
    make_run(tmp_path / "a", replace(S, level=2.0))
    for seed in (1, 2):
        failed = make_run(tmp_path / f"b{seed}", replace(S, seed=seed, level=4.0, attempts=(StoryAttempt(0, 10),)))
        write_failure(failed, "steps in a row without finite values")
    reached = compare([tmp_path], target=2.3).variants[0].reached
    assert reached is not None and (reached.reached, reached.runs, reached.median_tokens) == (1, 3, None)


def test_variants_without_any_speed_have_no_note_of_it(tmp_path: Path) -> None:
    variant = held(tmp_path, [replace(S, attempts=(StoryAttempt(0, 2),))], "optimizer.lr=0.1")
    assert variant.speed_ratio is None and not variant.few and not any("speed ratio" in note for note in variant.notes)


def test_few_runs_are_neither_faster_nor_slower(tmp_path: Path) -> None:
    variant = held(tmp_path, [replace(S, seconds=0.2)] * 2, "optimizer.lr=0.1", against=[S] * 3)
    assert variant.few and variant.speed_ratio is not None and variant.speed_ratio.low is None
    said = sentences.describe_speed(variant.speed_ratio, variant.speed_doubt)
    assert said.startswith("Speed is not ranked (fewer than 3 runs of a variant): 2.")


@pytest.mark.full
def test_as_many_seeds_as_are_said_to_decide_hold_after_holms_correction(tmp_path: Path) -> None:
    near = make_seeds(-0.045, 0.002, -0.05, -0.01)
    others = [(near, (f"optimizer.weight_decay=0.{variant}",)) for variant in (2, 3, 4, 5)]
    found = compare_made(tmp_path, (make_seeds(0.0, 0.02, -0.01, 0.01), ()), *others).variants[1].quality[0]
    assert found.answer == "undecided" and found.p is not None and found.p < 0.05
    assert found.needed is not None and found.needed > found.pairs


@pytest.mark.full
def test_the_variant_that_others_are_compared_with_is_the_baseline(tmp_path: Path) -> None:
    variants = (
        (0.3, ("optimizer.lr=1e-3",)), (0.1, ("optimizer.lr=3e-3",)), (0.3, ("optimizer.lr=1e-3", FSDP)),
        (0.0, ("optimizer.lr=1e-3", "optimizer.weight_decay=0.2")),
    )  # fmt: skip
    made = [(make_seeds(level, level + 0.001), overrides) for level, overrides in variants]
    base, *others = compare_made(tmp_path, *made).variants
    assert base.label == "parallelism=single lr=0.003 weight_decay=0.1" and base.baseline and base.tried == 2
    named = {variant.label: variant for variant in others}
    (layout,) = [variant for label, variant in named.items() if "fsdp" in label]
    assert layout.learning is not None and not layout.same_science
    assert layout.learning.text.startswith("same: compared with parallelism=single lr=0.001 weight_decay=0.1: all")
    assert layout.quality[0].text.startswith("worse: validation loss differs by +0.2")
    assert named["parallelism=single lr=0.001 weight_decay=0.2"].quality[0].text.startswith("better: ")
    exact, *_ = compare([tmp_path], baseline="parallelism=single,lr=1e-3,weight_decay=0.1").variants
    assert exact.label == "parallelism=single lr=0.001 weight_decay=0.1"


@pytest.mark.full
def test_of_learning_rates_that_have_not_come_to_an_end_none_is_best(tmp_path: Path) -> None:
    half, bad = [replace(S, attempts=(StoryAttempt(0, 20),))], "training.bad_steps=2"
    others = [(half, (f"optimizer.lr={rate}", bad)) for rate in ("1e-3", "1e9")]
    variants = compare_made(tmp_path, ([S], ()), *others).variants
    assert all("none of its 2 learning rates has a finished run" in variant.notes for variant in variants[1:])
    assert all(variant.quality for variant in variants[1:])


def test_points_that_have_not_begun_are_no_failures(tmp_path: Path) -> None:
    make_sweep(tmp_path, SweepSpec("?"), {"a": ("optimizer.lr=1000000000.0",), "b": ("optimizer.lr=0.1",)})
    found = compare([tmp_path])
    assert sentences.format_lead(found) == ["No run has metrics.", "2 trials without metrics yet."]
    assert found.failed[0].label == "optimizer.lr=1e9"
    assert "Trials without metrics yet\n- optimizer.lr=1e9" in show_text(found, 160)


def test_a_run_of_another_version_of_titan_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    rewritten(make_run(tmp_path / "bad"), 0, ids__group=None)
    (failed,) = compare([tmp_path]).failed
    assert failed.reason.startswith("its run.yaml has no ids.group")


def test_an_execution_setting_that_an_older_titan_lacked_splits_no_variant(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    rewritten(make_run(tmp_path / "b", replace(S, seed=1)), 0, config__checkpoint__minutes=None)
    (variant,) = compare([tmp_path]).variants
    assert len(variant.runs) == 2


@pytest.mark.full
def test_a_sweeps_baseline_that_fits_several_variants_is_said(tmp_path: Path) -> None:
    asked = SweepSpec(baseline={"parallelism": "single"})
    for name, rate in (("a", "1e-3"), ("b", "3e-3")):
        make_run(tmp_path / name, S, SINGLE, f"optimizer.lr={rate}")
    make_sweep(tmp_path, asked, {"a": (SINGLE, "optimizer.lr=1e-3"), "b": (SINGLE, "optimizer.lr=3e-3")})
    notes = compare([tmp_path]).notes
    assert any("baseline matches 2 variants: the first one found, lr=0.001, is used" in note for note in notes)


@pytest.mark.full
def test_speed_is_of_the_lives_that_used_memory_as_the_last(tmp_path: Path) -> None:
    make_run(tmp_path / "a", replace(S, attempts=(StoryAttempt(0, 20), StoryAttempt(20, 40, ("memory=full",)))))
    (variant,) = compare([tmp_path]).variants
    assert variant.runs[0].speed is not None and variant.runs[0].speed.steps == 17
    assert any("memory or compile settings changed between attempts" in note for note in variant.notes)


def test_as_many_tokens_of_another_tokenizer_are_another_length_of_text(tmp_path: Path) -> None:
    variant = held(tmp_path, [replace(S, digest="e" * 64, ratio=0.5)], "dataset.tokenizer=other")
    assert any(note.startswith("its validation set has 0.80 times the baseline's text") for note in variant.notes)


def test_a_single_validation_is_seen() -> None:
    frame = svg.Frame(svg.Scale(0, 10, 0, 100), svg.Scale(0, 10, 100, 0), 100, 100)
    assert 'points="38.0,50.0 50.0,50.0"' in svg.draw_line(frame, [5], [5], "", "")


def test_better_variants_were_not_compared_with_each_other() -> None:
    variants = [
        make_variant(
            f"x={number}", quality=(replace(make_quality(difference=by), measure=measure),), same_science=False
        )
        for number, (by, measure) in enumerate([(-0.2, "bits per byte"), (-0.1, "bits per byte")])
    ]
    told = " ".join(sentences.format_lead(make_comparison(make_variant("base", baseline=True), *variants)))
    assert told.startswith("Best so far: x=0, bits per byte ")
    assert told.endswith("The better variants were not compared with each other.")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param("2026-11-21T19:01:00+00:00 rank 1 was killed", "rank 1 was killed", id="launcher"),
        pytest.param("2026-11-21 19:01:00,387 INFO built", "INFO built", id="log"),
        pytest.param("step 3 of 2026-11-21", "step 3 of 2026-11-21", id="no-time-at-its-beginning"),
    ],
)
def test_reasons_begin_with_no_time(line: str, text: str) -> None:
    assert job_exit.strip_timestamp(line) == text
