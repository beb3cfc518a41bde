"""Law 4: a resumed run equals the one that was never stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.process_groups import simulate_rank
from tests.support.ranks import RankFailedError
from tests.support.runs import (
    RankOutcome,
    are_identical,
    begin_run,
    compose_tiny_run,
    read_checkpoint,
    read_learned_values,
    read_step_records,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint import manifest
from titan.checkpoint.state import init_optimizer_state
from titan.errors import ConfigError, RunError
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.run.run import Run
from titan.training.trainer import Trainer

OPTIMIZERS = {
    "sgd": ["optimizer=sgd"],
    "sgd-momentum": ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1"],
    "sgd-momentum-loop": ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.implementation=for-loop"],
    "adamw": ["optimizer=adamw"],
    "adamw-bf16": ["optimizer.moments=bf16"],
    "muon": ["optimizer=muon"],
    "adamw-loop": ["optimizer=adamw", "optimizer.implementation=for-loop"],
}
LOOP = "for-loop"
KINDS: list[Optimizer] = [
    AdamW(), AdamW(implementation=LOOP), AdamW(moments="bf16"), SGD(), SGD(momentum=0.9, weight_decay=0.1),
    SGD(implementation=LOOP), Muon(),
]  # fmt: skip


class Killed(Exception):
    """Ends an attempt where a kill would."""


def stop_at(step: int) -> Any:
    """For `train_run`: behave as if a signal had come in that step."""

    class Stop:
        requeue = False

        def __init__(self, trainer: Trainer) -> None:
            self.trainer = trainer

        @property
        def requested(self) -> bool:
            return self.trainer.step >= step

    return lambda trainer: setattr(trainer, "stop", Stop(trainer))


def in_two_attempts(before: Run, after: Run) -> list[list[RankOutcome]]:
    """Stop `before` at step 3, and let `after` go on in the same directory."""
    attempts = [train_run(before, stop_at(2)), train_run(after)]
    assert [attempt[0].code for attempt in attempts] == [130, 0]
    return attempts


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [("fsdp2", "adamw"), full("fsdp2", "sgd-momentum"), *(full("single", name) for name in OPTIMIZERS)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(layout: str, optimizer: str, tmp_path: Path) -> None:
    settings = [*OPTIMIZERS[optimizer], "training.steps=6"]
    whole = compose_tiny_run(tmp_path / "whole", *settings, layout=layout)
    parts = compose_tiny_run(tmp_path / "parts", *settings, layout=layout)
    expected = train_run(whole)[0].last
    first, second = in_two_attempts(parts, parts)
    assert are_identical(second[0].first, first[0].last)
    assert are_identical(second[0].last, expected)
    assert read_learned_values(parts) == read_learned_values(whole)
    assert [line["attempt"] for line in read_step_records(parts)] == [1, 1, 1, 2, 2, 2]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "tied"), [("single", "false"), ("fsdp2", "false"), ("fsdp2", "true")])
def test_a_validation_before_takes_nothing_from_a_checkpoint(layout: str, tied: str, tmp_path: Path) -> None:
    often = ["evaluation.every=2", "evaluation.tokens=64", "checkpoint.every=2", "training.steps=4"]
    run = compose_tiny_run(tmp_path, *often, f"model.tied={tied}", layout=layout)
    last = train_run(run)[0].last
    assert read_checkpoint(run, 2).keys() == last.keys()
    assert are_identical(read_checkpoint(run, 4), last)


def test_a_kill_costs_what_came_after_the_last_complete_checkpoint(tmp_path: Path) -> None:
    whole = compose_tiny_run(tmp_path / "whole", "training.steps=6", "checkpoint.every=2")
    run = compose_tiny_run(tmp_path / "killed", "training.steps=6", "checkpoint.every=2", "evaluation.every=5")
    expected = train_run(whole)[0].last
    with pytest.raises(Exception, match="Killed"):
        train_run(run, lambda trainer: setattr(trainer, "save", _dies_at(trainer, 4)))
    (manifest.folder_of(tmp_path / "killed", 4)).mkdir()  # what a killed save leaves
    (manifest.folder_of(tmp_path / "killed", 4) / "__0_0.distcp").write_text("half")
    assert [f.name for f in manifest.list_complete(tmp_path / "killed")] == ["step-2"]
    seen = train_run(run)[0]
    assert are_identical(seen.last, expected)
    assert read_learned_values(run) == read_learned_values(whole)
    assert [line["attempt"] for line in read_step_records(run)] == [1, 1, 2, 2, 2, 2]
    assert [f.name for f in manifest.list_complete(tmp_path / "killed")] == ["step-4", "step-6"]


def _dies_at(trainer: Trainer, step: int) -> Any:
    save = trainer.save

    def dying() -> None:
        if trainer.step == step:
            raise Killed
        save()

    return dying


@pytest.mark.parametrize(
    ("settings", "folders"),
    [
        pytest.param(["checkpoint.every=1", "checkpoint.keep=2"], ["step-4", "step-5"], id="keep-2"),
        full(["checkpoint.every=2", "checkpoint.keep=9"], ["step-2", "step-4", "step-5"], id="keep-9"),
        full(["checkpoint.every=0"], ["step-5"], id="end-only"),
        pytest.param(["checkpoint=off", "checkpoint.every=1"], [], id="off"),
        full(["checkpoint.every=0", "checkpoint.minutes=1e-9", "checkpoint.keep=9"], "all", id="minutes"),
    ],
)
def test_when_checkpoints_are_saved_and_which_are_kept(settings: list[str], folders: Any, tmp_path: Path) -> None:
    train_run(compose_tiny_run(tmp_path, *settings, "training.steps=5", "checkpoint.grace=0"))
    found = sorted(f.name for f in (tmp_path / "checkpoints").glob("*"))
    if folders == "all":  # asked for in the first step, saved after the second at the latest
        assert "step-5" in found
        assert {"step-1", "step-2"} & set(found)
    else:
        assert found == folders
    assert [f.name for f in manifest.list_complete(tmp_path)] == found


@pytest.mark.full
def test_on_stop_false_saves_nothing_at_a_stop(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "checkpoint.on_stop=false", "training.steps=9")
    assert train_run(run, stop_at(2))[0].code == 130
    assert manifest.list_complete(tmp_path) == []
    assert not json.loads((tmp_path / "result.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        full("sgd", "adamw", r"has no optimizer\.\S+\.exp_avg, this run has optimizer\.\S+ in", id="missing"),
        pytest.param("adamw", "sgd", r"has optimizer\.\S+\.exp_avg in the shape \S+, this run has no", id="extra"),
    ],
)
def test_a_fork_with_another_optimizer_is_refused(before: str, after: str, said: str, tmp_path: Path) -> None:
    train_run(compose_tiny_run(tmp_path / "parent", f"optimizer={before}"))
    fork = [f"checkpoint.resume={tmp_path}/parent", "training.steps=5", f"optimizer={after}"]
    with pytest.raises(RankFailedError, match=said) as failed:
        train_run(compose_tiny_run(tmp_path / "fork", *fork, layout="fsdp2"))
    assert "titan.errors.ConfigError: checkpoint.resume=" in str(failed.value)
    assert "take its weights alone with checkpoint.weights=" in str(failed.value)


@pytest.mark.full
def test_a_fork_of_another_model_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    train_run(compose_tiny_run(tmp_path / "parent"))
    fork = compose_tiny_run(
        tmp_path / "fork", f"checkpoint.resume={tmp_path}/parent", "training.steps=5", "model.ffn=40"
    )
    with pytest.raises(
        ConfigError, match=r"saved with another model: model.ffn is 48 there and 40 here; give the same"
    ):
        begin_run(fork)


@pytest.mark.parametrize(
    "settings", KINDS, ids=["adamw", "adamw-loop", "adamw-bf16", "sgd", "sgd-momentum", "sgd-loop", "muon"]
)
def test_prime_changes_no_weight_and_leaves_the_optimizer_as_new(settings: Optimizer) -> None:
    def made() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.tensor([0.5, -0.0, 0.0, -3e-39, 1e30]))
        return weight, settings.build([("norm.weight", weight)])

    (weight, optimizer), (other, fresh) = made(), made()
    start = weight.detach().clone()
    init_optimizer_state(optimizer)
    assert torch.equal(weight.detach().view(torch.int32), start.view(torch.int32))
    assert optimizer.param_groups[0]["lr"] == settings.lr
    assert weight.grad is None
    for scale in (1.0, -2.0):
        for parameter, one in ((weight, optimizer), (other, fresh)):
            parameter.grad = torch.full_like(parameter, scale)
            one.step()
    assert torch.equal(weight, other)


class KeepsState(torch.optim.SGD):
    """An optimizer that keeps one value for each parameter."""

    def __init__(self, parameter: nn.Parameter, kept: Any) -> None:
        super().__init__([parameter], lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"kept": self.kept}


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        pytest.param(3, "a number", id="number"),
        pytest.param([torch.zeros(2)], "of type list", id="list"),
        pytest.param({"a": torch.zeros(2)}, "of type dict", id="dict"),
        pytest.param("slow", "of type str", id="text"),
        pytest.param(torch.zeros(4), "a tensor [4] of one rank", id="part-of-one-rank"),
        pytest.param(torch.zeros(()), None, id="scalar"),
        pytest.param(None, None, id="none"),
    ],
)
def test_state_that_no_checkpoint_would_hold_is_refused(kept: Any, problem: str | None) -> None:
    with simulate_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
        part = DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)
        optimizer = KeepsState(nn.Parameter(part), kept)
        if problem is None:
            init_optimizer_state(optimizer)
        else:
            with pytest.raises(RunError, match=re.escape(f"KeepsState: its state kept is {problem}")):
                init_optimizer_state(optimizer)


def test_state_of_a_whole_parameter_may_have_any_shape() -> None:
    optimizer = KeepsState(nn.Parameter(torch.zeros(4)), torch.ones(2, 3))
    init_optimizer_state(optimizer)
    assert not optimizer.kept.any()


def test_prime_keeps_the_state_that_there_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW().build([("norm.weight", weight)])
    weight.grad = torch.ones(3)
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"].clone()
    init_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
    assert optimizer.state[weight]["step"] == 1
