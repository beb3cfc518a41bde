"""What sweepers that learn from trials get of each: `sweep.objective`, or the worst value of a trial that failed."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers import start
from launchers.command import run_command
from launchers.start import run_local
from tests.support import learning_sweeper
from tests.support.learning_sweeper import Learning
from tests.support.made_runs import make_run
from tests.support.runs import TINY
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.sweep import ledger, objective
from titan.sweep.schema import Sweep

QUICK = [*TINY[:-2], "cluster=cpu", "evaluation.tokens=64", "metrics.sample_tokens=0", "checkpoint=off"]
LEARNING = ["-m", "hydra/sweeper=learning"]


@pytest.fixture(autouse=True)
def sweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "run_local", lambda run, **_: run_local(run))  # in this process, which is faster
    learning_sweeper.register_sweeper()


def sweep(*overrides: str) -> int:
    return run_command([*LEARNING, *QUICK, "name=s", *overrides], run_local)


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.full
def test_a_sweeper_gets_the_objective_and_batches_keep_names_and_axes(tmp_path: Path) -> None:
    assert sweep("optimizer.lr=1e-3,1e-2") == 0
    values = [value for _, value in Learning.results]
    losses = [result(tmp_path / "runs/s" / f"lr-{lr}")["validation_loss"] for lr in ("0.001", "0.01")]
    assert values == [*losses, min(losses), min(losses)]
    found = ledger.read(tmp_path / "runs/s")
    assert found is not None and [trial.overrides for trial in found.trials] == [
        ("optimizer.lr=0.001",), ("optimizer.lr=0.01",),
    ]  # fmt: skip
    assert found.spec.axes == {"optimizer.lr": ("0.001", "0.01")}


@pytest.mark.full
def test_a_failed_trial_is_worse_than_all_others(tmp_path: Path) -> None:
    explodes = ("optimizer=sgd", "training.clip_norm=null", "training.bad_steps=1", "sweep.objective=last_loss")
    assert sweep("optimizer.lr=1e30,1e-3", *explodes) == 1
    (_, failed), (_, learned), *_ = Learning.results
    assert failed == math.inf and learned == result(tmp_path / "runs/s/lr-0.001")["last_loss"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["evaluation.tokens=0"], "sweep.objective=validation_loss: evaluation.tokens", id="no-evaluation"),
        full(["hydra/launcher=slurm", "hydra.launcher.wait=false"], "hydra.launcher.wait=false: ", id="no-wait"),
        full(["hydra/launcher=slurm", "hydra.launcher.dry_run=true"], "chooses trials by the results", id="dry"),
        full(["sweep.sizes=[8,16,24,32]"], "a ladder has its own order of runs", id="ladder"),
        full(["sweep.objective=los", "training.steps=1"], "result.json has no such number", id="unknown"),
        full(
            ["+hydra.sweeper.direction=maximize", "sweep.direction=minimize"], "leave one of them out", id="direction"
        ),
    ],
)
def test_what_can_not_work(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [o.removeprefix("+") for o in overrides]
    assert sweep("optimizer.lr=1e-3,1e-2", *typed) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "sweeper", "value"),
    [
        pytest.param({}, {}, math.inf, id="default"),
        pytest.param({}, {"direction": "maximize"}, -math.inf, id="the-sweeper's"),
        pytest.param({"direction": "maximize"}, {}, -math.inf, id="own"),
        pytest.param({"worst": 99.0, "direction": "maximize"}, {}, 99.0, id="given"),
    ],
)
def test_worst(own: dict[str, Any], sweeper: dict[str, Any], value: float) -> None:
    assert objective.find_worst_value(Sweep(**own), sweeper) == value


def test_a_loss_that_is_not_finite_is_the_worst_and_a_trial_ended_by_a_hook_counts(tmp_path: Path) -> None:
    about = {"finished": True, "step": 3, "science_id": "a"}
    for content, value in (
        ({"validation_loss": None}, 9.0),
        ({"validation_loss": 2.0}, 2.0),
        ({"finished": False, "ended_by": {"hook": "a", "reason": "b"}, "validation_loss": 3.0}, 3.0),
        ({"finished": False, "ended_by": {"hook": "a", "reason": "b"}}, 9.0),
    ):
        (tmp_path / "result.json").write_text(json.dumps(about | content))
        assert objective.read_objective(Sweep(), tmp_path, 0, 9.0) == value
        assert objective.read_objective(Sweep(), tmp_path, 1, 9.0) == 9.0
    (tmp_path / "result.json").write_text(json.dumps(about | {"last_loss": 1.0}))
    with pytest.raises(ConfigError, match="did you mean 'last_loss'"):
        objective.read_objective(Sweep(objective="lost_loss"), tmp_path, 0, 9.0)


@pytest.mark.parametrize(("digest", "is_same"), [("a", True), ("b", False), (None, True)])
def test_an_objective_is_of_one_content(digest: str | None, is_same: bool, tmp_path: Path) -> None:
    for name, content in (("0", "a"), ("1", digest)):
        make_run(tmp_path / name)
        document = yaml.safe_load((tmp_path / name / "run.yaml").read_text())
        document |= {"evaluated": {"book": content}} if content else {}
        (tmp_path / name / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        result = {"finished": True, "step": 3, "science_id": "a", "evaluation/book/loss": 2.0, "last_loss": 1.0}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    asked = Sweep(objective="evaluation/book/loss")
    assert objective.read_objective(asked, tmp_path / "0", 0, 9.0) == 2.0
    assert objective.read_objective(Sweep(objective="last_loss"), tmp_path / "1", 0, 9.0) == 1.0
    with nullcontext() if is_same else pytest.raises(ConfigError, match=r"has changed since .*/0 \(a -> b\); restore"):
        assert objective.read_objective(asked, tmp_path / "1", 0, 9.0) == 2.0
