"""Runs at MLflow, read back by its own client."""

from __future__ import annotations

import math
import multiprocessing
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LIMIT
from titan.config.settings import build
from titan.errors import ConfigError
from titan.metrics import mlflow, trackers
from titan.metrics.mlflow import build_params, choose_status, clean_key
from titan.metrics.schema import Metrics, MLflow
from titan.metrics.tracker_run import RunDescription
from titan.metrics.trackers import open_trackers


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layer_grad_norm/layers.0", "layer_grad_norm/layers.0"), ("hooks/a-b/c d:e", "hooks/a-b/c d:e"),
        ("loss/a=b, ü(%)", "loss/a_b_ ü___"), ("/a//b/./../c/", "a/b/c"), ("..", "_"),
        ("a/" * 200, "/".join("a" * 125)),
    ],
    ids=["kept", "characters", "other-characters", "path", "no-path", "long"],
)  # fmt: skip
def test_keys(name: str, key: str) -> None:
    assert clean_key(name) == key


def test_status() -> None:
    results: list[dict[str, Any]] = [{"finished": True, "loss": 1.0}, {"finished": False, "loss": 1.0}, {}]
    assert [choose_status(result) for result in results] == ["FINISHED", "KILLED", "FAILED"]


def test_the_store_is_the_settings_then_the_environments_then_the_runs(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://b"}
    assert MLflow(tracking_uri="http://a").choose_tracking_uri(tmp_path, environ) == "http://a"
    assert MLflow().choose_tracking_uri(tmp_path, environ) == "http://b"
    assert MLflow().choose_tracking_uri(tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"


def test_parameters_are_texts_of_limited_length() -> None:
    settings = {"model": {"dim": 64, "head_dim": None}, "optimizer": {"betas": [0.9, 0.95]}, "name": "x" * 7000}
    assert build_params(settings) == {
        "model.dim": "64", "model.head_dim": "null", "optimizer.betas": "[0.9,0.95]", "name": "x" * 6000,
    }  # fmt: skip


def test_tags_are_texts_by_name() -> None:
    assert build(MLflow, {"tags": {"team": "a", "year": 2026}}, "m").tags == {"team": "a", "year": "2026"}
    with pytest.raises(ConfigError, match="expected names and values"):
        build(MLflow, {"tags": ["a"]}, "m")


def log_attempt(
    directory: Path,
    settings: MLflow,
    warnings: list[str],
    *,
    run_id: str = "abc",
    records: Iterator[Mapping[str, Any]] | list[dict[str, Any]],
    result: Mapping[str, Any],
    attempt: int = 1,
    **config: Any,
) -> None:
    """Log records to MLflow as an attempt of a run does, and end it."""
    facts = {"attempt": attempt, "commit": "c0ffee", "sweep": "grid", "layout": {"shard": attempt}}
    about = RunDescription(run_id=run_id, group_id="group", name="x", config=config, facts=facts, sweep="grid")
    metrics = Metrics(trackers={"mlflow": settings})
    opened = open_trackers(metrics, directory=directory, description=about, warn=warnings.append)
    for record in records:
        opened.log(record)
    opened.finish(result)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_is_installed", lambda package: True)


STEP = {"step": 1, "loss": 1.0}


@pytest.mark.usefixtures("installed")
def test_a_server_that_does_not_answer_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "ANSWER_SECONDS", 0.2)
    warnings: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        log_attempt(tmp_path, MLflow(tracking_uri=url), warnings, records=[STEP], result={})
    sentence = f"{url} does not answer within 0.2 s; the run continues without it."
    assert warnings == [f"metrics.trackers.mlflow: {sentence}"]


@pytest.mark.usefixtures("installed")
def test_a_store_that_can_not_be_written_to_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow").write_text("a file in the way")
    warnings: list[str] = []
    log_attempt(tmp_path, MLflow(), warnings, records=[STEP], result={})
    assert len(warnings) == 1 and warnings[0].startswith("metrics.trackers.mlflow: [Errno 17] File exists: ")


@pytest.mark.usefixtures("installed")
def test_a_database_without_its_packages_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    warnings: list[str] = []
    log_attempt(tmp_path, MLflow(tracking_uri="sqlite:///x.db"), warnings, records=[], result={})
    assert warnings == [
        "metrics.trackers.mlflow: its database needs the package sqlalchemy alembic "
        "(pip install -e '.[track]' in titan's clone); the run continues without it."
    ]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nobody is warned of it; and the store is the test's."""
    monkeypatch.setattr(trackers, "NOTICE_SECONDS", 10 * LIMIT)
    monkeypatch.setattr(trackers, "PATIENCE_SECONDS", LIMIT)
    monkeypatch.setattr(trackers.Trackers.__init__, "__defaults__", (LIMIT, None))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def read_run(database: Path, run_id: str = "abc") -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The one run of an id, and its curves in the order of time, by MLflow's client."""
    client = pytest.importorskip("mlflow.tracking").MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("titan")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`titan.run_id` = '{run_id}'")
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return run, {
        key: [(m.step, m.value) for m in sorted(values, key=lambda m: (m.timestamp, m.step))]
        for key, values in history.items()
    }


@pytest.mark.full
@pytest.mark.usefixtures("quiet")
def test_a_resumed_run_continues_its_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("CLOUD_SECRET", "planted-secret")
    monkeypatch.setattr(sys, "argv", ["train", "dataset.path=https://me:planted-secret@host/x"])
    warnings: list[str] = []
    settings = MLflow(tags={"note": "n" * 9000, "team": "a", "odd=name": "planted-secret"})
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        records = [{"step": step, "time": 1000.0 * attempt + step, "loss": 1.0 / step, "rows": [1]} for step in steps]
        result = {"finished": attempt == 2, "last_loss": 0.25, "status": "x"}
        config = {"model": {"dim": 64, "api_key": "planted-secret"}, "path": "s3://me:planted-secret@host/x"}
        config["training"] = {"steps": 10 * attempt}
        log_attempt(tmp_path, settings, warnings, records=records, result=result, attempt=attempt, **config)
    assert warnings == []
    run, curves = read_run(tmp_path / "mlflow" / "mlflow.db")
    assert curves["train/loss"] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert curves["result/last_loss"] == [(3, 0.25), (4, 0.25)] and set(curves) == {"train/loss", "result/last_loss"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "x")
    assert run.data.params == {
        "model.dim": "64", "path": "s3://me:***@host/x", "training.steps": "10", "commit": "c0ffee", "sweep": "grid",
        "layout.shard": "1",
    }  # fmt: skip
    tags = dict(run.data.tags)
    assert tags.pop("note") == "n" * 5000
    assert tags == {
        "titan.run_id": "abc", "mlflow.runName": "x", "mlflow.source.git.commit": "c0ffee", "titan.group": "group",
        "titan.sweep": "grid", "titan.attempt": "2", "team": "a", "odd_name": "***",
        "titan.attempt_2.training.steps": "20", "titan.attempt_2.layout.shard": "2",
    }  # fmt: skip
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"planted-secret" in file.read_bytes() for file in files)


@pytest.mark.full
@pytest.mark.usefixtures("quiet")
def test_values_that_are_not_finite_and_many_values(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    warnings: list[str] = []
    records: list[dict[str, Any]] = [{"step": step, "time": float(step), "loss": 0.5} for step in range(1, 1502)]
    records[0]["loss"], records[1]["loss"], records[2]["loss"] = math.inf, -math.inf, math.nan
    log_attempt(tmp_path, MLflow(), warnings, records=records, result={"finished": False, "last_loss": math.nan})
    run, curves = read_run(tmp_path / "mlflow" / "mlflow.db")
    assert warnings == [] and run.info.status == "KILLED"
    assert [math.isnan(value) for _, value in curves["train/loss"]] == [True] * 3 + [False] * 1498
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 1502))


def log_to_shared_store(folder: Path, number: int) -> None:
    """Body of a process: one run of a sweep."""
    warnings: list[str] = []
    records = [{"step": step, "loss": 1.0 / step} for step in range(1, 301)]
    settings = MLflow(tracking_uri=f"sqlite:///{folder}/shared.db")
    log_attempt(folder, settings, warnings, run_id=f"run{number}", records=records, result={"finished": True})
    lost = [warning for warning in warnings if "continues without" in warning]
    (folder / f"warnings-{number}").write_text("\n".join(lost))


@pytest.mark.full
def test_runs_that_start_at_once_share_one_database(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=log_to_shared_store, args=(tmp_path, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    assert [(tmp_path / f"warnings-{number}").read_text() for number in range(2)] == ["", ""]
    for number in range(2):
        run, curves = read_run(tmp_path / "shared.db", f"run{number}")
        assert run.info.status == "FINISHED" and len(curves["train/loss"]) == 300
