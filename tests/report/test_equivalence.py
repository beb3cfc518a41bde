"""Variants of one science: yes, no or undecided, and for which reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.made_runs import Story, StoryAttempt, compare_made, make_run, read_lines, write_lines
from tests.support.made_weights import write_checkpoint
from titan.report.comparison import compare
from titan.report.equivalence import ANSWER_WORDS
from titan.report.findings import Learning

SINGLE, FSDP, BF16 = "parallelism=single", "parallelism=fsdp", "precision=bf16"
S = Story()


def learning(
    tmp_path: Path, baseline: list[Story], variant: list[Story], *overrides: str, margin: float = 0.02
) -> Learning:
    variants = (baseline, (SINGLE, *overrides)), (variant, (FSDP, *overrides))
    found = compare_made(tmp_path / "runs", *variants, margin=margin)
    assert [variant.label for variant in found.variants] == [SINGLE, FSDP] and found.variants[0].learning is None
    assert found.variants[1].learning is not None and not found.variants[1].quality
    return found.variants[1].learning


def seeds(*offs: float, story: Story = S) -> list[Story]:
    """A story a seed, each off by so much in the end."""
    return [replace(story, seed=seed, off=off) for seed, off in enumerate(offs)]


THREE = seeds(0, 0, 0)
CASES = [
    pytest.param([S], [S], "yes", "all losses are bitwise equal, in 1 pair", id="the-same-bits"),
    pytest.param(THREE, seeds(0.001, -0.001, 0.002), "yes", "margin 0.02", id="equivalent"),
    pytest.param(THREE, seeds(0.1, 0.101, 0.099), "no", "differs by +0.1000 nats", id="beyond-the-margin"),
    pytest.param(THREE, seeds(0.03, -0.02, 0.01), "undecided", "would decide", id="too-noisy"),
    pytest.param(THREE, seeds(0.021, 0.029, 0.016), "undecided", "unlikely to show equivalence", id="about-the-margin"),
    pytest.param([S], [replace(S, off=1e-4)], "undecided", "at least 2 pairs are needed", id="one-pair"),
    pytest.param(
        [S],
        [replace(S, first_off=1 + 3e-7)],
        "yes",
        "all losses are equal to rounding (relative differences up to 3.0e-07), in 1 pair",
        id="one-pair-equal-to-rounding",
    ),
    pytest.param(
        [S], [replace(S, rises={30: 1e-4})], "undecided", "at least 2 pairs are needed", id="one-step-beyond-rounding"
    ),
    pytest.param(
        [S],
        [replace(S, first_off=1 + 3e-7, attempts=(StoryAttempt(0, 30),))],
        "undecided",
        "no pair of runs has finished",
        id="equal-to-rounding-and-unfinished",
    ),
    pytest.param(
        [replace(S, steps=1)],
        [replace(S, steps=1)],
        "undecided",
        "all losses are bitwise equal, in 1 pair, but of 1 step only, of which the first one precedes all updates; "
        "give training.steps=6 or more",
        id="the-same-bits-before-any-update",
    ),
    pytest.param(
        [replace(S, steps=5)],
        [replace(S, steps=5, first_off=1 + 3e-7)],
        "undecided",
        "equal to rounding (relative differences up to 3.0e-07), in 1 pair, but of 5 steps only",
        id="too-few-steps-equal-to-rounding",
    ),
    pytest.param(
        [replace(S, steps=6)], [replace(S, steps=6)], "yes", "bitwise equal, in 1 pair", id="the-same-bits-of-six-steps"
    ),
    pytest.param(
        [S], [replace(S, batches=9)], "no", "batches differ (40 of 40 steps, the first is step 1)", id="other-batches"
    ),
    pytest.param([S], [replace(S, first_off=1 + 3e-5)], "no", "its loss differs by 3.0e-05", id="first-steps"),
    pytest.param(
        [S], [replace(S, attempts=(StoryAttempt(0, 30),))], "undecided", "no pair of runs has finished", id="unfinished"
    ),
    pytest.param(
        [S], [replace(S, attempts=(StoryAttempt(0, 9),), batches=9)], "no", "9 of 9 steps", id="unfinished-and-wrong"
    ),
    pytest.param([S], [replace(S, seed=1)], "undecided", "no seed in common", id="no-pair"),
]


@pytest.mark.parametrize(("baseline", "variant", "answer", "words"), CASES)
def test_whether_an_variant_learns_the_same(
    baseline: list[Story], variant: list[Story], answer: str, words: str, tmp_path: Path
) -> None:
    found = learning(tmp_path, baseline, variant)
    assert found.answer == answer and found.text.startswith(f"{ANSWER_WORDS[answer]}: ") and words in found.text


@pytest.mark.parametrize(
    ("change", "answer"), [pytest.param(9e-4, "undecided", id="little"), pytest.param(2e-3, "yes", id="much")]
)
def test_losses_that_have_not_changed_show_nothing(change: float, answer: str, tmp_path: Path) -> None:
    for name, layout in (("a", SINGLE), ("b", FSDP)):
        write_losses(make_run(tmp_path / name, S, layout), np.linspace(3, 3 * (1 - change), 40).tolist())
    found = compare([tmp_path]).variants[1].learning
    assert found is not None and found.answer == answer
    assert ("but the losses have changed by 9.0e-04 (relative) only; give more training.steps" in found.text) == (
        answer == "undecided"
    )


def write_losses(run: Path, losses: Sequence[float]) -> None:
    by_step = dict(enumerate(losses, 1))
    write_lines(run, [line | ({"loss": by_step[line["step"]]} if "loss" in line else {}) for line in read_lines(run)])


COMMANDS = [
    pytest.param([S], [replace(S, batches=9)], 1, id="other-batches"),
    pytest.param([S], [replace(S, rises={4: 0.5})], 4, id="first-steps"),
    pytest.param(THREE, seeds(0.1, 0.101, 0.099), 6, id="beyond-the-margin"),
    pytest.param([S], [S], None, id="the-same"),
    pytest.param([S], [replace(S, off=1e-4)], None, id="inconclusive"),
]


@pytest.mark.parametrize(("baseline", "variant", "step"), COMMANDS)
def test_the_command_repeats_the_first_step_that_differs(
    baseline: list[Story], variant: list[Story], step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = "" if step == 1 else " start=0"  # made runs have no checkpoints
    expected = f"python -m titan.replay runs/b0 against=runs/a0 step={step}{start}" if step else ""
    assert learning(tmp_path, baseline, variant).command == expected


def test_the_command_begins_at_a_checkpoint_before_the_step(tmp_path: Path) -> None:
    assert learning(tmp_path, [S], [replace(S, rises={4: 0.5})]).command.endswith("step=4 start=0")
    for name, step in (("a0", 3), ("b0", 4)):
        write_checkpoint(tmp_path / "runs" / name, step)
    assert read_command(tmp_path).endswith("step=4 start=0")
    write_checkpoint(tmp_path / "runs" / "b0", 2)
    assert read_command(tmp_path).endswith("step=4")


def read_command(tmp_path: Path) -> str:
    variant = compare([tmp_path / "runs"]).variants[1].learning
    assert variant is not None
    return variant.command


@pytest.mark.full
@pytest.mark.parametrize(
    ("first_off", "answer"),
    [pytest.param(1 + 3e-4, "undecided", id="rounding"), pytest.param(1.1, "no", id="a-wrong-gradient")],
)
def test_bf16_may_differ_by_more_in_the_first_steps(first_off: float, answer: str, tmp_path: Path) -> None:
    assert learning(tmp_path, [S], [replace(S, first_off=first_off)], BF16).answer == answer


def test_the_figures_that_decided(tmp_path: Path) -> None:
    found = learning(tmp_path, THREE, seeds(0.001, -0.001, 0.003))
    assert (found.batches_equal, found.pairs, found.margin, found.needed) == (True, 3, 0.02, None)
    assert found.first_loss_gap == found.first_norm_gap == 0
    assert found.difference is not None and found.difference.level == pytest.approx(0.9)
    assert found.difference.estimate == pytest.approx(0.001)


def test_the_margin_decides(tmp_path: Path) -> None:
    assert learning(tmp_path, THREE, seeds(0.1, 0.101, 0.099), margin=0.2).answer == "yes"


def test_repeats_of_the_baseline_tell_how_many_pairs_one_pair_lacks(tmp_path: Path) -> None:
    repeats = [replace(S, repeat=r, off=off) for r, off in enumerate((0.0, 0.01, -0.01, 0.005))]
    found = learning(tmp_path, repeats, [replace(S, off=0.004)])
    assert found.answer == "undecided" and found.needed is not None and 3 <= found.needed <= 8
    assert f"at least 2 pairs are needed, {(found.needed or 0) - 1} more pairs (95% range " in found.text


def test_repeats_make_pairs(tmp_path: Path) -> None:
    repeats = [replace(S, repeat=r, off=1e-4 * r) for r in range(3)]
    found = learning(
        tmp_path, repeats, [replace(story, off=story.off + 1e-4 * (r - 1)) for r, story in enumerate(repeats)]
    )
    assert (found.answer, found.pairs) == ("yes", 3)


def test_a_loss_that_is_not_finite_on_one_side_is_a_difference(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    lines = read_lines(make_run(tmp_path / "b", S, FSDP))
    lines[1]["loss"] = None
    write_lines(tmp_path / "b", lines)
    found = compare([tmp_path]).variants[1].learning
    assert found is not None and found.answer == "no" and "differs by inf" in found.text


def test_without_validation_the_end_of_training_is_compared(tmp_path: Path) -> None:
    for name, layout, off in (("a", SINGLE, 0.0), ("b", FSDP, 0.001)):
        for seed in range(2):
            run = make_run(tmp_path / f"{name}{seed}", replace(S, seed=seed, off=off * (1 + seed / 9)), layout)
            write_lines(run, [line for line in read_lines(run) if "validation_loss" not in line])
            (run / "result.json").write_text(json.dumps({"finished": True, "step": 40, "attempt": 1}))
    found = compare([tmp_path]).variants[1].learning
    assert found is not None and found.answer == "yes" and "final training loss" in found.text


@pytest.mark.full
def test_other_validation_rows_are_not_compared(tmp_path: Path) -> None:
    variants = (seeds(0, 0), ()), (seeds(1e-3, 1.1e-3), ("evaluation.tokens=512",))
    found = compare_made(tmp_path, *variants).variants[1].learning
    assert found is not None and found.answer == "yes" and "final training loss" in found.text
