"""Runs in files between a launcher and what it starts: of other code's, none is run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers import run_file, trials
from launchers.local import trial
from tests.support.processes import ROOT
from tests.support.runs import compose_tiny_run
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.optimizer.schema import Muon
from titan.run.run import Run


def with_optimizer(run: Run, patch: pytest.MonkeyPatch, **more: Any) -> Run:
    """The run with an optimizer of a module that this process alone has, with more settings than Muon's."""
    cls = dataclasses.make_dataclass(
        "Theirs", [(k, type(v), setting(v)) for k, v in more.items()], bases=(Muon,), frozen=True, kw_only=True
    )
    cls.__module__ = "titan.theirs"
    module = types.ModuleType("titan.theirs")
    module.Theirs = cls  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "titan.theirs", module)
    return dataclasses.replace(run, optimizer=cls())


def moved(run: Run, file: Path, patch: pytest.MonkeyPatch) -> None:
    run_file.write(with_optimizer(run, patch), file)
    patch.delitem(sys.modules, "titan.theirs")


def other_settings(run: Run, file: Path, patch: pytest.MonkeyPatch) -> None:
    run_file.write(with_optimizer(run, patch, rank_one=True), file)
    with_optimizer(run, patch)


def bare(run: Run, file: Path, patch: pytest.MonkeyPatch) -> None:
    file.write_bytes(pickle.dumps(run))


def torn(run: Run, file: Path, patch: pytest.MonkeyPatch) -> None:
    run_file.write(run, file)
    file.write_bytes(file.read_bytes()[:100])


def absent(run: Run, file: Path, patch: pytest.MonkeyPatch) -> None:
    file.unlink(missing_ok=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("left", "why"),
    [
        pytest.param(moved, "another version of titan .*No module named 'titan.theirs'", id="moved"),
        pytest.param(other_settings, "another version of titan .*titan.theirs.Theirs has other fields", id="settings"),
        pytest.param(bare, "another version of titan .*UnicodeDecodeError", id="format"),
        pytest.param(torn, "another version of titan .*JSONDecodeError", id="torn"),
        pytest.param(absent, "can't be read .No such file", id="absent"),
    ],
)
def test_what_other_code_left_is_refused(
    left: Callable[..., None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(compose_tiny_run(tmp_path / "run"), tmp_path / "a.json", monkeypatch)
    with pytest.raises(ConfigError, match=f"a.json: .*{why}.*; repeat the command that started it"):
        run_file.read(tmp_path / "a.json")


def test_a_grid_that_goes_on_writes_its_points_anew(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path / "run")
    (tmp_path / "a.json").write_bytes(b"of older code")
    file = trials.write_run(trials.Trial("a", (), run), tmp_path)
    assert file == tmp_path / "a.json" and run_file.read(file) == run


def test_a_point_of_older_code_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "die_with_parent", lambda parent: None)
    bare(compose_tiny_run(tmp_path / "run"), tmp_path / "a.json", monkeypatch)
    assert trial.main(str(tmp_path / "a.json"), "1") == 2
    assert "another version of titan" in capsys.readouterr().err


@pytest.mark.full
def test_a_job_of_older_code_ends_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare(compose_tiny_run(tmp_path / "run"), tmp_path / "a.json", monkeypatch)
    listed, attempt = tmp_path / "list.json", tmp_path / "attempt"
    attempt.mkdir()
    listed.write_text(json.dumps({"points": [str(tmp_path / "a.json")], "tasks": "rank", "ranks_per_node": 1}))
    done = subprocess.run(
        [sys.executable, "-m", "launchers.slurm.job", str(listed), str(attempt)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (file,) = attempt.rglob("*.error")
    error = json.loads(file.read_text())
    assert done.returncode == error["code"] == 2 and "another version of titan" in error["text"]
