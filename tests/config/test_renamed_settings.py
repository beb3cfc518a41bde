"""Renamed settings: the former key works with a warning, and ids stay."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.support.runs import TINY
from titan.config import settings
from titan.config.arguments import parse_arguments
from titan.config.renamed_settings import former_keys, rename_config, rename_overrides
from titan.config.settings import setting
from titan.config.warning import warn_once
from titan.errors import ConfigError
from titan.run import axes, identity
from titan.run.compose import compose_run
from titan.run.directory import parse_attempts
from titan.run.run import as_config
from titan.run.same_experiment import check_same_without_data
from titan.training.schema import Training


@dataclass(frozen=True)
class Part:
    size: int = setting(4, formerly="length")


@dataclass(frozen=True)
class Axis:
    rate: float = setting(0.1, formerly="lr")
    pair: tuple[int, ...] = setting((1, 2), formerly="two")
    part: Part = dataclasses.field(default=Part())
    parts: Mapping[str, Part] | None = setting(None)
    moved: int = setting(1, formerly="older.setting")


@dataclass(frozen=True)
class Recipe:
    axis: Axis
    hooks: None = None

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        return ("axis",)


FORMER = former_keys([("axis", Axis)]) | {"older.kind": "axis"}


@pytest.fixture(autouse=True)
def once() -> Iterator[None]:
    """Warnings of other tests do not count."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def test_former_keys_of_a_schema() -> None:
    assert FORMER == {
        "axis.lr": "axis.rate", "axis.two": "axis.pair", "axis.part.length": "axis.part.size",
        "axis.parts.*.length": "axis.parts.*.size", "older.setting": "axis.moved", "older.kind": "axis",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        pytest.param("axis.lr=3", "axis.rate=3", id="value"),
        pytest.param("++axis.lr=1,2", "++axis.rate=1,2", id="sweep"),
        pytest.param("axis.part.length=[a=b]", "axis.part.size=[a=b]", id="nested"),
        pytest.param("axis.parts.mine.length=3", "axis.parts.mine.size=3", id="named"),
        pytest.param("older.setting=3", "axis.moved=3", id="of-another-axis"),
        pytest.param("++older.kind=a,b", "axis=a,b", id="choice-of-an-axis"),
        pytest.param("axis.rate=3", "axis.rate=3", id="present"),
        pytest.param("other.lr=3", "other.lr=3", id="another-axis"),
        pytest.param("axis.lr.x=3", "axis.lr.x=3", id="below"),
        pytest.param("hydra/launcher=local", "hydra/launcher=local", id="group"),
        pytest.param("", "", id="empty"),
    ],
)
def test_overrides_get_the_present_key(override: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rename_overrides([override, override], FORMER) == [wanted, wanted]
    warned = capsys.readouterr().err
    assert warned.count("is now called") == (override != wanted)


def test_a_file_may_have_the_former_key(capsys: pytest.CaptureFixture[str]) -> None:
    built = settings.build(Axis, settings.collect_defaults(Axis) | {"lr": 0.5, "two": [3, 4]}, "axis")
    assert built == Axis(0.5, (3, 4))
    assert capsys.readouterr().err.splitlines() == [
        "titan: warning: axis.lr=0.5: this setting is now called axis.rate; use that name.",
        "titan: warning: axis.two=[3,4]: this setting is now called axis.pair; use that name.",
    ]


def test_what_an_earlier_version_wrote_is_read_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.build(Axis, {"lr": 0.5}, "axis") == Axis(0.5)
    assert capsys.readouterr().err == ""


def test_two_values_are_rejected() -> None:
    with pytest.raises(ConfigError) as rejected:
        settings.build(Axis, {"lr": 0.5, "rate": 0.3}, "axis")
    assert str(rejected.value) == "axis.lr=0.5: is the former name of axis.rate, which is 0.3; leave one out."


def test_ids_hash_the_former_key() -> None:
    run = Recipe(Axis(rate=0.5))
    assert identity.select_settings(cast(Any, run), science=False) == {"axis.lr": 0.5}
    run = Recipe(Axis(moved=2))
    assert identity.select_settings(cast(Any, run), science=False) == {"older.setting": 2}


def test_commands_without_configuration_files_accept_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(Part, ["length=7"]) == Part(7)
    assert "length: this setting is now called size; use that name." in capsys.readouterr().err
    with pytest.raises(ConfigError, match="size is given twice"):
        parse_arguments(Part, ["length=7", "size=8"])


def test_a_run_is_composed_with_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = compose_run([*TINY, "training.seq_len=32", "hydra.run.dir=/nowhere"])
    ids = identity.select_settings(before, science=True)
    field = Training.__dataclass_fields__["seq_len"]
    monkeypatch.setattr(field, "metadata", types.MappingProxyType({**field.metadata, "formerly": "row_length"}))
    axes._collect_former_keys.cache_clear()
    try:
        run = compose_run([*TINY, "training.row_length=32", "hydra.run.dir=/nowhere"])
    finally:
        axes._collect_former_keys.cache_clear()
    assert run.training.seq_len == 32
    assert identity.select_settings(run, science=True) == {
        name.replace("seq_len", "row_length"): value for name, value in ids.items()
    }
    assert capsys.readouterr().err == (
        "titan: warning: training.row_length: this setting is now called training.seq_len; use that name.\n"
    )


def test_a_configuration_of_a_file_gets_present_keys() -> None:
    parts = {"mine": {"length": 3}, "other": {"size": 4}}
    assert rename_config({"axis": {"lr": 1, "parts": parts, "own": 2}, "name": None}, FORMER) == {
        "axis": {"rate": 1, "parts": {"mine": {"size": 3}, "other": {"size": 4}}, "own": 2},
        "name": None,
    }
    moved = {"older": {"setting": 3, "kind": "a", "rest": 1}, "axis": {"lr": 1}}
    assert rename_config(moved, FORMER) == {"older": {"rest": 1}, "axis": {"rate": 1, "moved": 3}}


def test_a_run_with_former_keys_is_read_with_the_present_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """As in directories from before `precision.products` became `precision.matmuls`."""
    run = compose_run([*TINY, "precision=float8", "precision.emulate=true", "hydra.run.dir=/x"])
    config = as_config(run)
    config["precision"]["products"] = config["precision"].pop("matmuls")
    science = identity.select_settings(run, science=True)
    assert science["precision.products"] == "float8"
    document = {"run_id": "r", "config": config, "ids": {"science": "s"}, "overrides": ["precision.products=float8"]}
    old = parse_attempts(yaml.safe_dump(document | {"science": science, "attempt": 1}), "x")[0]
    assert old["config"] == as_config(run)
    other = dataclasses.replace(run, precision=dataclasses.replace(run.precision, matmuls="mxfp8"))
    check_same_without_data(run, old)
    with pytest.raises(ConfigError, match=r"precision\.matmuls was float8, now mxfp8"):
        check_same_without_data(other, old)
    assert not capsys.readouterr().err


def test_a_setting_that_became_an_axis_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    old = ["training.schedule=cosine", "training.warmup=1", "training.final_lr=0.1"]
    new = ["schedule=cosine", "schedule.warmup=1", "schedule.final_lr=0.1"]
    found, wanted = (compose_run([*TINY, *line, "name=x", "hydra.run.dir=/x"]) for line in (old, new))
    assert dataclasses.replace(found, overrides=(), hydra={}) == dataclasses.replace(wanted, overrides=(), hydra={})
    warned = capsys.readouterr().err.splitlines()
    assert [line.partition("this setting is now called ")[2].split(";")[0] for line in warned] == [
        "schedule", "schedule.warmup", "schedule.final_lr",
    ]  # fmt: skip


def test_a_run_from_before_its_setting_became_an_axis_goes_on() -> None:
    run = compose_run([*TINY, "schedule=cosine", "schedule.warmup=1", "hydra.run.dir=/x"])
    config, science = as_config(run), identity.select_settings(run, science=True)
    assert science["training.schedule"] == "cosine" and science["training.warmup"] == 1
    del config["schedule"]
    config["training"] |= {"schedule": "cosine", "warmup": 1, "decay": 0.5, "final_lr": 0.0}
    document = {"run_id": "r", "config": config, "ids": {"science": "s"}, "choices": {"model": "debug"}, "attempt": 1}
    document["overrides"] = ["training.schedule=cosine", "training.decay=0.5", "training.warmup=1"]
    text = yaml.safe_dump(document | {"science": science | {"training.decay": 0.5}})
    old = parse_attempts(text, "x")[0]
    assert old["config"] == as_config(run) and old["choices"] == {"model": "debug", "schedule": "cosine"}
    assert old["overrides"] == ["training.schedule=cosine", "training.warmup=1"], "it had no effect, and is gone"
    check_same_without_data(run, old)
    other = compose_run([*TINY, "schedule=linear", "schedule.warmup=0", "hydra.run.dir=/x"])
    with pytest.raises(ConfigError, match=r"schedule was cosine, now linear; schedule\.warmup was 1, now 0"):
        check_same_without_data(other, old)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("schedule: cosine", "training.schedule=cosine: .*`override /schedule: cosine`", id="choice"),
    ],
)
def test_a_file_with_a_setting_that_moved_is_rejected(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\ntraining:\n  {content}\n")
    with pytest.raises(ConfigError, match=expected):
        compose_run([*TINY, f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine", "hydra.run.dir=/x"])


def test_a_setting_that_moved_to_another_axis_works_in_commands_files_and_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compose_run([*TINY, "metrics.validate_every=7", "hydra.run.dir=/x"])
    assert run.evaluation.every == 7
    assert "metrics.validate_every: this setting is now called evaluation.every" in capsys.readouterr().err
    assert identity.select_settings(run, science=False)["metrics.validate_every"] == 7
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nmetrics:\n  validate_every: 7\n")
    path = [*TINY, "recipe=mine", f"hydra.searchpath=[file://{tmp_path}]", "hydra.run.dir=/x"]
    assert compose_run(path).evaluation.every == 7
    assert "metrics.validate_every=7: this setting is now called evaluation.every" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^metrics\.validate_every=7: is the former name of evaluation\.every"):
        compose_run([*path, "evaluation.every=8"])
    config = as_config(run)
    config["metrics"] |= {"validate_every": 7, "validation_tokens": 0}
    del config["evaluation"]
    document = {"run_id": "r", "config": config, "ids": {"science": "s"}, "science": {}, "attempt": 1}
    assert parse_attempts(yaml.safe_dump(document), "x")[0]["config"]["evaluation"] == {"every": 7, "tokens": 0}
