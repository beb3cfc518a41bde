"""The user's own runs refine a plan: which count, and what they change."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import made_runs
from tests.support.composing import compose_test_run
from tests.support.made_runs import Story, StoryAttempt, make_run
from tests.support.runs import TINY
from tests.support.runs import train_run as train_ranks
from titan import plan
from titan.errors import ConfigError
from titan.estimate import plan as planning
from titan.estimate.step_time import COMMUNICATION, sum_groups
from titan.report import own_runs
from titan.report.collect import collect_runs
from titan.run.run import Run

HARDWARE = (
    "cluster.hardware.fp32_tflops=1", "cluster.hardware.memory_gb_per_second=50",
    "cluster.hardware.link_gb_per_second=0.5", "cluster.hardware.link_microseconds=200",
)  # fmt: skip
LAYOUTS = {
    "single": ("parallelism=single",),
    "wide": ("parallelism=single", "model.ffn=256"),
    "fsdp": ("parallelism=fsdp",),
    "ddp": ("parallelism=ddp", "model.ffn=128"),
    "pp": ("parallelism=pp", "parallelism.microbatches=4"),
}


@cache
def planned_run(*overrides: str) -> Run:
    return compose_test_run([*TINY, "evaluation.tokens=1024", *HARDWARE, *overrides, "hydra.run.dir=/nowhere"])


@cache
def step(name: str) -> dict[str, float]:
    """The predicted seconds of a layout by group of causes."""
    run = planned_run(*LAYOUTS[name])
    return sum_groups(planning.build_plan(run, run.layout, run.microbatches, run.machine).step.parts)


def taken(name: str, computation: float, communication: float) -> float:
    parts = step(name)
    other = parts[COMMUNICATION]
    return computation * (sum(parts.values()) - other) + communication * other


def device() -> dict[str, Any]:
    return dataclasses.asdict(planned_run().machine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that compute half as fast and communicate twice as fast as predicted; none recorded any hardware."""
    place = tmp_path_factory.mktemp("runs")
    for name, overrides in LAYOUTS.items():
        make_run(place / name, Story(seconds=taken(name, 2.0, 0.5), jitter=0.0, device=device()), *overrides)
    return place


def test_runs_determine_the_factors(folder: Path) -> None:
    assert step("fsdp")[COMMUNICATION] > 0.2 * step("fsdp")["computation"]
    runs = own_runs.read(str(folder), planned_run())
    found = runs.fit_refinement()
    assert (len(runs.samples), found.devices, runs.unused) == (5, 2, ())
    assert found.factors.computation == pytest.approx(2.0, rel=1e-3)
    assert found.factors.communication == pytest.approx(0.5, rel=1e-2)
    assert found.time.before > 0.2 and found.time.after < 1e-3
    assert found.memory is not None and found.factors.memory > 1


@pytest.mark.full
def test_a_plan_with_own_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*TINY, *HARDWARE, "parallelism=fsdp", f"to={tmp_path}/plan.json", f"plan.fit={folder}"]
    assert plan.main(given) == 0
    out = capsys.readouterr().out
    assert f"fit          5 of 5 runs in {folder}: computation x2, communication x0.5, memory x" in out
    assert "step time" in out and "after (median), each run left out" in out
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["step_seconds"]["value"] == pytest.approx(taken("fsdp", 2.0, 0.5), rel=1e-2)
    assert content["step_seconds"]["high"] == pytest.approx(1.02 * content["step_seconds"]["value"])
    assert content["fit"]["runs"] == 5


@pytest.mark.full
def test_a_sweep_is_refined_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["-m", *TINY, *HARDWARE, "parallelism=single,fsdp", "name=two", f"plan.fit={folder}"]
    assert plan.main(given) == 0
    out = capsys.readouterr().out
    assert out.count("5 of 5 runs") == 1 and f"{taken('single', 2.0, 0.5):.3g} s" in out


OTHERS = {
    "another device": (Story(device=made_runs.H200), (), "ran on NVIDIA H200, not "),
    "another type": (Story(), ("precision=bf16",), "computed in bf16, not fp32"),
    "not finished": (Story(attempts=(StoryAttempt(0, 20),)), (), "is not finished (stopped)"),
    "too short": (Story(steps=5), (), "has fewer than 3 timed steps"),
    "growing batch": (Story(), ("training.grow=[[10,256]]",), "its batch grows"),
}


@pytest.mark.full
def test_runs_of_another_kind_are_listed_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "usable", Story(device=device()))
    for name, (story, overrides, _) in OTHERS.items():
        here = story if name == "another device" else dataclasses.replace(story, device=device())
        make_run(tmp_path / name, here, *overrides)
    runs = own_runs.read(str(tmp_path), planned_run())
    assert len(runs.samples) == 1
    unused = dict(runs.unused)
    assert unused.keys() == OTHERS.keys()
    for name, (_, _, reason) in OTHERS.items():
        assert unused[name].startswith(reason), name
    assert "  not used   too short: has fewer than 3 timed steps" in own_runs.format_fit(runs, runs.fit_refinement())


def test_runs_that_shared_a_machine_do_not_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, Story(device=device(), host="here"))
    runs = own_runs.read(str(tmp_path), planned_run())
    assert not runs.samples and "another run used its machine" in runs.unused[0][1]


@pytest.mark.parametrize(
    ("made_so", "sentence"),
    [
        pytest.param({"device": made_runs.H200}, r"plan\.fit=.*: no run can be used \(run: ran on .*; give", id="kind"),
        pytest.param(None, r"plan\.fit=.*: contains no run", id="empty"),
    ],
)
def test_without_a_usable_run_the_plan_is_rejected(
    made_so: dict[str, Any] | None, sentence: str, tmp_path: Path
) -> None:
    if made_so is not None:
        make_run(tmp_path / "run", Story(**made_so))
    with pytest.raises(ConfigError, match=sentence):
        own_runs.read(str(tmp_path), planned_run()).fit_refinement()


@pytest.mark.full
def test_models_optimizers_and_masks_are_those_of_the_run(tmp_path: Path) -> None:
    overrides = ("model=qwen3_debug", "optimizer=muon", "dataset.mask_documents=true")
    make_run(tmp_path / "run", Story(device=device()), *overrides)
    (raw,) = collect_runs([tmp_path / "run"]).runs
    run = planned_run(*overrides)
    recipe = own_runs.rebuild_recipe(raw, run.cluster.hardware)
    for axis in ("model", "optimizer", "precision", "parallelism", "memory", "compile"):
        assert getattr(recipe, axis) == getattr(run, axis), axis
    assert recipe.dataset.mask_documents


@pytest.mark.full
def test_a_trained_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compose_test_run([*TINY, *HARDWARE, "training.steps=12", f"hydra.run.dir={tmp_path}/run"])
    train_ranks(run)
    runs = own_runs.read(str(tmp_path / "run"), run)
    found = runs.fit_refinement()
    assert found.time.after == pytest.approx(0, abs=1e-6) and not found.time.left_out
    assert plan.main([*TINY, *HARDWARE, f"plan.fit={tmp_path}/run"]) == 0
    (sample,) = runs.samples
    assert f"step         {sample.seconds:.3g} s" in capsys.readouterr().out
