"""The examples of docs/extending-loss.md train as they stand, and their terms are measured."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers import start
from launchers.command import command
from tests.support.runs import TINY, steps
from titan.run.run import Run

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "extending-loss.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
TRAIN = [line.partition("titan.train ")[2] for line in LINES if "titan.train " in line]
SMALL = [o for o in TINY if not o.startswith("training.steps")]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, and the environment that its first block sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for name, text in {**FILES, "mine/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (exports,) = [line for line in LINES if line.startswith("export ")]
    for setting in shlex.split(os.path.expandvars(exports))[1:]:
        name, _, value = setting.partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"])
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[module]


@pytest.mark.parametrize("overrides", TRAIN)
def test_an_example_trains_and_its_terms_are_measured(overrides: str, mine: Path) -> None:
    composed: list[Run] = []

    def train(run: Run) -> int:
        composed.append(run)
        return start.run_local(run) if run.layout.devices == 1 else 0

    assert command([*SMALL, *shlex.split(overrides), "name=example"], train) == 0
    (run,) = composed
    wanted = set(run.training.terms) | ({"small"} if "model=small" in overrides else set())
    assert wanted
    if run.layout.devices == 1:
        lines = steps(run)
        assert len(lines) == 5
        assert all({key for key in line if key.startswith("loss/")} == {f"loss/{n}" for n in wanted} for line in lines)


def test_every_file_of_the_page_is_used() -> None:
    assert len(FILES) == 4 and len(TRAIN) == 6
