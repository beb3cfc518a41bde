"""Runs at trackio: by a module in its place, and by trackio itself where it is installed."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import trackio_stand_in
from tests.support.processes import LIMIT
from titan.metrics.schema import Metrics, Trackio
from titan.metrics.tracker_run import RunDescription
from titan.metrics.trackers import open_trackers

REAL = importlib.util.find_spec("trackio") is not None
needs_trackio = pytest.mark.skipif(not REAL, reason="trackio is not installed")


def log_two_attempts(directory: Path, settings: Trackio) -> list[str]:
    """Log two attempts of a run, of which the second repeats a step; return the warnings."""
    warnings: list[str] = []
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        config = {"model": {"dim": 64, "api_key": "planted-secret"}, "path": "s3://me:planted-secret@host/x"}
        facts = {"attempt": attempt, "sweep": "grid"}
        about = RunDescription(run_id="abc", group_id="group", name="x", config=config, facts=facts, sweep="grid")
        opened = open_trackers(
            Metrics(trackers={"trackio": settings}), directory=directory, description=about, warn=warnings.append
        )
        for step in steps:
            loss = float("inf") if step == 2 else 1.0 / step
            opened.log({"step": step, "time": 1000.0 + step, "loss": loss, "rows": [1, 2]})
        opened.finish({"finished": attempt == 2, "last_loss": 0.25, "status": "x"})
    return warnings


EXPECTED: list[tuple[int, dict[str, Any]]] = [
    (1, {"train/loss": 1.0}), (2, {"train/loss": float("inf")}), (3, {"train/loss": 1 / 3}),
    (3, {"result/last_loss": 0.25}),
    (3, {"train/loss": 1 / 3}), (4, {"train/loss": 0.25}), (4, {"result/last_loss": 0.25}),
]  # fmt: skip
CONFIG = {"model.dim": 64, "path": "s3://me:***@host/x", "attempt": 2, "sweep": "grid", "titan.run_id": "abc"}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [trackio_stand_in.Finder(monkeypatch.setitem), *sys.meta_path])


@pytest.fixture(autouse=True)
def forget_stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Remove the modules that a test imports in trackio's place."""
    yield
    if isinstance(sys.modules.get("trackio"), trackio_stand_in.StandIn):
        for name in trackio_stand_in.MODULES:
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("stand_in")
def test_a_resumed_run_continues_its_trackio_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLOUD_SECRET", "planted-secret")
    assert log_two_attempts(tmp_path, Trackio(project="p", space="me/space")) == []
    trackio: Any = sys.modules["trackio"]
    ((place, run),) = trackio.runs.items()
    assert place == ("p", "x-abc") and run.group == "group" and run.finished
    assert run.logs == EXPECTED and run.config == CONFIG
    assert trackio.options == 2 * [{"space_id": "me/space", "private": True, "embed": False, "hardware": False}]
    assert tmp_path / "trackio" == trackio.TRACKIO_DIR and "TRACKIO_DIR" not in os.environ
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("stand_in")
def test_another_folder_in_the_same_process_is_one_warning(tmp_path: Path) -> None:
    assert log_two_attempts(tmp_path / "a", Trackio()) == []
    sentence = f"trackio was imported before with {tmp_path}/a/trackio: it writes there, not to {tmp_path}/b/trackio."
    assert log_two_attempts(tmp_path / "b", Trackio()) == 2 * [sentence]


@pytest.mark.usefixtures("stand_in")
def test_a_folder_that_can_not_be_written_to_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "trackio").write_text("a file in the way")
    (first, second) = log_two_attempts(tmp_path, Trackio())
    assert first == second and first.startswith("metrics.trackers.trackio: [Errno 17] File exists: ")


@pytest.mark.parametrize(
    ("settings", "environ", "folder"),
    [
        pytest.param(Trackio(directory="/a"), {"TRACKIO_DIR": "/b"}, "/a", id="setting"),
        pytest.param(Trackio(), {"TRACKIO_DIR": "/b"}, "/b", id="variable"),
        pytest.param(Trackio(), {}, "/run/trackio", id="run"),
    ],
)
def test_folder(settings: Trackio, environ: Mapping[str, str], folder: str) -> None:
    assert settings.choose_folder(Path("/run"), environ) == Path(folder)


@needs_trackio
@pytest.mark.full
def test_the_stand_in_has_trackios_signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    for own, real in (
        (trackio_stand_in.StandIn.init, trackio.init),
        (trackio_stand_in.Run.log, trackio.Run.log),
        (trackio_stand_in.Run.finish, trackio.Run.finish),
    ):
        parameters = [(p.name, p.default, p.kind) for p in inspect.signature(own).parameters.values()]
        expected = [(p.name, p.default, p.kind) for p in inspect.signature(real).parameters.values()]
        assert [p for p in parameters if p[0] != "self"] == [p for p in expected if p[0] != "self"]
    assert isinstance(trackio.TRACKIO_DIR, Path) and all(name in sys.modules for name in trackio_stand_in.MODULES)


SCRIPT = """
import json, sys
from pathlib import Path
from tests.metrics.test_trackio import log_two_attempts
from titan.metrics.schema import Trackio
warnings = log_two_attempts(Path(sys.argv[1]), Trackio(project="p"))
from trackio.sqlite_storage import SQLiteStorage
runs, logs = SQLiteStorage.get_runs("p"), SQLiteStorage.get_logs("p", "x-abc")
config = SQLiteStorage.get_run_config("p", "x-abc")
print(json.dumps([warnings, runs, logs, config]))
"""


@needs_trackio
@pytest.mark.full
def test_trackio_itself(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO_")}
    environ["CLOUD_SECRET"] = "planted-secret"
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    call = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    shown = subprocess.run(call, env=environ, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    warnings, runs, logs, config = json.loads(shown)  # trackio prints nothing beside it
    assert warnings == [] and len(runs) == 1
    read = [(log.pop("step"), {k: v for k, v in log.items() if k != "timestamp"}) for log in logs]
    assert read == EXPECTED
    assert {k: v for k, v in config.items() if not k.startswith("_")} == CONFIG and config["_Group"] == "group"
    files = [file for file in (tmp_path / "trackio").rglob("*") if file.is_file()]
    assert files and not any(b"planted-secret" in file.read_bytes() for file in files)
