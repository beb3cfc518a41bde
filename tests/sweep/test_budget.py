"""Each variant of a sweep gets the steps that it has of the baseline's tokens, FLOPs or time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launchers.command import run_command
from tests.support.composing import compose_test_run
from tests.support.made_runs import Story, make_run
from tests.support.runs import TINY
from titan.errors import ConfigError
from titan.run.measured import combine_runs, summarize_steps
from titan.run.run import Run
from titan.sweep import budget
from titan.sweep.schema import Sweep


def compose(*overrides: str) -> Run:
    return compose_test_run([*TINY, "training.steps=20", "name=x", *overrides])


def set_seconds(run: Run, seconds: float) -> Run:
    return replace(run, training=replace(run.training, step_seconds=seconds))


RUNS = (compose(), compose("training.global_batch=512"), compose("model.layers=4"))
REPLACED = ("hydra.run.dir", "training.steps", "training.global_batch", "checkpoint")
VARIED = (("a=1",), ("a=2",), ("a=3",))


def test_tokens() -> None:
    first, larger, deeper = budget.equalise_steps(RUNS, VARIED, Sweep(budget="tokens"))
    assert larger.training.total_tokens == pytest.approx(first.training.total_tokens, rel=0.2)
    assert larger.training.steps < first.training.steps == deeper.training.steps == 20
    assert larger.overrides[-1] == f"training.steps={larger.training.steps}"
    assert sum(o.startswith("training.steps") for o in larger.overrides) == 1


def test_a_variant_is_composed_again_without_the_budget_of_a_file() -> None:
    budgeted = [replace(run, training=replace(run.training, tokens=2000.0)) for run in RUNS]
    larger = budget.equalise_steps(budgeted, VARIED, Sweep(budget="tokens"))[1]
    assert larger.overrides[-2:] == ("training.tokens=null", f"training.steps={larger.training.steps}")


def test_steps_of_a_branch_are_decided_by_its_checkpoint() -> None:
    branch = replace(RUNS[1], checkpoint=replace(RUNS[1].checkpoint, decay_steps=3))
    with pytest.raises(ConfigError, match=r"and so does checkpoint\.decay_steps"):
        budget.equalise_steps([RUNS[0], branch], VARIED[:2], Sweep(budget="flops"))


def test_more_steps_than_a_run_may_have_are_rejected() -> None:
    runs = [
        set_seconds(replace(RUNS[0], training=replace(RUNS[0].training, steps=10**9)), 1.0),
        set_seconds(RUNS[2], 0.5),
    ]
    with pytest.raises(ConfigError, match=r"sweep\.budget=time: makes 2,000,000,000 steps"):
        budget.equalise_steps(runs, VARIED[:2], Sweep(budget="time"))


def test_flops() -> None:
    first, _, deeper = budget.equalise_steps(RUNS, VARIED, Sweep(budget="flops", baseline={"a": "1"}))
    spent = [run.training.total_tokens * run.model.flops_per_token(run.training.seq_len) for run in (first, deeper)]
    assert spent[1] <= spent[0] * 1.2 and deeper.training.steps < first.training.steps


FIXED = [
    pytest.param({"a": "3", "optimizer.weight_decay": "0.10"}, 2, id="a-setting"),
    pytest.param({"optimizer": "adamw", "a": "2"}, 1, id="a-group"),
    pytest.param({"model.layers": "4"}, 2, id="a-setting-of-one-run"),
    pytest.param({"training.hours": None, "precision.skip": ["head"]}, 0, id="null-and-a-list"),
    pytest.param({"model.tied": False, "a": 2}, 1, id="a-switch-and-a-number"),
    pytest.param({"model.tied": True}, None, id="another-switch"),
    pytest.param({"optimizer": "muon", "a": "2"}, None, id="another-choice"),
    pytest.param({"optimizer.weight_decay": "0.2"}, None, id="another-value"),
    pytest.param({"optimizer.decay": "0.1"}, None, id="no-setting"),
]


@pytest.mark.parametrize(("settings", "index"), FIXED)
def test_a_baseline_may_name_what_no_trial_varies(settings: dict[str, Any], index: int | None) -> None:
    with nullcontext() if index is not None else pytest.raises(ConfigError, match="no trial has it"):
        assert budget.find_baseline(RUNS, VARIED, Sweep(budget="flops", baseline=settings)) == index


@pytest.mark.full
def test_time_counts_devices() -> None:
    runs = [set_seconds(RUNS[0], 1.0), set_seconds(RUNS[2], 2.0), set_seconds(compose("parallelism=fsdp"), 1.0)]
    equal = budget.equalise_steps(runs, VARIED, Sweep(budget="time"))
    assert [run.training.steps for run in equal] == [20, 10, 10]
    other = budget.equalise_steps(runs, VARIED, Sweep(budget="time", baseline={"a": "2.0"}))
    assert [run.training.steps for run in other] == [40, 20, 20]


@pytest.mark.full
def test_time_is_as_measured_and_said_once_for_each_variant(tmp_path: Path) -> None:
    machine = RUNS[0].machine
    device = {"device": machine.device, "name": machine.name, "cores": machine.cores}
    for name, seconds, *overrides in (("a", 0.5, "training.steps=20"), ("b", 2.0, "model.layers=4")):
        make_run(tmp_path / name, Story(seconds=seconds, jitter=0.0, device=device), *overrides)
    measured = f"training.measured={tmp_path}"
    runs = [
        compose(measured, *layers, f"training.seed={seed}") for layers in ((), ("model.layers=4",)) for seed in (0, 1)
    ]
    varied = [(f"model.layers={n}", f"training.seed={seed}") for n in (2, 4) for seed in (0, 1)]
    sweep = Sweep(budget="time")
    equal = budget.equalise_steps(runs, varied, sweep)
    assert [run.training.steps for run in equal] == [20, 20, 5, 5]
    spread = "over 37 timed steps), measured in"
    assert budget.describe_times(equal, varied, sweep) == [
        (f"sweep.budget=time: model.layers=2: 20 steps of 0.5 s (p10-p90 0.5-0.5 s {spread} {tmp_path}", ""),
        (f"sweep.budget=time: model.layers=4: 5 steps of 2 s (p10-p90 2-2 s {spread} {tmp_path}", ""),
    ]
    assert budget.describe_times(equal, varied, Sweep(budget="tokens")) == []


def test_a_doubtful_time_of_a_step_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    few, sure = (combine_runs([summarize_steps([1.0] * count)]) for count in (8, 20))
    times = {2: budget.BudgetStepTime(1.0, "measured in x", few), 4: budget.BudgetStepTime(1.0, "measured in x", sure)}
    monkeypatch.setattr(budget, "find_step_time", lambda run: times[run.model.layers])
    first, second = budget.describe_times(RUNS[::2], VARIED[:2], Sweep(budget="time"))
    assert first[0] == "sweep.budget=time: a=1: 20 steps of 1 s (p10-p90 1-1 s over 8 timed steps), measured in x"
    assert first[1].startswith("sweep.budget=time: the time of a step is the median of 8 timed steps of a run, ")
    assert second[1] == "" and "over 20 timed steps" in second[0]


@pytest.mark.full
def test_the_time_of_a_variant_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def find(run: Run) -> budget.BudgetStepTime:
        asked.append(run.model.layers)
        return budget.BudgetStepTime(float(run.model.layers), "as given")

    monkeypatch.setattr(budget, "find_step_time", find)
    varied = [[f"model.layers={layers}", f"training.seed={seed}"] for layers in (2, 4) for seed in range(3)]
    runs = budget.equalise_steps([compose_test_run([*TINY, *trial]) for trial in varied], varied, Sweep(budget="time"))
    assert [run.training.steps for run in runs] == [runs[0].training.steps] * 3 + [
        round(runs[0].training.steps / 2)
    ] * 3
    assert asked == [2, 4]


def test_steps_are_left_as_they_are() -> None:
    assert budget.equalise_steps(RUNS, VARIED, Sweep()) == list(RUNS)


@pytest.mark.parametrize(
    ("varied", "settings", "expected"),
    [
        ((("training.steps=5",), ("a=2",), ("a=3",)), {"budget": "tokens"}, "the sweep varies training.steps=5"),
        (VARIED, {"budget": "tokens", "baseline": {"a": "7"}}, "no trial has it"),
        (VARIED, {"budget": "time"}, "the time of a step is not known"),
    ],
    ids=["steps-vary", "no-baseline", "no-time"],
)
def test_what_is_rejected(varied: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        budget.equalise_steps(RUNS, varied, Sweep(**settings))


@pytest.mark.full
def test_a_grid_has_the_steps_of_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["-m", *(o for o in TINY if not o.startswith(REPLACED)), "sweep.budget=tokens", "training.steps=4"]
    grid = ["training.global_batch=128,256", "checkpoint=off", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    assert run_command([*line, *grid, "name=g", "cluster=cpu"], lambda run: 1) == 0
    assert "2 trials" in capsys.readouterr().out
