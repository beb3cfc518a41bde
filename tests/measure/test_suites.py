"""The suites of what developers measure: figures are consistent, and two sides take turns; speeds are not tested."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from threading import Thread

import pytest

from tests.measure import command, features, loading, preparing
from tests.measure.test_speed import SMALL
from tests.support.composing import compose_test_run
from tests.support.import_graph import list_imports
from tests.support.tiers import select_cases


def test_suites_import_no_package_of_the_tests() -> None:
    """A machine with a GPU may have what training needs only; programs beside the suites may import more."""
    folder, found, names = Path(command.__file__).parent, {"command"}, set[str]()
    while found:
        names |= (new := {n for m in found for n in list_imports(ast.parse((folder / f"{m}.py").read_text()))} - names)
        found = {part for name in new if name.startswith("tests.measure.") for part in name.split(".")[2:3]}
    others = [name for name in names if name.startswith("tests.") and not name.startswith("tests.measure")]
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert (tops, others) == ({"numpy", "torch", "titan", "tests", "yaml"}, [])


@pytest.mark.parametrize(
    "title", select_cases(features.FEATURES, ("layers, every 10 steps", "profile with memory of every step"))
)
def test_settings_of_a_feature_change_the_run(title: str) -> None:
    settings = [each.format(steps=5) for each in features.FEATURES[title]]
    off, on = (compose_test_run([*SMALL, "name=x", *features.OFF, *more]) for more in ([], settings))
    assert (off == on) == (not settings)


def test_turns_alternate_and_the_first_changes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def work(side: int) -> None:
        turns = features.Turns(f"{tmp_path}/turns", 2, side)
        for turn in range(4):
            turns.take_turn(lambda turn=turn: seen.append((turn, side)), ends_turn=True)  # type: ignore[misc]

    threads = [Thread(target=work, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert seen == [(0, 1), (0, 0), (1, 0), (1, 1), (2, 1), (2, 0), (3, 0), (3, 1)]


@pytest.mark.full
def test_the_suite_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    options = ["suite=features", "rounds=2", "steps=2", f"to={out}"]
    settings = [*SMALL, "parallelism=fsdp", "dataset=synthetic", "compile=off"]
    assert command.main([*options, "case=memory of every step", *settings]) == 0
    (found,) = json.loads(out.read_text())
    assert len(found["ratios"]) == 2 and min(found["ratios"]) > 0 and found["seconds"] > 0
    assert "profile with memory of every step" in capsys.readouterr().out


@pytest.mark.full
def test_generation_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert command.main(["suite=generate", "rounds=1", f"to={out}", "dataset=synthetic", *SMALL]) == 0
    found = json.loads(out.read_text())
    assert [line["new_tokens"] for line in found] == [64, 256, 512]
    for line in found:
        rates = line["tokens_per_second"]
        assert line["ratios"] == [pytest.approx(rates["cache"] / rates["uncached"])]
    assert len(capsys.readouterr().out.strip().splitlines()) == 6


@pytest.mark.full
def test_the_suite_of_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preparing, "KILLED_MB", 1)
    monkeypatch.setattr(loading, "CHECKED", 70_000)
    found = preparing.suite(rounds=1, megabytes=1, kills=1, sizes=(1,))
    speed = found["speed"]
    assert speed["of_bare"] == pytest.approx(speed["one"] / speed["bare"])
    assert speed["two_against_one"] == pytest.approx(speed["two"] / speed["one"])
    assert (found["kills"]["kills"], found["kills"]["made_again"]) == (1, 0)
    assert 10 < found["memory"][0]["peak_mebibytes"] < 2000
    assert found["order"]["bijective"] and found["order"]["residues"] < 5
    assert [row["seq_len"] for row in found["reading"]] == [256, 2048, 8192]
    assert capsys.readouterr().out.count("\n") == 9
