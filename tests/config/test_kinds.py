"""Classes by kinds: ids and the files of runs do not depend on the module of a class."""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import tests.slurm.faults  # noqa: F401 -- before classes move: it derives from one
from tests.support.machines import make_detector
from tests.support.runs import read_step_records, train_run
from tests.support.tiers import select_cases
from titan import compare, status
from titan.checkpoint import manifest
from titan.cluster import devices
from titan.config import kinds
from titan.model.schema import Qwen3
from titan.report.collect import collect_runs
from titan.run import identity
from titan.run.compose import compose_run
from titan.run.directory import read_attempts
from titan.run.hydra_session import CONF
from titan.run.run import as_model
from titan.weights.formats import compute_digest, open_weights
from titan.weights.origin import build_model

DATA = Path(__file__).parents[1] / "data"
IDS: list[dict[str, str]] = yaml.safe_load((DATA / "ids.yaml").read_text())
SHAPE = (
    "dataset=synthetic", "dataset.tokens=4096", "dataset.vocab=32", "model.dim=16", "model.layers=1", "model.heads=2",
    "model.kv_heads=1", "model.ffn=16", "model.vocab=32", "training.seq_len=16", "training.global_batch=64",
    "precision=fp32", "metrics.plot=false", "evaluation.tokens=64", "cluster=cpu", "checkpoint.keep=1",
)  # fmt: skip
"""What the runs have in common."""
RUNS = {
    "llama-adamw": (),
    "qwen3-muon": ("model=qwen3_debug", "model.head_dim=8", "optimizer=muon"),
}


class Gone:
    """What is found where a class was before it moved."""


def move(name: str, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Move and rename the class of a kind, as a refactoring would: it, and a line of the table; gives the undo."""
    module, _, own = kinds.PATHS.get(name, name).rpartition(".")
    old, new = importlib.import_module(module), importlib.import_module("titan.moved")
    cls = getattr(old, own)
    vars(new).update({**vars(old), **vars(new), f"New{own}": cls})  # annotations are looked up there
    call(cls, new.__name__, f"New{own}")
    patch.setattr(old, own, Gone)
    patch.setitem(kinds.PATHS, name, f"{new.__name__}.New{own}")
    return partial(call, cls, module, own)


def call(cls: type, module: str, name: str) -> None:
    """Give a class another name."""
    cls.__module__, cls.__qualname__, cls.__name__ = module, name, name


@pytest.fixture(params=["here", "moved"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All classes of titan in their present places, or all in another module under other names."""
    with ExitStack() as undo:
        if request.param == "moved":
            monkeypatch.setitem(sys.modules, "titan.moved", types.ModuleType("titan.moved"))
            for name in kinds.PATHS:
                undo.callback(move(name, monkeypatch))
        yield request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that were trained with all classes in their present places."""
    root = tmp_path_factory.mktemp("trained")
    for name, overrides in RUNS.items():
        (seen,) = train_run(compose_run([*SHAPE, *overrides, "training.steps=3", f"hydra.run.dir={root / name}"]))
        assert seen.code == 0, seen.failure
    return root


@pytest.fixture(scope="module")
def digests(trained: Path) -> dict[str, str]:
    """The digests of their weights, which are part of the science of runs that start from them."""
    return {name: compute_digest(open_weights(str(trained / name / "checkpoints" / "step-3"))) for name in RUNS}


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained runs."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


QUICK = (
    "here-cpu model=qwen3_debug model.tied=false optimizer=sgd training.seq_len=256",
    "here-gpu compile=off model=llama8b dataset=c4 parallelism=fsdp precision=float8 training.seq_len=8192 "
    "training.global_batch=131072",
    "moved-cpu training.seed=3",
    "moved-cpu model=qwen3_debug optimizer=muon",
)


def rows() -> list[Any]:
    """All lines with classes in their present places, and some with classes that moved."""
    names = {f"{where}-{row['machine']} {row['line']}": (where, row) for row in IDS for where in ("here", "moved")}
    return [pytest.param(*names[id], id=id) for id in names if id.startswith("here") or id in QUICK]


@pytest.mark.parametrize(("where", "row"), select_cases(rows(), QUICK), indirect=["where"])
def test_ids_are_what_they_were(row: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector(row["machine"]))
    run = compose_run(["name=x", *row["line"].split()])
    ids = identity.compute_ids(run, identity.collect_science(run, "d", None))
    assert {"science": ids.science, "group": ids.group, "execution": ids.execution} == {
        key: row[key] for key in ("science", "group", "execution")
    }


@pytest.mark.full
@pytest.mark.parametrize(("where", "name"), [("here", "llama-adamw"), ("moved", "qwen3-muon")], indirect=["where"])
def test_a_run_goes_on(name: str, where: str, runs: Path) -> None:
    directory = runs / name
    before = manifest.inspect(directory / "checkpoints" / "step-3")
    run = compose_run([*SHAPE, *RUNS[name], "training.steps=4", f"hydra.run.dir={directory}"])
    (seen,) = train_run(run)
    documents = read_attempts(directory)
    assert seen.code == 0 and [d["kind"] for d in documents] == ["start", "continuation"]
    assert documents[1]["from_step"] == 3 and [line["step"] for line in read_step_records(run)] == [1, 2, 3, 4]
    first, second = (d["science"] for d in documents)
    assert first | {"training.steps": 4} == second
    saved = manifest.inspect(directory / "checkpoints" / "step-4")
    assert saved and before and saved.model == as_model(run) == before.model


def test_a_run_and_its_checkpoint_name_their_model(where: str, runs: Path) -> None:
    directory = runs / "qwen3-muon"
    found = manifest.inspect(directory / "checkpoints" / "step-3")
    assert found and type(build_model(found, "it")) is Qwen3
    assert type(collect_runs([directory]).runs[0].model) is Qwen3


@pytest.mark.parametrize("name", RUNS)
def test_the_digest_of_weights_is_what_it_was(name: str, digests: dict[str, str], where: str, runs: Path) -> None:
    weights = open_weights(str(runs / name / "checkpoints" / "step-3"))
    assert compute_digest(weights) == digests[name]


def test_runs_are_compared_and_shown(where: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(runs / name) for name in RUNS]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "model (debug, qwen3_debug); optimizer (adamw, muon)" in shown and "0.015 below that of" in shown
    for name in RUNS:
        assert status.main([str(runs / name)]) == 0
        assert "finished" in capsys.readouterr().out


def test_all_classes_that_conf_names_have_kinds() -> None:
    named = {yaml.safe_load(file.read_text()).get("_target_") for file in Path(CONF).rglob("*.yaml")} - {None}
    assert named and {name for name in named if name not in kinds.PATHS} == set()


def test_each_kind_has_a_class_of_its_own() -> None:
    for name, place in kinds.PATHS.items():
        module, _, own = place.rpartition(".")
        assert kinds.get_kind(getattr(importlib.import_module(module), own)) == name


def test_a_class_of_the_user_is_named_by_its_path() -> None:
    @dataclass
    class Mine:
        pass

    assert kinds.get_kind(Mine) == f"{__name__}.{Mine.__qualname__}"
