"""Early losses: how they rank the ends, and when stopping by them is offered."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_runs import Story, make_run
from titan.report.comparison import Options, compare
from titan.report.early_stopping import LEAST_VARIANTS, list_shape_settings, rank_early_losses

LOSSES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=12)


@given(LOSSES)
def test_the_correlation_is_that_of_ranks(pairs: list[tuple[int, int]]) -> None:
    """By its definition over pairs of variants: equal values share their mean rank; monotonic changes do nothing."""
    early, ends = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    ranks = [[sum((x > y) + (x == y) / 2 for y in side) for x in side] for side in (early, ends)]
    (a, b), n = ranks, len(pairs)
    covariance = sum((x - n / 2) * (y - n / 2) for x, y in zip(a, b, strict=True))
    norm = (sum((x - n / 2) ** 2 for x in a) * sum((y - n / 2) ** 2 for y in b)) ** 0.5
    found = rank_early_losses(early, ends)
    assert found.correlation == pytest.approx(covariance / norm if norm else 0.0)
    assert rank_early_losses([x**3 for x in early], [7 * y + 1 for y in ends]) == found


@given(st.permutations(range(9)), st.floats(0.1, 0.9))
def test_the_worst_half_stops(order: list[int], share: float) -> None:
    found = rank_early_losses([float(k) for k in order], [float(k) for k in range(9)], share)
    assert found.saved == pytest.approx(4 / 9 * (1 - share))
    assert found.keeps_best == (order[0] < 5)


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (["dataset.weights.code", "parallelism", "layout"], []),
        (["optimizer.lr", "dataset.seed"], ["optimizer.lr"]),
        (["schedule", "training.global_batch"], ["schedule", "training.global_batch"]),
        (["training.steps", "model.dim", "precision"], ["training.steps", "model.dim", "precision"]),
    ],
    ids=["data", "lr", "schedule-and-batch", "steps-size-precision"],
)
def test_what_changes_the_shape_of_the_curve(names: list[str], shapes: list[str]) -> None:
    assert list_shape_settings(dict.fromkeys(names)) == shapes


def find_note(folder: Path, settings: list[str], levels: list[float], **story: float) -> str:
    """The note of a comparison of runs with one setting each, which end `levels` above each other."""
    for number, (setting, level) in enumerate(zip(settings, levels, strict=True)):
        make_run(folder / f"r{number}", Story(level=level, noise=0.0, seed=5, **story), setting)  # type: ignore[arg-type]
    notes = compare([folder], Options()).notes
    return next((note for note in notes if "early losses" in note), "")


LEVELS = [3.0 + 0.01 * k for k in range(LEAST_VARIANTS)]
WINDOWS = [f"dataset.window={1000 * k}" for k in range(1, 1 + LEAST_VARIANTS)]
RATES = [f"optimizer.lr={k}e-3" for k in range(1, 1 + LEAST_VARIANTS)]


@pytest.mark.parametrize(
    ("settings", "levels", "words"),
    [
        pytest.param(
            WINDOWS, LEVELS, "do: 1.00 (rank correlation); stopping the worst half there would have saved 30 %"
        ),
        pytest.param(
            RATES, LEVELS, "differ in optimizer.lr, which changes the shape of the curve, so", marks=pytest.mark.full
        ),
        pytest.param(WINDOWS[:-1], LEVELS[:-1], "", marks=pytest.mark.full),
    ],
    ids=["offered", "not-with-rates", "too-few"],
)
def test_the_sentence(settings: list[str], levels: list[float], words: str, tmp_path: Path) -> None:
    note = find_note(tmp_path, settings, levels)
    assert words in note and bool(words) == bool(note)


@pytest.mark.full
def test_early_losses_that_mislead_offer_nothing(tmp_path: Path) -> None:
    """Variants that cross after the point: the best end is the worst early."""
    for number, (setting, level) in enumerate(zip(WINDOWS, LEVELS, strict=True)):
        rises = dict.fromkeys(range(1, 17), 1.0 - 0.1 * number)
        make_run(tmp_path / f"r{number}", Story(level=level, noise=0.0, seed=5, every=0, rises=rises), setting)
    (note,) = (note for note in compare([tmp_path], Options()).notes if "early losses" in note)
    assert "do: -1.00" in note and note.endswith("the best is in the worse half there: stopping early is not offered")
    assert "saved" not in note and not list(itertools.filterfalse(str.isprintable, note))
