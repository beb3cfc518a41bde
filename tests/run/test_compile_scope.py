"""What compile=auto comes to: on this machine, on the machines of a job, and in the ids of a grid's points."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.tiers import full
from titan.cluster import devices
from titan.cluster.compiler import find_missing_compiler
from titan.errors import ConfigError
from titan.run import compile_scope, identity
from titan.run.compile_scope import estimate_eager_seconds
from titan.run.resolve import adapt_to_machine
from titan.run.run import Run

LONG, SHORT = "training.steps=100000", "training.steps=20"
DOCUMENTS, FLOAT8 = "dataset.mask_documents=true", ("precision=float8", "precision.emulate=true")
ZBV = ("parallelism=pp", "parallelism.schedule=ZBVZeroBubble")


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, all compilers and triton."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    programs("g++", "gcc", monkeypatch=monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name)


def programs(*names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *rest: f"/usr/bin/{name}" if name in names else None)


def on(kind: str, *overrides: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Run:
    monkeypatch.setattr(devices, "detect_machine", make_detector(kind))
    return compose_test_run(overrides, **how)


CHOSEN = [
    full("cpu", (SHORT,), "off", "compiling pays above 5 minutes", id="short"),
    full("cpu", (LONG,), "model", "hours on one CPU device", id="long"),
    full("cpu", (LONG, "compile.backend=aot_eager"), "model", "on one CPU device", id="other-backend"),
    full("cpu", (LONG, "parallelism=ddp"), "block", "hours; blocks, for 2 ranks", id="ranks"),
    full("cpu", (LONG, "memory=full"), "block", "blocks, for memory=full", id="full"),
    full("cpu", (LONG, "memory=selective"), "block", "blocks, for memory=selective", id="selective"),
    full("cpu", (LONG, DOCUMENTS), "block", "blocks, for dataset.mask_documents", id="documents"),
    full("cpu", (LONG, *FLOAT8), "block", "blocks, for precision=float8", id="float8"),
    full("cpu", (LONG, "model.layers=12"), "model", "on one CPU device", id="twelve-layers"),
    full("cpu", (LONG, "model.layers=13"), "block", "take long to compile at once", id="many-layers"),
    full("cpu", (LONG, "model.dim=1024", "model.vocab=32768"), "block", "no faster for a model of this size", id="big"),
    full("cpu", (SHORT, DOCUMENTS), "off", "compiling pays above 5 minutes", id="short-documents"),
    pytest.param("cpu", (LONG, "debug.detect_anomaly=true"), "off", "debug.detect_anomaly", id="anomaly"),
    full("cpu", (SHORT, "memory=budget"), "block", "memory=budget", id="budget"),
    full("cpu", (LONG, *ZBV), "block", "hours; blocks, for 2 ranks", id="zero-bubble"),
    full("gpu", (SHORT,), "block", "on a GPU", id="gpu"),
    full("gpu", (SHORT, "debug.detect_anomaly=true"), "off", "debug.detect_anomaly", id="gpu-anomaly"),
    full("cpu", (LONG, "compile=off"), "off", "", id="said-off"),
    full("gpu", ("compile=off",), "off", "", id="gpu-said-off"),
    pytest.param("cpu", (SHORT, "compile=block"), "block", "", id="said-block"),
]


@pytest.mark.parametrize(("kind", "overrides", "scope", "why"), CHOSEN)
def test_what_is_chosen(
    kind: str, overrides: tuple[str, ...], scope: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on(kind, *overrides, monkeypatch=monkeypatch)
    assert (run.compile.scope, bool(run.compile_why)) == (scope, bool(why))
    assert run.compile_why.endswith(why)


NO_CXX = "no C++ compiler (g++) in PATH"
NO_C = "no C compiler (gcc or clang) in PATH"
LACKING = [
    full("cpu", ("g++",), {}, None, id="g++"),
    full("cpu", ("c++", "clang++", "gcc"), {}, NO_CXX, id="others-are-not-tried"),
    full("cpu", ("clang++",), {"CXX": "clang++"}, None, id="CXX"),
    full("cpu", ("g++",), {"CXX": "icpx"}, "no C++ compiler (icpx) in PATH", id="no-CXX"),
    full("gpu", ("gcc",), {}, None, id="gcc"),
    full("gpu", ("clang",), {}, None, id="clang"),
    full("gpu", ("g++",), {}, NO_C, id="no-gcc"),
    pytest.param("gpu", ("gcc",), {"CC": "icx"}, "no C compiler (icx) in PATH", id="no-CC"),
]


@pytest.mark.parametrize(("kind", "there", "variables", "why"), LACKING)
def test_compilers_that_it_takes(
    kind: str, there: tuple[str, ...], variables: dict[str, str], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(*there, monkeypatch=monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = make_detector(kind)()
    assert find_missing_compiler(machine, "inductor") == why
    for backend, elsewhere in (("inductor", True), ("aot_eager", False), ("eager", False)):
        assert find_missing_compiler(machine, backend, elsewhere) is None
    run, where = on(kind, LONG, monkeypatch=monkeypatch), "model" if kind == "cpu" else "block"
    assert (run.compile.scope, run.compile_why) == ("off", why) if why else run.compile.scope == where
    if why:
        with pytest.raises(ConfigError, match=re.escape(why)):
            on(kind, LONG, "compile=block", monkeypatch=monkeypatch)


def test_gpus_that_triton_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_detector("gpu")()
    for capability, why in ((6.1, "compute capability 6.1, but triton needs 7.0 or higher"), (7.0, ""), (None, "")):
        found = find_missing_compiler(dataclasses.replace(machine, capability=capability), "inductor")
        assert (found or "").endswith(why) and bool(found) == bool(why)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert on("gpu", monkeypatch=monkeypatch).compile_why == "triton is not installed"


WAYS_OUT = [
    full(("memory=budget",), ("memory=selective", "compile=off"), id="budget"),
    full(("memory=budget", "compile=block"), ("memory=selective", "compile=off"), id="budget-said"),
    full(("memory=budget", *ZBV), ("memory=full", "compile=off"), id="budget-zero-bubble"),
    full(("compile=model",), ("compile=off",), id="said"),
]


@pytest.mark.parametrize(("overrides", "ways"), WAYS_OUT)
def test_a_refusal_without_a_compiler_has_a_way_out(
    overrides: tuple[str, ...], ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match=f"or give {' '.join(ways)}"):
        on("cpu", LONG, *overrides, monkeypatch=monkeypatch)
    kept = [o for o in overrides if o.partition("=")[0] not in {way.partition("=")[0] for way in ways}]
    assert on("cpu", LONG, *kept, *ways, monkeypatch=monkeypatch).compile.scope == "off"


ANOMALY = "debug.detect_anomaly="


@pytest.mark.parametrize("scope", [full("auto"), "off", full("block")])
def test_a_budget_and_anomalies_have_a_way_out(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("memory=budget", f"compile={scope}")
    with pytest.raises(ConfigError, match=f"give {ANOMALY}false, or memory=selective with compile=off"):
        on("cpu", *both, f"{ANOMALY}true", monkeypatch=monkeypatch)
    assert on("cpu", "memory=selective", "compile=off", f"{ANOMALY}true", monkeypatch=monkeypatch)


@pytest.mark.full
def test_schedules_that_older_torch_can_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_scope, "read_torch_version", lambda: (2, 11))
    assert on("gpu", *ZBV, "parallelism.pipeline=2", monkeypatch=monkeypatch).compile.scope == "off"
    assert on("gpu", "parallelism=fsdp", monkeypatch=monkeypatch).compile.scope == "block"
    job = on("cpu", *ZBV, "cluster=h100", "parallelism.pipeline=2", monkeypatch=monkeypatch, remote=True)
    assert job.compile.scope == "block"
    monkeypatch.setattr(compile_scope, "read_torch_version", tuple)  # there is none
    assert on("gpu", *ZBV, "parallelism.pipeline=2", monkeypatch=monkeypatch).compile.scope == "block"


@pytest.mark.full
def test_ranks_that_share_cores_compile_later(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = "training.steps=2000"  # about 7 on four cores
    assert on("cpu", minutes, monkeypatch=monkeypatch).compile.scope == "model"
    assert on("cpu", minutes, "parallelism=ddp", "cluster.devices=16", monkeypatch=monkeypatch).compile.scope == "off"


@pytest.mark.full
def test_the_measured_job_takes_about_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    run = on("cpu", "precision=fp32", monkeypatch=monkeypatch)
    assert estimate_eager_seconds(run) == pytest.approx(200 * 2048 / 3100 / 2, rel=0.1)  # four cores, not two


@pytest.mark.full
def test_what_a_core_does_follows_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*overrides: str, fast: bool) -> float:
        run = on("cpu", "precision=bf16", *overrides, monkeypatch=monkeypatch)
        return estimate_eager_seconds(
            dataclasses.replace(run, machine=dataclasses.replace(run.machine, bf16_fast=fast))
        )

    slow, fast = seconds(fast=False), seconds(fast=True)
    assert slow / fast == pytest.approx(90 / 55)
    assert seconds("precision=float8", "precision.emulate=true", fast=True) == pytest.approx(10 * fast)


@pytest.mark.full
def test_a_jobs_nodes_have_cores_each(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ("parallelism=ddp", "cluster.devices=16", "cluster.nodes=4", "training.steps=8000")
    run = on("cpu", *nodes, monkeypatch=monkeypatch, remote=True)
    alone = on("cpu", "training.steps=8000", monkeypatch=monkeypatch)
    assert estimate_eager_seconds(run) == pytest.approx(estimate_eager_seconds(alone) / 4)
    assert run.compile.scope == "block"  # a core for each rank, where one node has a core for four


@pytest.mark.full
def test_a_job_compiles_as_its_machines_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)  # none on the login node
    run = on("cpu", SHORT, "cluster=h100", monkeypatch=monkeypatch, remote=True)
    assert run.compile.scope == "block"
    here = adapt_to_machine(run, make_detector("gpu")("cuda"))
    assert (here.compile.scope, here.compile_why) == ("off", "triton is not installed")
    said = on("cpu", SHORT, "cluster=h100", "compile=block", monkeypatch=monkeypatch, remote=True)
    with pytest.raises(ConfigError, match="triton is not installed; fix this, or give compile=off"):
        adapt_to_machine(said, make_detector("gpu")("cuda"))


@pytest.mark.full
def test_a_point_of_a_grid_is_the_same_wherever_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    one = (SHORT, "cluster.device=auto", "precision=fp32")
    runs = [on(kind, *one, monkeypatch=monkeypatch) for kind in ("cpu", "gpu")]
    assert [run.compile.scope for run in runs] == ["off", "block"]
    assert identity.compute_trial_id(runs[0]) == identity.compute_trial_id(runs[1])
    said = [on("gpu", *one, f"compile={scope}", monkeypatch=monkeypatch) for scope in ("off", "block", "model")]
    points = {identity.compute_trial_id(run) for run in (runs[1], *said)}
    assert len(points) == 4
    settings = [identity.select_settings(run, science=True) for run in (*runs, *said)]
    assert all("compile" not in name for found in settings for name in found)
