"""Messages between ranks: what is read is what was written, and a class of another package is not imported."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import rendezvous
from tests.measure.in_memory import DictStore
from tests.support.own_models import OwnLlama
from tests.support.runs import begin_run, compose_tiny_run
from titan.cluster.rank_info import RankInfo
from titan.config.frozen_json import list_packages, read_json, write_json
from titan.errors import RunError


class MessageStore(DictStore):
    """The store of two ranks, in this process."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def add(self, key: str, amount: int) -> int:
        return 1


def test_a_run_and_its_attempt_are_received_as_they_were_sent(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "modules=[tests]", "+hooks.a={_target_: tests.support.own_hooks.Norms}")
    message, store = (run, begin_run(run)), MessageStore()
    rendezvous.send(store, RankInfo(0, 2), message)
    assert rendezvous.receive(store, ("tests",)) == message
    assert list_packages(message) == ("tests", "titan")
    with pytest.raises(RunError, match=r"names tests\.support\.own_hooks\.Norms, and only you may"):
        rendezvous.receive(store)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_exit_codes_are_sent(code: int) -> None:
    store = MessageStore()
    rendezvous.send(store, RankInfo(0, 1), code)
    assert rendezvous.receive(store) == code


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps((1, 2)), id="pickle"),
        pytest.param(b"", id="empty"),
        pytest.param(b"[" * 10, id="half"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(json.dumps({"class": ["os", "system"], "fields": []}).encode(), id="module-of-python"),
        pytest.param(json.dumps({"class": ["titan.errors", "exit_code"], "fields": []}).encode(), id="function"),
        pytest.param(json.dumps({"class": ["titan.errors", "os.system"], "fields": []}).encode(), id="through-titan"),
        pytest.param(json.dumps({"class": ["titan.nothing", "X"], "fields": []}).encode(), id="no-module"),
        pytest.param(
            json.dumps({"class": ["titan.cluster.rank_info", "RankInfo"], "fields": [["x", 1]]}).encode(), id="fields"
        ),
        pytest.param(json.dumps({"mapping": [1, 2]}).encode(), id="mapping"),
        pytest.param(json.dumps({"other": 1}).encode(), id="other"),
    ],
)
def test_any_other_message_is_rejected(content: bytes) -> None:
    store = MessageStore()
    store.set("titan/word", content)
    with pytest.raises(RunError, match="rank 0's message can't be read: "):
        rendezvous.receive(store)


def test_a_package_that_is_not_allowed_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mod_evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="only you may"):
        read_json(json.dumps({"class": ["mod_evil", "Opt"], "fields": []}).encode(), ())
    assert "mod_evil" not in sys.modules


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1.5,
        float("inf"),
        "text",
        b"\0\xff",
        (1, (2, [3])),
        {"a": {2: (None,)}},
        RankInfo(1, 2, 1, "x"),
        OwnLlama(),
    ],
    ids=repr,
)
def test_values_are_the_same_again(value: Any) -> None:
    again = read_json(write_json(value), ("tests",))
    assert again == value and type(again) is type(value)


def test_what_json_can_not_hold_is_rejected() -> None:
    with pytest.raises(TypeError, match="a set is no part of a message"):
        write_json({"a": {1}})
