"""The examples of docs/ (contributing, extending, api) work as they stand, and docs/architecture.md is up to date."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from graphlib import CycleError
from pathlib import Path

import pytest

from launchers import start
from launchers.command import command
from tests.support import import_graph
from tests.support.runs import TINY
from titan.run import identity
from titan.run.compose import composed
from titan.run.run import Run

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("contributing.md", "extending-schedule.md"))
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
TRAIN = [line.partition("titan.train ")[2] for line in LINES if "titan.train " in line]
SMALL = [o for o in TINY if not o.startswith(("dataset", "model.vocab", "optimizer", "schedule", "hydra.run.dir"))]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, and the environment that its first block sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for name, text in {**FILES, "mine/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "poems.csv").write_text("poem\n" + "roses are red and violets are blue\n" * 300)
    (exports,) = {line for line in LINES if line.startswith("export ")}
    for setting in shlex.split(os.path.expandvars(exports))[1:]:
        name, _, value = setting.partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"])
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[module]


@pytest.mark.parametrize("overrides", TRAIN)
def test_an_example_trains(overrides: str, mine: Path) -> None:
    found: list[Run] = []

    def train(run: Run) -> int:
        found.append(run)
        return start.run_local(run) if run.layout.devices == 1 else 0

    assert command([*SMALL, *shlex.split(overrides), "name=example"], train) == 0
    (run,) = found
    own = (type(run.model), type(run.optimizer), type(run.schedule), type(run.dataset))
    assert sum(kind.__module__.startswith("mine.") for kind in own) == 1
    assert run.layout.devices > 1 or (mine / "runs/example/result.json").is_file()


def test_a_schedule_of_ones_own_is_shown_checked_and_part_of_the_ids(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["schedule=cycles", "--cfg", "job", "-p", "schedule"], lambda run: 0) == 0
    assert "_target_: mine.cycles.Cycles\ncycles: 2\n" in capsys.readouterr().out
    assert command([*SMALL, "schedule=cycles", "schedule.cycles=0", "name=x"], lambda run: 0) == 2
    assert "schedule.cycles=0: must be at least 1." in capsys.readouterr().err
    runs = [composed([*SMALL, "schedule=cycles", f"schedule.cycles={n}", "name=x"]) for n in (2, 3)]
    two, three = (identity.settings_of(run, science=True) for run in runs)
    assert two["schedule"] == "mine.cycles.Cycles" and "schedule.cycles" not in two
    assert three == {**two, "schedule.cycles": 3}


def test_every_file_of_the_page_is_used() -> None:
    assert len(FILES) == 8 and len(TRAIN) == 5


def test_the_api_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("titan.api")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), flags=re.DOTALL)
    code = re.sub(r'"model=debug"', ", ".join(map(repr, SMALL)), "\n".join(blocks))
    names: dict[str, object] = {}
    exec(compile(code, "docs/api.md", "exec"), names)
    assert len(names["findings"].variants) == 2  # type: ignore[attr-defined]
    assert len(names["saved"].metrics["loss"]) == 10  # type: ignore[attr-defined]


def test_the_diagram_of_packages_is_up_to_date() -> None:
    text = import_graph.PAGE.read_text()
    assert import_graph.update(text) == text, "run python -m tests.support.import_graph"


def test_the_diagram_leaves_out_what_follows() -> None:
    edges = {"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset()}
    lines = import_graph.diagram(edges).splitlines()
    assert lines == ["```mermaid", "flowchart TD", "  a --> b", "  b --> c", "```"]
    assert import_graph.layers(edges | {"d": frozenset({"c"})}) == [["a"], ["b", "d"], ["c"]]


def test_packages_that_import_each_other_are_rejected() -> None:
    edges = {"a": frozenset({"b"}), "b": frozenset({"a"})}
    with pytest.raises(CycleError):
        import_graph.diagram(edges)
