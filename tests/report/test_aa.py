"""Comparisons of equals find nothing more often than they may, and a difference with the seeds told beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.made_runs import INJECTED, NEUTRAL, Story, find_end_quality, make_run
from tests.support.tiers import full
from tests.support.unlucky_report import SCENES, DivergenceScene, VerdictShares, make_templates, simulate_comparisons
from titan.report.comparison import compare
from titan.report.statistics import compare_seeds, compute_seeds_needed

SPREAD = 0.02
"""Standard deviation of the final loss over seeds."""


def story(seed: int, level: float = 3.0) -> Story:
    return Story(seed=seed, steps=12, every=0, spread=SPREAD, level=level)


@pytest.mark.full
def test_of_20_comparisons_of_equals_at_most_one_finds_a_difference(tmp_path: Path) -> None:
    answers = []
    for number in range(20):
        for seed in range(4):
            make_run(tmp_path / f"{number}/a{seed}", story(8 * number + seed))
            make_run(tmp_path / f"{number}/b{seed}", story(8 * number + 4 + seed), NEUTRAL)
        answers.append(find_end_quality(compare([tmp_path / str(number)])).answer)
    assert answers.count("yes") <= 1


@pytest.mark.parametrize("paired", [full(True, id="pairs"), full(False, id="independent")])
def test_equals_are_told_apart_in_five_of_a_hundred(paired: bool) -> None:
    random, found = np.random.default_rng(0), 0
    for _ in range(2000):
        variant, baseline = random.normal(3, SPREAD, (2, 4))
        seeds = compare_seeds(dict(enumerate(variant)), {i if paired else i + 4: v for i, v in enumerate(baseline)})
        assert seeds is not None and seeds.paired == paired
        found += (seeds.difference.compute_p_value() or 0) < 0.05
    assert 0.035 < found / 2000 < 0.06


@pytest.mark.full
def test_an_injected_difference_is_found_with_the_seeds_told_beforehand(tmp_path: Path) -> None:
    for seed in range(8):
        make_run(tmp_path / f"a{seed}", story(seed))
    told = [note for note in compare([tmp_path], margin=INJECTED).notes if "seeds per variant" in note]
    needed = int(re.findall(r"takes (\d+) seeds", told[0])[0])
    assert 4 <= needed <= 8
    for seed in range(needed):
        make_run(tmp_path / f"b{seed}", story(100 + seed, 3 + INJECTED), NEUTRAL)
    found = find_end_quality(compare([tmp_path]))
    assert found.answer == "yes"
    assert found.difference is not None and found.difference.low is not None and found.difference.high is not None
    assert found.difference.low < INJECTED < found.difference.high


@pytest.mark.full
def test_the_seeds_told_find_it_as_often_as_promised() -> None:
    random, found = np.random.default_rng(1), 0
    needed = compute_seeds_needed(INJECTED, np.sqrt(2) * SPREAD)
    assert needed is not None
    for _ in range(1000):
        variant, baseline = random.normal(3 + INJECTED, SPREAD, needed), random.normal(3, SPREAD, needed)
        seeds = compare_seeds(dict(enumerate(variant)), dict(enumerate(baseline)))
        found += seeds is not None and (seeds.difference.compute_p_value() or 0) < 0.05
    assert found / 1000 > 0.77


def rates_of(scene: DivergenceScene, repetitions: int, folder: Path) -> VerdictShares:
    return simulate_comparisons(make_templates(folder, scene.seeds), scene, repetitions)


SHARES = ("sixth", "half")


@pytest.mark.full
@pytest.mark.parametrize(
    ("scene", "repetitions"),
    [
        *(pytest.param(SCENES[f"both lose a {share}"], 150, id=f"both lose a {share}-sample") for share in SHARES),
        *(full(scene, 2000, id=f"{name}-many") for name, scene in SCENES.items()),
    ],
)
def test_a_variant_that_loses_its_unlucky_seeds_is_no_better_for_it(
    scene: DivergenceScene, repetitions: int, tmp_path: Path
) -> None:
    assert rates_of(scene, repetitions, tmp_path).better <= 0.05


@pytest.mark.full
def test_survivors_alone_would_look_better(tmp_path: Path) -> None:
    assert rates_of(SCENES["the variant alone loses a half"], 300, tmp_path).survivors > 0.08
