"""Trials of several commands in one directory: in which settings they differ, and what is said when they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from launchers import trials as sweep_trials
from launchers.trials import Trial
from tests.support.composing import compose_test_run
from tests.support.runs import TINY
from titan import status
from titan.run import identity
from titan.run.run import Run
from titan.sweep import ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.trial_settings import describe_mixed, label_trials

Grid = Sequence[Sequence[str]]  # the overrides of each trial that its command varies
RATES: Grid = [("optimizer.lr=0.001", "training.seed=0"), ("optimizer.lr=0.003", "training.seed=0")]
SEEDS: Grid = [("optimizer.lr=0.001", "training.seed=1"), ("optimizer.lr=0.003", "training.seed=1")]


@lru_cache
def compose_once(*overrides: str) -> Run:
    return compose_test_run([*TINY, "parallelism=single", "name=x", *overrides])


def compose_grid(root: Path, grid: Grid, *fixed: str) -> list[Trial]:
    """Return the trials of a grid, with its fixed overrides."""
    runs = [(tuple(varied), compose_once(*fixed, *varied)) for varied in grid]
    named = [(varied, run, identity.compute_trial_id(run)) for varied, run in runs]
    return [Trial(name, varied, replace(run, directory=str(root / name))) for varied, run, name in named]


def add_grid(root: Path, grid: Grid, *fixed: str, has_budget: bool = False) -> None:
    trials = compose_grid(root, grid, *fixed)
    sweep_trials.note_mixed(root, trials, has_budget)
    sweep_trials.register_trials(root, trials, SweepSpec())


NEXT = [
    pytest.param(RATES, [], "", id="the-same"),
    pytest.param(SEEDS, [], "", id="more-seeds"),
    pytest.param([*RATES, ("optimizer.lr=0.01", "training.seed=0")], [], "", id="one-more-rate"),
    pytest.param([("optimizer.lr=0.01",)], ["training.seed=0"], "", id="a-rate-with-a-fixed-seed"),
    pytest.param([("parallelism=ddp", *RATES[0])], [], "", id="a-varied-layout"),
    pytest.param([("optimizer=muon", *RATES[0])], [], "", id="a-group-that-varies"),
    pytest.param(
        RATES, ["training.steps=5", "model.dim=64"],
        "2 new trials differ from the 2 that the directory has in settings that no command varies: model.dim (there "
        "32, here 64), training.steps (there 3, here 5). ", id="other-steps-and-model",
    ),
    pytest.param(
        [*RATES, ("optimizer.lr=0.01", "training.seed=0")], ["training.steps=200"],
        "3 new trials differ from the 2 that the directory has in settings that no command varies: training.steps "
        "(there 3, here 200). ", id="steps-that-are-the-default",
    ),
    pytest.param(
        [("optimizer.lr=0.01",)], ["model.ffn=64"], "1 new trial differs from the 2 that the directory has",
        id="another-rate-of-another-model",
    ),
    pytest.param(RATES, ["parallelism=ddp"], "parallelism.replicate (there ", id="a-fixed-layout"),
    pytest.param([("optimizer=muon", *RATES[0])], ["training.steps=5"], "training.steps (there 3, here 5). ",
                 id="a-group-that-varies-and-steps"),
    pytest.param([("recipe=x", *RATES[0])], ["training.steps=5"], "", id="a-recipe-that-varies"),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "fixed", "expected"), NEXT)
def test_trials_that_differ_in_what_no_command_varies_are_noted(
    grid: Grid, fixed: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_grid(tmp_path, RATES)
    assert capsys.readouterr().out == ""
    if "recipe=x" in grid[0]:
        trials = [Trial("x", tuple(grid[0]), t.run) for t in compose_grid(tmp_path, RATES[:1], *fixed)]
        sweep_trials.note_mixed(tmp_path, trials, has_budget=False)
    else:
        add_grid(tmp_path, grid, *fixed)
    out = capsys.readouterr().out
    assert expected in out and bool(out) == bool(expected)


def test_steps_that_a_budget_decides_are_not_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_grid(tmp_path, [("model.layers=2",)], has_budget=True)
    add_grid(tmp_path, [("model.layers=4",)], "training.steps=2", has_budget=True)
    assert capsys.readouterr().out == ""
    hours = {"training.hours": 1.0, "training.steps": 7}
    earlier = [TrialState("a", "/s/a", ("a=1",), "planned", settings={"training.hours": 1.0, "training.steps": 9})]
    assert describe_mixed([(["a=2"], hours)], earlier, repeated=[], has_budget=False) is None


def test_what_follows_from_an_axis_is_not_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    derived = "model.ffn=${model.dim}"
    add_grid(tmp_path, [("model.dim=32",)], derived)
    add_grid(tmp_path, [("model.dim=32",), ("model.dim=64",)], derived)
    add_grid(
        tmp_path, [("model.dim=32",), ("model.dim=64",)], derived, "metrics.console_every=50", "training.gc_every=7"
    )
    assert capsys.readouterr().out == ""


def test_a_note_of_thousands_of_trials_is_short() -> None:
    earlier = [
        TrialState(str(i), "/s/a", ("optimizer.lr=1",), "planned", settings={"model.dim": i, "model.ffn": 9})
        for i in range(2048)
    ]
    new = [
        (("optimizer.lr=2", f"model.dim={i}"), {"model.dim": i, "model.ffn": 7, "x.y": "z" * 99}) for i in range(2048)
    ]
    note = describe_mixed(new, earlier, [], has_budget=False)
    assert note is not None and note.startswith("2,048 new trials differ from the 2,048 that") and len(note) < 400
    other = [(("optimizer.lr=2",), {"model.dim": 1, "model.ffn": 7 + i}) for i in range(2048)]
    assert describe_mixed(other, earlier, [], has_budget=False) is None  # it varies among them: no fixed setting does


def test_trials_of_an_older_ledger_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"id": "a", "directory": "p", "overrides": list(RATES[0]), "steps": 3, "devices": 1, "asked": ""}
    ledger.add_events(tmp_path, {"event": "point", **event})
    add_grid(tmp_path, RATES, "training.steps=5")
    assert capsys.readouterr().out == ""
    assert label_trials(ledger.read_trials(tmp_path))[0] == "p optimizer.lr=0.001 training.seed=0"


def test_status_distinguishes_trials_of_several_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fixed in ([], ["training.steps=5", "model.dim=64"], ["training.steps=5"]):
        add_grid(tmp_path, RATES, *fixed)
    status.main([str(tmp_path), "watch=false"])
    lines = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines() if "optimizer.lr=" in line][:6]
    assert lines == [
        f"{apart} optimizer.lr={rate} training.seed=0"
        for apart in ("model.dim=32 training.steps=3", "model.dim=64 training.steps=5", "model.dim=32 training.steps=5")
        for rate in ("0.001", "0.003")
    ]


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        pytest.param([{}, {"training.steps": 20}], ["training.steps=200 a=1", "training.steps=20 a=1"], id="default"),
        pytest.param([{}, {"optimizer": "x.Y"}], ["optimizer=default a=1", "optimizer=x.Y a=1"], id="class"),
        pytest.param([{"training.steps": 20}] * 2, ["p0 a=1", "p1 a=1"], id="no-difference"),
        pytest.param([None, {"training.steps": 20}], ["p0 a=1", "p1 a=1"], id="unknown"),
    ],
)
def test_labels_name_what_differs(settings: list[dict[str, object] | None], labels: list[str]) -> None:
    trials = [TrialState(str(i), f"/s/p{i}", ("a=1",), "planned", settings=s) for i, s in enumerate(settings)]
    assert label_trials(trials) == labels
    assert label_trials(trials[:1]) == ["a=1"]
