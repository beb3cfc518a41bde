"""What W&B receives of a run, by a module in its place."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.support.runs import begin_run, build_run_mixture, compose_tiny_run
from titan.dataset.loader import Batch
from titan.metrics.recorder import Recorder
from titan.metrics.schema import WARM
from titan.metrics.trackers import Trackers
from titan.run import identity
from titan.run.attempts import Attempt
from titan.training import reporter
from titan.training.step_metrics import (
    LOSS,
    PAIRS,
    REQUEUE,
    SAVE,
    STOP,
    VALID,
    VOID,
    StepTimes,
    format_batch_hash,
    pack_metrics,
)


class FakeWandb(types.ModuleType):
    """A module that keeps what it gets, and is the run that it starts."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.settings: dict[str, Any] = {}
        self.started: dict[str, Any] = {}
        self.updated: list[Mapping[str, Any]] = []
        self.logged: list[Mapping[str, Any]] = []
        self.finished = False
        self.summary: dict[str, Any] = {}
        self.config = types.SimpleNamespace(update=self._update)

    def Settings(self, **values: Any) -> None:
        self.settings |= values

    def setup(self, settings: object) -> None:
        pass

    def init(self, **values: Any) -> FakeWandb:
        self.started = values
        return self

    def _update(self, values: Mapping[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change
        self.updated.append(values)

    def define_metric(self, *names: str, **values: Any) -> None:
        pass

    def log(self, values: Mapping[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("titan.metrics.trackers._is_installed", lambda package: True)
    return fake


@pytest.mark.full
def test_wandb_receives_what_identifies_a_run(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "describe_code", lambda *args: {"commit": "c0ffee", "diff": "d1ff"})
    (tmp_path / "grid" / "first").mkdir(parents=True)
    axes = {"schedule": ["wsd", "cosine"], "optimizer.lr": ["0.1", "0.2"], "training.seed": ["0", "1"]}
    (tmp_path / "grid" / "sweep.yaml").write_text(yaml.safe_dump({"question": None, "axes": axes}))
    run = compose_tiny_run(
        tmp_path / "grid" / "first", "metrics.wandb=true", "metrics.wandb_tags=[paper,second try]",
        "metrics.wandb_finish_minutes=3", "schedule=cosine", "optimizer.lr=0.1", "training.seed=1",
    )  # fmt: skip
    attempt, mix = begin_run(run), build_run_mixture(run)
    assert isinstance(attempt, Attempt)
    recorder = reporter.build_recorder(run, attempt, print, mix)
    recorder.log({"step": 1, "loss": 2.0})
    recorder.finish({"finished": True, "last_loss": 2.0})
    config, started = wandb.started["config"], wandb.started
    assert wandb.updated == [config] and wandb.finished and wandb.summary == {"result/last_loss": 2.0}
    assert wandb.logged == [{"step": 1, "train/loss": 2.0}]
    assert (started["id"], started["group"]) == (attempt.run_id, attempt.ids.group)
    assert started["tags"] == ["paper", "second try", "grid", "one device"]
    assert wandb.settings["finish_timeout"] == 180
    assert config["optimizer"]["lr"] == 0.1 and config["choices"]["schedule"] == "cosine"
    assert config["kinds"]["schedule"] == "titan.schedule.Cosine" and config["kinds"]["model"].endswith("Llama")
    assert set(config["ids"]) == {"science", "group", "execution", "code"}
    assert (config["commit"], config["diff"], config["parameters"]) == ("c0ffee", "d1ff", run.model.parameters())
    assert config["data"] == mix.sources[0].corpus.digest
    assert (config["sweep"], config["variant"]) == ("grid", "optimizer.lr=0.1 schedule=cosine")


@pytest.mark.full
def test_a_run_of_its_own_has_its_own_group_and_no_sweep(tmp_path: Path, wandb: FakeWandb) -> None:
    (tmp_path / "single").mkdir()
    run = compose_tiny_run(tmp_path / "single", "metrics.wandb=true", "metrics.wandb_group=mine")
    run = replace(run, overrides=("recipe=pilot", *run.overrides))
    attempt = begin_run(run)
    assert isinstance(attempt, Attempt)
    reporter.build_recorder(run, attempt, print, build_run_mixture(run)).finish({"finished": True})
    assert (wandb.started["group"], wandb.started["tags"]) == ("mine", ["recipe=pilot", "one device"])
    assert (wandb.started["config"]["sweep"], wandb.started["config"]["variant"]) == (None, None)


def test_a_continued_run_stays_in_the_group_of_its_first_attempt(tmp_path: Path) -> None:
    first, longer = (compose_tiny_run(tmp_path / "run", f"training.steps={steps}") for steps in (3, 5))
    (tmp_path / "run").mkdir()
    groups = []
    for run in (first, longer):
        attempt = begin_run(run)
        assert isinstance(attempt, Attempt)
        groups.append((reporter.describe_run(run, attempt, None).group_id, attempt.ids.group))
    (shown, own), (later_shown, later_own) = groups
    assert shown == own == later_shown != later_own


class Hurries(Trackers):
    """Trackers that keep whether the end was in a hurry."""

    def __init__(self) -> None:
        super().__init__({}, print)
        self.seen: list[bool] = []

    def finish(self, result: Mapping[str, Any], *, hurry: bool = False) -> None:
        self.seen.append(hurry)


def test_only_a_finished_run_waits_for_uploads(tmp_path: Path) -> None:
    trackers = Hurries()
    recorder = Recorder(tmp_path, 1, trackers, print)
    recorder.finish({"finished": True})
    recorder.finish({"finished": False})
    recorder.close()
    assert trackers.seen == [False, True, True]


def batch(number: int, void: bool = False) -> Batch:
    return Batch(np.zeros((2, 1, 1, 4), np.int32), 0, 0, 1, number, valid=3, pairs=16, void=void)


def test_the_sum_over_ranks_has_every_request_and_the_batch_hash() -> None:
    numbers = [2**64 - 1, 5, 2**63 + 12345]
    requests = [(True, False, False), (False, False, True), (True, True, False)]
    parts = [
        pack_metrics(torch.tensor(0.5), batch(n), torch.zeros(()), (*asked, False, False), np.zeros(0))
        for n, asked in zip(numbers, requests, strict=True)
    ]
    total = torch.stack(parts).sum(0).tolist()
    assert [total[i] for i in (LOSS, STOP, REQUEUE, SAVE, VOID, VALID, PAIRS)] == [1.5, 2, 1, 1, 0, 9, 48]
    assert format_batch_hash(total) == f"{sum(numbers) % 2**64:016x}"


def test_a_void_batch_asks_to_stop() -> None:
    zero, void = torch.zeros(()), batch(0, void=True)
    values = pack_metrics(zero, void, zero, (False,) * 5, np.zeros(0)).tolist()
    assert (values[STOP], values[VOID]) == (1, 1)


def test_the_median_leaves_out_the_first_steps() -> None:
    times = StepTimes()
    assert (times.find_median(), times.compute_data_wait()) == (None, None)
    for _ in range(WARM):
        times.add(100.0, 1.0, 0.0)
    assert times.find_median() == (100.0, 1.0)
    for seconds in (1.0, 3.0, 2.0):
        times.add(seconds, 10 * seconds, 0.0)
    assert times.find_median() == (2.0, 20.0)


def test_the_share_of_waiting_is_over_the_same_steps() -> None:
    """Waiting of all steps over the time of the latest ones would grow above one."""
    times = StepTimes(latest=4)
    for waited in (*[2.0] * 40, *[0.5] * 4):
        times.add(2.0, 1.0, waited)
    assert times.compute_data_wait() == pytest.approx(0.25)
