"""A user's own model from a folder of theirs: its settings, and its plan for tensor parallelism."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.command import run_command
from launchers.start import run_local
from tests.support.composing import compose_test_run
from tests.support.runs import TINY
from titan import evaluate, generate
from titan.errors import ConfigError
from titan.model.module_checks import check_module

CODE = """
from dataclasses import dataclass

from torch import nn

from titan.config.settings import setting
from titan.model import llama
from titan.model.layers import Linear
from titan.model.schema import Decoder


class Plain(nn.Module):
    def __init__(self, dim, ffn, bias, layer):
        super().__init__()
        self.up = nn.Linear(dim, ffn, bias=False) if layer == "torch" else Linear(dim, ffn)
        self.down = Linear(ffn, dim)
        self.bias = nn.Parameter(self.down.weight.new_zeros(dim)) if bias else None

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Module(llama.LlamaModel):
    def block(self):
        block, c = super().block(), self.config
        block.feed_forward = Plain(c.dim, int(c.ffn * c.widening), c.bias, c.layer)
        return block


class Planned(Module):
    BLOCK_PLAN = {name: how for name, how in llama.LlamaModel.BLOCK_PLAN.items() if "feed_forward." not in name} | {
        "feed_forward.up": "colwise", "feed_forward.down": "rowwise",
    }


class Strange(Planned):
    BLOCK_PLAN = Planned.BLOCK_PLAN | {"feed_forward": "column"}


class Undeclared(Module):
    def tensor_plan(self):
        return Undeclared.nothing


@dataclass(frozen=True, kw_only=True)
class Own(Decoder):
    widening: float = setting(1.0, "feed-forward width as a factor of model.ffn", above=0)
    bias: bool = setting(False, "whether the feed-forward layer has a bias")
    layer: str = setting("titan", "kind of layers")
    plan: str = setting("Planned", "class of the module")

    def build(self):
        return globals()[self.plan](self)
"""
FILE = """
defaults:
  - /schema/model/base@_here_
  - _self_
_target_: own_package.model.Own
widening: 1.0
bias: false
layer: titan
plan: Planned
"""
SMALL = [*TINY, "model.kv_heads=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package and a configuration folder outside of the repository."""
    for name, text in {
        "own_package/__init__.py": "",
        "own_package/model.py": CODE,
        "conf/model/own.yaml": FILE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TITAN_CONF", str(tmp_path / "conf"))
    monkeypatch.setenv("TITAN_MODULES", "own_package")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[name]


@pytest.mark.full
def test_inherited_and_own_settings_are_set_alike() -> None:
    run = compose_test_run([*SMALL, "model=own", "model.widening=2", "model.norm_eps=1e-3", "parallelism=tp", "name=x"])
    assert (run.model.dim, run.model.norm_eps, getattr(run.model, "widening", None)) == (32, 1e-3, 2.0)


@pytest.mark.full
def test_a_plan_that_does_not_fit_is_rejected_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "model=own", "model.plan=Module", "name=x"]
    assert run_command([*line, "parallelism=tp"], lambda run: 0) == 2
    error = capsys.readouterr().err
    assert error.startswith("titan: parallelism.tensor=2: the model own_package.model.Own can't be split: its plan")
    assert "layers.0.feed_forward.w1, which is no module; correct BLOCK_PLAN of Module, or" in error
    assert error.count("\n") == 1 and not (folder / "runs").exists()
    assert run_command(line, lambda run: 0) == 0


@pytest.mark.usefixtures("without_progress")
@pytest.mark.full
def test_a_trained_model_whose_plan_does_not_fit_is_rejected_on_tensor_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "model=own", "model.plan=Module", "checkpoint=sync", "training.steps=1", "name=x"]
    assert run_command(line, run_local) == 0 and capsys.readouterr().err == ""
    for main, words in ((generate.main, ["tokens=[1]", "parallelism.tensor=2"]), (evaluate.main, ["parallelism=tp"])):
        assert main(["runs/x", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("titan: parallelism.tensor=2: the model own_package.model.Own can't be split: its plan")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"plan": "Module"}, "names layers.0.feed_forward.w1, which is no module", id="renamed"),
        pytest.param({"bias": True}, "no entry for the parameter layers.0.feed_forward.bias", id="not-in-the-plan"),
        pytest.param({"layer": "torch"}, "feed_forward.up is a Linear and no layer of titan", id="layer-of-torch"),
        pytest.param({"plan": "Strange"}, "column for layers.0.feed_forward, which is none of vocab", id="unknown"),
        pytest.param({"plan": "Undeclared"}, "declares no BLOCK_PLAN", id="no-plan"),
        pytest.param({"ffn": 1001}, "2 does not divide dimension 0 of layers.0.feed_forward.up", id="odd"),
    ],
)
def test_a_plan_that_does_not_fit(values: dict[str, Any], expected: str) -> None:
    own = importlib.import_module("own_package.model").Own
    check_module(own(layers=1), tensor=2)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_module(own(layers=1, **values), tensor=2)
