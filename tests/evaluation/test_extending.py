"""The example of docs/extending-evaluation.md works as it stands, from a folder outside of titan."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers import start
from launchers.command import command
from tests.support import task_files
from tests.support.runs import TINY
from titan import evaluate
from titan.metrics.lines import read_lines

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending-evaluation.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
((TRAIN, EVALUATE),) = re.findall(r"```sh\npython -m titan.train (.*?)\npython -m titan.evaluate (.*?)\n```", PAGE)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, and its environment."""
    monkeypatch.chdir(tmp_path)
    for name, text in {**FILES, "mine/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("TITAN_CONF", str(tmp_path / "conf"))
    monkeypatch.setenv("TITAN_MODULES", "mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[module]


def test_a_task_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [{"sentence_good": a[1], "sentence_bad": a[2]} for a in task_files.lines(4)]
    (mine / "pairs.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    small = [o for o in TINY if not o.startswith(("dataset", "model.vocab", "evaluation"))]
    given = [
        *small,
        *task_files.corpus(mine),
        "training.seq_len=64",
        "model.vocab=4096",
        "metrics.sample_tokens=0",
        *shlex.split(TRAIN),
    ]
    assert command(given, start.run_local) == 0
    last = [line for line in read_lines(mine / "runs/example/metrics.jsonl") if "evaluation/pairs/acc" in line][-1]
    assert last["step"] == 5 and set(re.findall(r"evaluation/pairs/\w+", PAGE)) <= last.keys()
    assert evaluate.main([*shlex.split(EVALUATE), "to=out.json"]) == 0
    assert "evaluation/pairs/acc_norm" in json.loads((mine / "out.json").read_text())["results"]["weights"]
    (mine / "pairs.jsonl").write_text('{"sentence_good": "a"}')
    assert command([*given, "name=other"], start.run_local) == 2
    assert "line 1 is no item of this task (KeyError: 'sentence_bad')" in capsys.readouterr().err
