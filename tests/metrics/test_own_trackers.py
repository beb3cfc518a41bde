"""Trackers of other classes, which `metrics.trackers` names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import own_trackers
from tests.support.composing import compose_test_run
from tests.support.runs import begin_run, build_run_mixture, compose_tiny_run, train_run
from titan.errors import ConfigError
from titan.metrics import trackers
from titan.metrics.schema import Metrics, Tracker
from titan.metrics.tracker_run import RunDescription
from titan.metrics.trackers import open_trackers
from titan.run.attempts import Attempt
from titan.run.identity import list_uses
from titan.training import reporter

MODULE = "tests.support.own_trackers"


def named(cls: str, **values: object) -> str:
    """The override that adds a tracker."""
    return f"+metrics.trackers.mine={{_target_:{MODULE}.{cls}{''.join(f',{k}:{v}' for k, v in values.items())}}}"


@pytest.mark.full
def test_a_tracker_gets_every_record_and_resumes_by_the_runs_id(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "modules=[tests]", named("Lines", file="mine.jsonl"))
    attempt, mix = begin_run(run), build_run_mixture(run)
    assert isinstance(attempt, Attempt)
    warnings: list[str] = []
    for number, steps in ((1, (1, 2)), (2, (2, 3))):
        resumed = dataclasses.replace(attempt, number=number)
        recorder = reporter.build_recorder(run, resumed, warnings.append, mix)
        for step in steps:
            recorder.log({"step": step, "loss": 1.0 / step})
        recorder.finish({"finished": number == 2})
    lines = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert lines == [
        {"run_id": attempt.run_id, "attempt": 1}, {"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.5},
        {"result": {"finished": False}},
        {"run_id": attempt.run_id, "attempt": 2}, {"step": 2, "train/loss": 0.5}, {"step": 3, "train/loss": 1 / 3},
        {"result": {"finished": True}},
    ]  # fmt: skip
    assert warnings == ["writes mine.jsonl"] * 2


def test_the_code_of_a_tracker_is_the_users_own(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "modules=[tests]", named("Lines"))
    assert list_uses(run) == {"tests": ("metrics.trackers.mine",)}


REFUSED = {
    "not trusted": ("+metrics.trackers.mine={_target_:elsewhere.Lines}",
                    "metrics.trackers.mine._target_=elsewhere.Lines: only classes under titan, experiments, tests may "
                    "be named; if you trust this one, add modules=[elsewhere]."),
    "no such class": (named("No"), f"metrics.trackers.mine._target_={MODULE}.No: no such class (module '{MODULE}' has "
                      "no attribute 'No'); correct the name."),
    "no tracker": ("+metrics.trackers.mine={_target_:tests.support.own_hooks.Norms}",
                   "metrics.trackers.mine._target_=tests.support.own_hooks.Norms: is no titan.metrics.schema.Tracker; "
                   "derive it from that class."),
    "no such setting": (named("Lines", fil="x"), "metrics.trackers.mine.fil=x: there is no such setting; did you mean "
                        "'metrics.trackers.mine.file'?"),
    "range": (named("Lines", finish_minutes=0), "metrics.trackers.mine.finish_minutes=0: must be above 0."),
    "no class": ("+metrics.trackers.mine.finish_minutes=1",
                 "metrics.trackers.mine._target_ is missing: it names the class, such as mine.module.Class."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    override, sentence = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        compose_test_run(["modules=[tests]", override])
    assert str(caught.value) == sentence


def log_one(tmp_path: Path, tracker: Tracker, warnings: list[str]) -> None:
    metrics = Metrics(trackers={"mine": tracker})
    about = RunDescription(run_id="abc", group_id="group", name="x", config={}, facts={"attempt": 1})
    opened = open_trackers(metrics, directory=tmp_path, description=about, warn=warnings.append)
    opened.log({"step": 1, "loss": 1.0})
    opened.finish({"finished": True})


@pytest.fixture
def release() -> Iterator[None]:
    own_trackers.RELEASE.clear()
    yield
    own_trackers.RELEASE.set()


FAILING: dict[str, tuple[Tracker, str]] = {
    "hangs": (own_trackers.Hangs(finish_minutes=0.2 / 60),
              "it did not close within 0.2 s of the end of the run; the run continues without it."),
    "raises": (own_trackers.Raises(), "no such service; the run continues without it."),
    "lacks its package": (own_trackers.Lacks(), "the package no-such-package is not installed "
                          "(pip install no-such-package); continuing without it."),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
@pytest.mark.usefixtures("release")
def test_a_tracker_that_fails_is_one_warning(case: str, tmp_path: Path) -> None:
    tracker, warning = FAILING[case]
    warnings: list[str] = []
    log_one(tmp_path, tracker, warnings)
    assert warnings == [f"metrics.trackers.mine: {warning}"]


@pytest.mark.full
def test_a_tracker_without_its_package_is_named_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_run(compose_tiny_run(tmp_path / "run", "training.steps=1", "modules=[tests]", named("Lacks")))
    lines = capfd.readouterr().out.splitlines()
    assert sum("metrics.trackers.mine: the package no-such-package is not installed" in line for line in lines) == 1


def test_the_end_of_a_finished_run_waits_as_long_as_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[Any] = []
    monkeypatch.setattr(trackers, "Trackers", lambda openers, warn, longer_patience: patience.append(longer_patience))
    chosen = Metrics(trackers={"mine": own_trackers.Lines(finish_minutes=2), "other": own_trackers.Lines()})
    about = RunDescription(run_id="abc", group_id="group", name="x", config={})
    open_trackers(chosen, directory=tmp_path, description=about, warn=print)
    assert patience == [{"metrics.trackers.mine": 120.0, "metrics.trackers.other": 300.0}]
