"""Files of a run and of a sweep whose values are of other types: what reads them says so, and uses the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.made_runs import Story, make_run
from tests.support.runs import begin_run, compose_tiny_run, write_run_checkpoint
from tests.support.tiers import full, select_cases
from titan import compare, status
from titan.errors import ConfigError
from titan.files import untrusted
from titan.metrics.reader import read_records
from titan.run import attempts
from titan.run.directory import is_finished, read_attempts
from titan.sweep import ledger


@pytest.mark.parametrize("name", ["../key", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a\nb", "s3::b", 7, "x" * 300])
def test_a_files_name_stays_in_its_folder(name: Any) -> None:
    with pytest.raises(ValueError, match="which is not a file in its folder"):
        untrusted.check_file_name(name)


DEEP = "[" * 300_000


def edit(file: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def redo(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the last document of run.yaml."""
    *documents, last = yaml.safe_load_all((directory / "run.yaml").read_text())
    change(last)
    (directory / "run.yaml").write_text(yaml.safe_dump_all([*documents, last]))


RESULTS: list[Any] = [
    pytest.param(lambda f: f.write_text("null"), "it is None, not names and values", id="null"),
    full(lambda f: f.write_text("{"), "Expecting", id="cut"),
    full(lambda f: f.write_text(DEEP), "nested too deeply", id="deep"),
    full(lambda f: edit(f, step=None), "step is None, where a whole number is due", id="step-null"),
    pytest.param(lambda f: edit(f, step="3"), "step is '3'", id="step-text"),
    full(lambda f: edit(f, finished="no"), "finished is 'no'", id="finished-text"),
    full(lambda f: edit(f, last_loss=[1]), "last_loss is a list", id="loss-a-list"),
    full(lambda f: edit(f, sample={"start": 1}), "sample.start is 1", id="sample-numbers"),
    full(lambda f: f.write_text("{}"), "it has no 'finished'", id="empty"),
]


@pytest.mark.full
@pytest.mark.parametrize(("harm", "said"), RESULTS)
def test_a_damaged_result_is_told_and_the_run_goes_on(harm: Any, said: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    begin_run(run)
    write_run_checkpoint(run, 2)
    (tmp_path / "result.json").write_text(json.dumps({"finished": True, "step": 3}))
    harm(tmp_path / "result.json")
    attempt = begin_run(run)
    assert isinstance(attempt, attempts.Attempt) and attempt.step == 2
    assert re.search(f"^result.json is damaged and not used: .*{said}", attempt.notes[0])
    assert not is_finished(tmp_path)


@pytest.mark.full
def test_a_result_of_another_run_is_told(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    begin_run(run)
    (tmp_path / "result.json").write_text(json.dumps({"finished": True, "step": 3, "science_id": "other"}))
    attempt = begin_run(run)
    assert isinstance(attempt, attempts.Attempt)
    assert attempt.notes == ("result.json is of another run ('other') and not used",)


LIVES: list[Any] = [
    pytest.param(lambda d: d.update(attempt=None), "attempt is None", id="attempt-null"),
    full(lambda d: d.update(science=[1]), "science is a list", id="science-a-list"),
    full(lambda d: d["ids"].update(science=None), "ids.science is None", id="id-null"),
    full(lambda d: d["config"].update(training=None), "config.training is None", id="training-null"),
    full(lambda d: d["config"]["training"].update(steps=None), "config.training.steps is None", id="steps-null"),
    full(lambda d: d.update(layout={"shard": "2"}), "layout.shard is '2'", id="layout-texts"),
    full(lambda d: d.update(notes="x"), "notes is 'x'", id="notes-a-text"),
    full(lambda d: d.pop("run_id"), "it has no 'run_id'", id="no-run-id"),
    pytest.param(lambda d: d.update(options=None), "options is None", id="options-null"),
    pytest.param(lambda d: d["config"].update(cluster="x"), "config.cluster is 'x'", id="an-axis-a-text"),
    full(lambda d: d["config"].update(optimizer=[]), "config.optimizer is a list", id="an-axis-a-list"),
    full(lambda d: d["config"]["optimizer"].update(lr="x"), "config.optimizer.lr is 'x'", id="rate-a-text"),
    full(lambda d: d["config"]["precision"].update(compute=1), "config.precision.compute is 1", id="a-setting"),
    full(lambda d: d["science"].update(schedule=[]), "science.schedule is a list", id="class-a-list"),
    full(lambda d: d["ids"].update(group={}), "ids.group is a mapping", id="group-a-mapping"),
    full(lambda d: d.update(overrides=None), "overrides is None", id="overrides-null"),
]


@pytest.mark.full
@pytest.mark.parametrize(("harm", "said"), LIVES)
def test_run_yaml_of_other_types_is_refused(harm: Any, said: str, tmp_path: Path) -> None:
    begin_run(compose_tiny_run(tmp_path))
    redo(tmp_path, harm)
    with pytest.raises(
        ConfigError, match=f"run.yaml can't be read .its document 1 is not complete: {said}.*; repair it, or"
    ):
        begin_run(compose_tiny_run(tmp_path))


@pytest.mark.parametrize(
    "text", [full(DEEP), full("- " * 100_000), full("a: !!timestamp x"), full("? [[1]]\n: 2"), "[1, 2]"], ids=range(5)
)
def test_run_yaml_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^hydra.run.dir=\S+: run.yaml can't be read \([^\n]*\); repair it, or"):
        read_attempts(tmp_path)


@pytest.mark.full
def test_documents_of_several_runs_are_refused(tmp_path: Path) -> None:
    for _ in range(2):
        begin_run(compose_tiny_run(tmp_path))
    redo(tmp_path, lambda last: last.update(run_id="other"))
    with pytest.raises(ConfigError, match="its document 2 is not complete: it is of another run, 'other'"):
        read_attempts(tmp_path)


LINES = [
    "null", DEEP, '{"step": null, "loss": 1}', '{"step": "4", "loss": 1}', '{"step": 1e300, "loss": 1}', "\0",
    '{"step": 4, "loss": "low"}', '{"step": 4, "loss": 1, "attempt": "x"}', '{"step": 4, "validation_loss": []}',
]  # fmt: skip


def test_lines_of_other_types_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"runs/{seed}", Story(seed=seed), "parallelism=single")
    metrics = tmp_path / "runs/0/metrics.jsonl"
    clean = read_records(metrics)
    with metrics.open("a") as file:
        file.write("\n".join(LINES) + "\n")
    assert compare.main([f"{tmp_path}/runs", f"to={tmp_path}/x.md"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"0: {len(LINES)} lines of metrics.jsonl ignored: corrupt or truncated" in said
    assert read_records(metrics) == clean


def test_a_comparison_goes_on_past_a_run_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1, 2):
        make_run(tmp_path / f"runs/{seed}", Story(seed=seed), "parallelism=single")
    redo(tmp_path / "runs/0", lambda last: last["config"]["training"].update(steps=None))
    (tmp_path / "runs/1/result.json").write_text("null")
    (tmp_path / "runs/1/env.json").write_text('{"device": "gpu"}')
    assert compare.main([f"{tmp_path}/runs", f"to={tmp_path}/x.md"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "run.yaml can't be read (its document 1 is not complete: config.training.steps is None" in said
    assert "1: result.json is damaged and not used: it is None" in said


POINT = {"event": "point", "id": "a", "directory": "a", "overrides": ["x=1"], "steps": 3, "devices": 1, "asked": ""}
OLD_POINT = {key: value for key, value in POINT.items() if key != "asked"}
EVENTS = [
    POINT | {"directory": "../../victim"}, POINT | {"directory": "/etc"}, POINT | {"steps": None}, POINT | {"id": 7},
    {"event": "sent", "jobs": {"a": ["../../x"]}}, {"event": "sent", "jobs": None}, {"event": "ended", "id": "a"}, None,
]  # fmt: skip


@pytest.mark.parametrize(
    "event", select_cases([pytest.param(event, id=str(number)) for number, event in enumerate(EVENTS)], ("1", "2", "5"))
)
def test_a_ledgers_line_of_other_types_is_left_out_and_told(
    event: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.add_events(tmp_path, POINT)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (tmp_path / "sweep.yaml").write_text("margin: wide")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 2, "loss": 3.0}\n{"step": null, "loss": "low"}\nnull\n')
    assert status.main([str(tmp_path), "watch=false"]) == 0
    said = capsys.readouterr().out
    assert "ledger.jsonl: 1 line is damaged or cut short, and not used" in said
    assert "sweep.yaml can't be read, and is not used: sweep.margin=wide: must be a number" in said
    assert re.search(r"x=1 +planned +2/3 +3\.0000", said)


def test_the_ledger_of_another_commit_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "runs/grid"
    sweep.mkdir(parents=True)
    ledger.add_events(sweep, OLD_POINT)
    for command, words in ((status, ["watch=false"]), (compare, ["to=[]"])):
        assert command.main([str(sweep), *words]) == 2
        sentence = " ".join(capsys.readouterr().err.split())
        assert "another commit of titan wrote ledger.jsonl (a line has no 'asked')" in sentence
    make_run(tmp_path / "runs/0", Story(), "parallelism=single")
    assert compare.main([f"{tmp_path}/runs", "to=[]"]) == 0
    assert "another commit of titan wrote ledger.jsonl" in " ".join(capsys.readouterr().out.split())
