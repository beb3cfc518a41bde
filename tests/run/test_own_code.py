"""A user's own code is part of the ids, is recorded, and goes with the jobs of a sweep."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from launchers.command import run_command
from launchers.slurm import sweep
from launchers.start import run_local
from tests.support.runs import TINY
from tests.support.tiers import full
from titan.run import identity
from titan.run.compose import compose_run
from titan.run.run import Run

MODEL = """
from dataclasses import dataclass
from titan.model.schema import Llama
from titan.hooks.schema import Hook


@dataclass(frozen=True, kw_only=True)
class Mine(Llama):
    pass


@dataclass(frozen=True, kw_only=True)
class Logs(Hook):
    def build(self):
        return self
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the user's, own_code_example, and results of a run that were written into it."""
    package = tmp_path / "own_code_example"
    (package / "runs" / "a").mkdir(parents=True)
    for name, text in {"__init__.py": "", "model.py": MODEL, "kernel.cu": "// 1", "runs/a/run.yaml": ""}.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for module in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[module]


def of(*overrides: str) -> Run:
    return compose_run(["name=x", "modules=[own_code_example]", *overrides])


def ids(run: Run) -> str:
    return identity.compute_ids(run, {}).code


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "packages"),
    [
        pytest.param("model._target_=own_code_example.model.Mine", ["own_code_example"], id="model"),
        pytest.param("+hooks.a={_target_:own_code_example.model.Logs}", ["own_code_example"], id="hook"),
        pytest.param("training.steps=3", ["own_code_example"], id="modules alone"),
    ],
)
def test_packages_that_a_run_names(override: str, packages: list[str], own: Path) -> None:
    assert list(identity.find_packages(of(override))) == packages
    assert identity.find_packages(compose_run(["name=x"])) == ()


@pytest.mark.parametrize(
    ("name", "counts"),
    [full("model.py", True), full("kernel.cu", True), ("new.py", True), full("__pycache__/a.pyc", False),
     full(".cache/a", False), full("runs/a/metrics.jsonl", False)],
    ids=str,
)  # fmt: skip
def test_every_file_of_the_package_is_in_the_code_id_alone(name: str, counts: bool, own: Path) -> None:
    run = of()
    before, plain = ids(run), ids(compose_run(["name=x"]))
    (own / name).parent.mkdir(exist_ok=True)
    with (own / name).open("a") as file:
        file.write("# more")
    assert (ids(run) != before) is counts
    assert ids(compose_run(["name=x"])) == plain != before
    assert identity.collect_science(run, "d", None) == identity.collect_science(of(), "d", None)


def taken(package: str) -> dict[str, ModuleType]:
    """Remove a package's modules from those that are imported, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An idea in a package `experiments` that is in no git repository, and is found in place of this checkout's."""
    idea, before = tmp_path / "experiments" / "own_code_example", taken("experiments")
    idea.mkdir(parents=True)
    (idea.parent / "__init__.py").write_text("")
    (idea / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield idea
    taken("experiments")
    sys.modules.update(before)


@pytest.mark.full
def test_untracked_experiments_count(experiment: Path) -> None:
    run = compose_run(["name=x", "+hooks.a={_target_:experiments.own_code_example.model.Logs}"])
    before = ids(run)
    assert identity.find_packages(run) == ("experiments",)
    (experiment / "more.py").write_text("")
    assert ids(run) != before


@pytest.mark.full
def test_a_continuation_with_changed_code_says_so(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*TINY, "model._target_=own_code_example.model.Mine", "modules=[own_code_example]"]
    asked += ["metrics.sample_tokens=0", f"hydra.run.dir={tmp_path}/run"]

    def train(steps: int) -> str:
        assert run_command([*asked, f"training.steps={steps}"], run_local) == 0
        return capsys.readouterr().out

    assert "your code" not in train(1) + train(2)
    (own / "model.py").write_text(MODEL + "\nfactor = 7\n")
    out, documents = train(3), list(yaml.safe_load_all((tmp_path / "run" / "run.yaml").read_text()))
    was, now = (document["own_code"]["own_code_example"] for document in documents[1:])
    note = f"your code has changed since attempt 2: own_code_example ({was} -> {now})"
    assert note in out and documents[2]["notes"] == [note] and was != now
    assert documents[0]["ids"]["code"] == documents[1]["ids"]["code"] != documents[2]["ids"]["code"]
    assert json.loads((tmp_path / "run" / "env.json").read_text())["code"]["own"] == documents[2]["own_code"]


def test_the_copy_for_jobs_has_the_package(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titan = tmp_path / "root" / "titan"
    titan.mkdir(parents=True)
    (titan / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(sweep, "ROOT", tmp_path / "root")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "installed_example.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    copy = sweep.copy_code(tmp_path / "s", ["own_code_example", "installed_example"])
    found = sorted(str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file())
    own_files = [f"own_code_example/{name}" for name in ("__init__.py", "kernel.cu", "model.py")]
    assert found == [*own_files, "titan-code.json", "titan/a.py"]
    (own / "model.py").write_text("")
    assert sweep.copy_code(tmp_path / "s", ["own_code_example"]) != copy
