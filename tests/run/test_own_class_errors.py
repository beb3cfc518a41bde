"""Mistakes in a user's own classes are reported in one sentence that names the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchers.command import run_command
from launchers.start import run_local
from tests.support.runs import TINY

Captured = pytest.CaptureFixture[str]
HEAD = """
from dataclasses import dataclass
from titan.config.settings import setting
from titan.optimizer.schema import Optimizer
"""
GOOD = """
@dataclass(frozen=True, kw_only=True)
class Own(Optimizer):
    def build(self, parameters):
        import torch
        class Steps(torch.optim.SGD):
            def step(self, closure=None):
                {step}
        return Steps(self.param_groups(parameters), lr=self.lr)
"""
BYTES = "    def state_bytes(self, *args): return 1 / 0"
COUNTS = "self.state[self.param_groups[0]['params'][0]]['step'] = 1"


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, *more: str) -> int:
    """Train with the optimizer Own of a module with this source, in a package named after the test's folder."""
    package = f"own_{abs(hash(str(folder))):x}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "opt.py").write_text(HEAD + source)
    monkeypatch.syspath_prepend(str(folder))
    target = f"+optimizer._target_={package}.opt.Own"
    conf = folder / "conf" / "optimizer"
    conf.mkdir(parents=True)
    (conf / "own.yaml").write_text("defaults:\n  - /schema/optimizer/base@_here_\n  - _self_\n")
    monkeypatch.setenv("TITAN_CONF", str(folder / "conf"))
    small = [o for o in TINY if not o.startswith("optimizer")]
    given = [*small, f"modules=[{package}]", "optimizer=own", target, "name=x", "checkpoint=off"]
    return run_command([o for o in given if o not in more], run_local)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        pytest.param("class Own(Optimizer:\n    pass", 2, "importing own_", id="syntax"),
        pytest.param("import not_installed", 2, "No module named 'not_installed'", id="not-installed"),
        pytest.param("@dataclass\nclass Own(Optimizer):\n    beta: int = 1", 2, "opt.py:5 (TypeError", id="not-frozen"),
        pytest.param("class Other: pass", 2, "no such class (module", id="no-class"),
        pytest.param("@dataclass\nclass Own:\n    def build(self): pass", 2, "is no titan.optimizer", id="base"),
        pytest.param("class Own(Optimizer):\n    beta: int = 1", 2, "is no dataclass; decorate it", id="no-decorator"),
        pytest.param("class Own(Optimizer):\n    def bulid(self): pass", 2, "has no method build", id="no-build"),
        pytest.param(GOOD.format(step="[].pop()"), 1, "your code failed: own_", id="step"),
        pytest.param(GOOD.format(step=COUNTS), 1, "its state step is a number", id="number"),
        pytest.param(GOOD.format(step="pass").replace("return Steps", "Steps"), 1, "returned NoneType", id="nothing"),
        pytest.param(GOOD.format(step="pass") + BYTES, 2, "in state_bytes (ZeroDivisionError", id="estimate"),
    ],
)
def test_the_place_is_named(
    source: str, code: int, said: str, laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert ended(laptop, monkeypatch, source) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.full
def test_a_class_that_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "optimizer").mkdir()
    file = tmp_path / "optimizer" / "own.yaml"
    for text, said in (("", "optimizer._target_ is missing"), ("beta: 1\n", "is named by _target_")):
        file.write_text(f"defaults:\n  - /schema/optimizer/base@_here_\n  - _self_\n{text}")
        monkeypatch.setenv("TITAN_CONF", str(tmp_path))
        assert run_command(["optimizer=own", f"hydra.run.dir={tmp_path}/x"], run_local) == 2
        assert said in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("TITAN_CONF", os.pathsep.join((str(tmp_path), f"{tmp_path}/nowhere")))
    assert run_command([f"hydra.run.dir={tmp_path}/x"], run_local) == 2
    assert f"TITAN_CONF={tmp_path}/nowhere: there is no such folder" in capsys.readouterr().err
