"""The examples of docs/extending-hooks.md work as they stand, from a folder outside of the repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.command import command
from launchers.start import run_local
from tests.support.runs import TINY
from titan.hooks.context import Context
from titan.hooks.schema import MOMENTS
from titan.metrics.lines import read_lines

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending-hooks.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
NORMS, PRUNED = (shlex.split(line.partition("titan.train ")[2]) for line in LINES if "titan.train " in line)
SMALL = [
    *(o for o in TINY if not o.startswith("evaluation.")),
    "metrics.sample_tokens=0",
    "evaluation.tokens=64",
]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, and the environment that its first block sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for name, text in {**FILES, "mine/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (exports,) = [line for line in LINES if line.startswith("export ")]
    for setting in shlex.split(os.path.expandvars(exports))[1:]:
        monkeypatch.setenv(*setting.split("=", 1))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[module]


def test_a_metric(outside: Path) -> None:
    assert command([*SMALL, *NORMS], run_local) == 0
    lines = [line for line in read_lines(outside / "runs/norms/metrics.jsonl") if "loss" in line]
    assert len(lines) == 5
    for line in lines:
        blocks = [line[f"hooks/block_norms/block_{i}"] for i in range(2)]
        assert min(blocks) > 0 and sum(block**2 for block in blocks) < line["grad_norm"] ** 2


def test_ending_a_run(outside: Path) -> None:
    assert command([*SMALL, *PRUNED], run_local) == 0
    result = json.loads((outside / "runs/pruned/result.json").read_text())
    assert not result["finished"] and 2 < result["step"] <= 5
    assert result["ended_by"]["hook"] == "prune" and "is above 0.5" in result["ended_by"]["reason"]


def test_the_tables_name_every_moment_and_every_public_name() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| (?:all|rank 0) \|", PAGE, flags=re.M) == list(MOMENTS)
    table = PAGE.partition("## The context")[2].partition("\n\n`norms`")[0]
    named = set(re.findall(r"`(\w+)(?:\(.*?\))?`", "".join(re.findall(r"^\| (.*?) \|", table, flags=re.M))))
    public = {name for name in vars(Context) if not name.startswith("_")}
    assert named == public | {"run", "rank", "world_size", "device", "step", "figures"}
