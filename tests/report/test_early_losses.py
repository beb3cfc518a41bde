"""Early losses: how they rank the ends, and when stopping by them is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.made_runs import Story, make_run
from tests.support.tiers import full
from titan.report.comparison import Options, compare
from titan.report.notes import LEAST_VARIANTS
from titan.scaling.early_stopping import FEWEST_EARLIER

COUNT = FEWEST_EARLIER + 2
LEVELS = [3.0 + 0.01 * k for k in range(COUNT)]
WINDOWS = [f"dataset.window={1000 * k}" for k in range(1, 1 + COUNT)]
RATES = [f"optimizer.lr={k}e-3" for k in range(1, 1 + COUNT)]


def find_note(folder: Path, settings: list[str], early: list[float] | None = None, every: int = 0) -> str:
    """The note of a comparison of runs with one setting each, which end ever higher.

    Args:
        folder: where the runs are made.
        settings: one for each run.
        early: added to the losses of each until step 36 of 40, of which the rate is low from step 21 on.
        every: steps between validations; 0: only at the end.
    """
    for number, setting in enumerate(settings):
        rises = dict.fromkeys(range(1, 37), early[number]) if early else {}
        story = Story(level=LEVELS[number], noise=0.0, seed=5, rises=rises, every=every)
        make_run(folder / f"r{number}", story, setting)
    notes = compare([folder], Options()).notes
    return next((note for note in notes if "early losses" in note), "")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        full(
            WINDOWS,
            "as the ends do: 1.00 (rank correlation); the margin rule (hydra.sweeper.pruner=margin) would have stopped "
            "11 of them, saved",
        ),
        full(RATES, "differ in optimizer.lr, which changes the shape of the curve; the margin rule"),
        full(WINDOWS[:FEWEST_EARLIER], "stopping is offered from 11 variants on"),
        full(WINDOWS[: LEAST_VARIANTS - 1], ""),
    ],
    ids=["offered", "offered-after-the-decay", "few", "too-few"],
)
def test_the_sentence(settings: list[str], words: str, tmp_path: Path) -> None:
    note = find_note(tmp_path, settings)
    assert words in note and bool(words) == bool(note)
    assert ("after the decay of the learning rate" in note) == (settings is RATES)


@pytest.mark.full
def test_nothing_is_offered_where_no_loss_follows_the_decay(tmp_path: Path) -> None:
    """The learning rate falls over the last fifth of 40 steps, and runs are validated every ten."""
    note = find_note(tmp_path, RATES, every=10)
    assert note.endswith("none has a loss between the decay of its rate and its end: stopping is not offered")


@pytest.mark.full
def test_a_best_variant_that_comes_from_behind_is_not_stopped(tmp_path: Path) -> None:
    """One is further behind than any that made it up before; as the only such one it would have been stopped."""
    note = find_note(tmp_path, WINDOWS, early=[1.0] + [0.0] * (COUNT - 1))
    assert note.endswith("the margin rule would have stopped 1 that ended best so far: it is not offered")


@pytest.mark.full
def test_early_losses_that_mislead_stop_nothing_before_they_cross(tmp_path: Path) -> None:
    note = find_note(tmp_path, WINDOWS, early=[1.0 - 0.05 * number for number in range(COUNT)])
    assert "do: -1.00" in note and "saved 5 % of the tokens and kept each best one" in note
