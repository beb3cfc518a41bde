"""What compile=auto comes to: on this machine, on the machines of a job, and in the ids of a grid's points."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.machines import detector
from titan import compile as compiling
from titan import identity
from titan.cluster import devices
from titan.compose import composed
from titan.run import Run, moved
from titan.settings import Refusal

LONG, SHORT = "training.steps=100000", "training.steps=20"
ZBV = ("parallelism=pp", "parallelism.schedule=ZBVZeroBubble")


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, a C++ compiler and triton."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiling, "compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name)


def on(kind: str, *overrides: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Run:
    monkeypatch.setattr(devices, "detect", detector(kind))
    return composed(overrides, **how)


CHOSEN = [
    pytest.param("cpu", (SHORT,), "off", "it pays from 3 minutes on", id="short"),
    pytest.param("cpu", (LONG,), "block", "hours of work", id="long"),
    pytest.param("cpu", (LONG, "compile.backend=aot_eager"), "block", "hours of work", id="other-backend"),
    pytest.param("cpu", (LONG, "debug.detect_anomaly=true"), "off", "debug.detect_anomaly", id="anomaly"),
    pytest.param("cpu", (SHORT, "memory=budget"), "block", "memory=budget", id="budget"),
    pytest.param("cpu", (LONG, *ZBV), "block", "hours of work", id="zero-bubble"),
    pytest.param("gpu", (SHORT,), "block", "on a GPU", id="gpu"),
    pytest.param("gpu", (SHORT, "debug.detect_anomaly=true"), "off", "debug.detect_anomaly", id="gpu-anomaly"),
    pytest.param("cpu", (LONG, "compile=off"), "off", "", id="said-off"),
    pytest.param("gpu", ("compile=off",), "off", "", id="gpu-said-off"),
    pytest.param("cpu", (SHORT, "compile=block"), "block", "", id="said-block"),
]


@pytest.mark.parametrize(("kind", "overrides", "scope", "why"), CHOSEN)
def test_what_is_chosen(
    kind: str, overrides: tuple[str, ...], scope: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on(kind, *overrides, monkeypatch=monkeypatch)
    assert (run.compile.scope, bool(run.compile_why)) == (scope, bool(why))
    assert run.compile_why.endswith(why)


def test_without_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    assert on("cpu", LONG, monkeypatch=monkeypatch).compile_why == "no C++ compiler in PATH"
    with pytest.raises(Refusal, match="install g\\+\\+"):
        on("cpu", "memory=budget", monkeypatch=monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert on("gpu", monkeypatch=monkeypatch).compile_why == "triton is not installed"


def test_schedules_that_older_torch_can_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_torch", lambda: (2, 11))
    assert on("gpu", *ZBV, "parallelism.pipeline=2", monkeypatch=monkeypatch).compile.scope == "off"
    assert on("gpu", "parallelism=fsdp", monkeypatch=monkeypatch).compile.scope == "block"


def test_ranks_that_share_cores_compile_later(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = "training.steps=2000"  # about 7 on four cores
    assert on("cpu", minutes, monkeypatch=monkeypatch).compile.scope == "block"
    assert on("cpu", minutes, "parallelism=ddp", "cluster.devices=16", monkeypatch=monkeypatch).compile.scope == "off"


def test_the_measured_job_takes_about_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    run = on("cpu", "precision=fp32", monkeypatch=monkeypatch)
    assert compiling.eager_seconds(run) == pytest.approx(200 * 2048 / 3100 / 2, rel=0.1)  # four cores, not two


def test_a_job_compiles_as_its_machines_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)  # none on the login node
    run = on("cpu", SHORT, "cluster=h100", monkeypatch=monkeypatch, elsewhere=True)
    assert run.compile.scope == "block"
    here = moved(run, detector("gpu")("cuda"))
    assert (here.compile.scope, here.compile_why) == ("off", "triton is not installed")
    said = on("cpu", SHORT, "cluster=h100", "compile=block", monkeypatch=monkeypatch, elsewhere=True)
    assert moved(said, detector("gpu")("cuda")).compile.scope == "block"


def test_a_point_of_a_grid_is_the_same_wherever_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [on(kind, SHORT, "cluster.device=auto", monkeypatch=monkeypatch) for kind in ("cpu", "gpu")]
    assert [run.compile.scope for run in runs] == ["off", "block"]
    said = [on("gpu", SHORT, f"compile={scope}", monkeypatch=monkeypatch) for scope in ("off", "block", "model")]
    points = {identity.point(run) for run in (runs[1], *said)}
    assert len(points) == 4
    settings = [identity.settings_of(run, science=True) for run in (*runs, *said)]
    assert all("compile" not in name for found in settings for name in found)
