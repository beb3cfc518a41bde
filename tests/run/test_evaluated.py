"""What an attempt evaluates: digests of content, notes on changes, and figures of earlier content."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launchers.command import run_command
from launchers.start import run_local
from tests.support.runs import TINY
from titan import api
from titan.errors import ConfigError
from titan.evaluation.items import TaskItem
from titan.evaluation.schema import Evaluation, Task, ValidationSet
from titan.metrics.recorder import Recorder
from titan.metrics.trackers import Trackers
from titan.run import evaluated

TEXT, OTHER = "some text", "same size"
ITEM = {"text": "one two three"}


class Own(Task):
    """Makes the items that LAMBADA's format does, from other keys."""

    def item(self, record: Mapping[str, Any]) -> TaskItem:
        *context, word = str(record["body"]).split(" ")
        return TaskItem(" ".join(context), (word,))


def digest(**given: Any) -> str:
    return next(iter(evaluated.compute_digests(Evaluation(**given)).values()))


def digest_set(path: Path, **given: Any) -> str:
    return digest(sets={"x": ValidationSet(path=str(path), **given)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"a.txt": TEXT, "b.txt": TEXT, "c.txt": OTHER, "a.jsonl": json.dumps(ITEM)}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "own.jsonl").write_text(json.dumps({"body": ITEM["text"]}))
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "given", "is_same"),
    [
        pytest.param("b.txt", {}, True, id="other-path"),
        pytest.param("link.txt", {}, True, id="link"),
        pytest.param("b.txt", {"field": "body"}, True, id="field-of-text"),
        pytest.param("c.txt", {}, False, id="other-content"),
        pytest.param("b.txt", {"tokens": 8}, False, id="other-tokens"),
    ],
)
def test_the_content_of_a_set_decides_its_digest(file: str, given: dict[str, Any], is_same: bool, folder: Path) -> None:
    assert (digest_set(folder / file, **given) == digest_set(folder / "a.txt")) == is_same


def test_the_key_of_a_set_of_objects_counts(folder: Path) -> None:
    assert digest_set(folder / "a.jsonl", field="body") != digest_set(folder / "a.jsonl")


def test_the_items_of_a_task_decide_its_digest(folder: Path) -> None:
    lambada, own = str(folder / "a.jsonl"), str(folder / "own.jsonl")
    first = digest(tasks={"x": Task(path=lambada, format="lambada")})
    assert first == digest(tasks={"y": Own(path=own)}) == digest(tasks={"x": Own(path=own, limit=9)})
    assert first != digest(tasks={"x": Own(path=own, bos=True)})


@pytest.mark.parametrize("name", ["pipe.txt", "gone.txt"])
def test_a_file_that_can_not_be_read_is_rejected(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.sets\.x\.path=.*{name}: can't be read"):
        digest_set(folder / name)


def build_document(attempt: int, digests: dict[str, str] | None) -> dict[str, Any]:
    config = {"evaluation": {"sets": {"a.b": {"path": "book.txt"}}, "tasks": None}}
    return {"attempt": attempt, "config": config, **({} if digests is None else {"evaluated": digests})}


@pytest.mark.parametrize(
    ("earlier", "change"),
    [
        pytest.param([{"a.b": "1"}], "1 -> 2", id="changed"),
        pytest.param([{"a.b": "1"}, {}], "1 -> 2", id="not-evaluated-between"),
        pytest.param([{"a.b": "1"}, {"a.b": "2"}], "", id="since-then-the-same"),
        pytest.param([{"a.b": "2"}], "", id="same"),
        pytest.param([None], "", id="not-recorded"),
        pytest.param([], "", id="first"),
    ],
)
def test_a_resume_says_what_has_changed(earlier: list[dict[str, str] | None], change: str) -> None:
    documents = [build_document(number, digests) for number, digests in enumerate(earlier, 1)]
    notes = evaluated.note_changes({"a.b": "2", "new": "3"}, documents)
    assert [change in note and "evaluation/a.b (book.txt: " in note for note in notes] == [True] * bool(change)


@pytest.mark.parametrize(
    ("digests", "names", "tracked"),
    [
        pytest.param(["1", "2", "1"], ["x", "x@2", "x"], ["x", "x@2", "x"], id="and-back"),
        pytest.param(["1", "2", "3"], ["x@1", "x@2", "x"], ["x", "x@2", "x@3"], id="each-other"),
        pytest.param([None, "2", "2"], ["x", "x", "x"], ["x", "x", "x"], id="not-recorded-at-first"),
        pytest.param(["1", "1", "1"], ["x", "x", "x"], ["x", "x", "x"], id="same"),
    ],
)
def test_figures_of_other_content_have_a_name_of_their_own(
    digests: list[str | None], names: list[str], tracked: list[str], tmp_path: Path
) -> None:
    documents = [build_document(k, {"x": d} if d else None) for k, d in enumerate(digests, 1)]
    keys = ("ema/evaluation/x/loss", "evaluation/x/loss", "evaluation/xx/loss", "validation_loss")
    records = [{"step": k, "attempt": k, **dict.fromkeys(keys, 1.0)} for k, _ in enumerate(digests, 1)]
    found = [set(r) - {"step", "attempt"} for r in evaluated.separate_figures(records, documents)]
    assert found == [{key.replace("evaluation/x/", f"evaluation/{name}/") for key in keys} for name in names]
    for number, name in enumerate(tracked, 1):
        got, trackers = list[Any](), Trackers({}, print)
        trackers.log = trackers.finish = lambda record, got=got, **how: got.append(record)  # type: ignore[misc]
        changed = evaluated.find_changed({"x": digests[number - 1] or "0"}, documents[:number])
        recorder = Recorder(tmp_path, number, trackers, print, partial(evaluated.rename_figures, changed=changed))
        recorder.log(dict.fromkeys(keys, 1.0))
        recorder.finish(dict.fromkeys(keys, 1.0))
        expected = {key.replace("evaluation/x/", f"evaluation/{name}/") for key in keys}
        assert [set(record) - {"time", "attempt"} for record in got] == [expected] * 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) - {"time", "attempt"} for line in lines] == [set(keys)] * len(tracked)


@pytest.mark.full
def test_a_resumed_run_with_other_content_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "corpus.txt").write_text("\n".join(f"line {k} of the corpus" for k in range(2_000)))
    asked = [o for o in TINY if not o.startswith(("dataset", "model.vocab"))]
    asked += ["dataset=text", f"dataset.path={folder}/corpus.txt", f"dataset.cache={folder}/data", "metrics.plot=false"]
    asked += [f"+evaluation.sets.book={{path: {folder}/a.txt}}", f"hydra.run.dir={folder}/run"]
    assert run_command([*asked, "training.steps=1"], run_local) == 0
    (folder / "a.txt").write_text(OTHER)
    assert run_command([*asked, "training.steps=2"], run_local) == 0
    assert "what is evaluated has changed" in capsys.readouterr().out
    names = [name for name in api.open_run(folder / "run").metrics if "@" in name]
    assert len(names) == 3 and all(name.startswith("evaluation/book@") for name in names)
