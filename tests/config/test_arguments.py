"""Command lines of KEY=VALUE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from titan.config.arguments import describe_settings, operand, parse_arguments
from titan.config.command import Command
from titan.config.settings import setting
from titan.errors import ConfigError


@dataclass(frozen=True)
class Example:
    source: str = setting(help="where from")
    to: str | None = setting(None, "where to")
    kind: Literal["a", "b"] = setting("a", "which")
    number: int = setting(3, "how many", at_least=1)
    rate: float = setting(0.5, "how fast")
    really: bool = setting(False, "whether")
    note: str | None = setting(None, "in words", any_text=True)
    files: str | tuple[str, ...] | None = setting(None, "one or several")
    sizes: Mapping[str, int] | None = setting(None, "by name")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        pytest.param(["source=x"], Example("x"), id="defaults"),
        pytest.param(["source=1.10", "to=2e3"], Example("1.10", "2e3"), id="text-stays"),
        pytest.param(["source=a=b", "to=null"], Example("a=b"), id="equals-sign"),
        pytest.param(["source=x", "note="], Example("x", note=""), id="empty"),
        pytest.param(["source=a,b=c"], Example("a,b=c"), id="commas-stay"),
        pytest.param(["source=a (b) [c"], Example("a (b) [c"), id="special-characters-stay"),
        pytest.param(["source=[a, b"], Example("[a, b"), id="brackets-stay"),
        pytest.param(["source='a b'", 'to="1.10"'], Example("a b", "1.10"), id="quotes-go"),
        pytest.param(["source='a', she said"], Example("'a', she said"), id="quotes-within-stay"),
        pytest.param(["source=x", "note='null'"], Example("x", note="null"), id="quoted-null"),
        pytest.param(["source=x", "files=1.10"], Example("x", files="1.10"), id="text-or-list-text"),
        pytest.param(["source=x", "files=[a.b, 'c d']"], Example("x", files=("a.b", "c d")), id="list"),
        pytest.param(["source=x", "files=[]"], Example("x", files=()), id="empty-list"),
        pytest.param(["source=x", "sizes={a: 1, b: 2}"], Example("x", sizes={"a": 1, "b": 2}), id="dict"),
        pytest.param(["source=x", "rate=1e-3"], Example("x", rate=0.001), id="exponent-without-a-point"),
        pytest.param(
            ["source=x", "number=7", "rate=2", "really=true"], Example("x", None, "a", 7, 2.0, True), id="typed"
        ),
    ],
)
def test_values(argv: list[str], wanted: Example) -> None:
    assert parse_arguments(Example, argv) == wanted


def test_every_setting_is_described() -> None:
    lines = describe_settings(Example).splitlines()
    assert [line.split()[0] for line in lines] == [
        "source=", "to=null", "kind=a", "number=3", "rate=0.5", "really=false", "note=null",
        "files=null", "sizes=null",
    ]  # fmt: skip
    assert lines[0].endswith("where from")


@dataclass(frozen=True)
class Sizes:
    rows: int = setting(1, "how many rows", at_least=1)


@dataclass(frozen=True)
class One:
    run: str = operand("RUN", "a run")
    lr: float = setting(0.1, "rate")
    sizes: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True)
class Several:
    folders: tuple[str, ...] = operand("DIR", "folders")
    lr: float = setting(0.1, "rate")


@dataclass(frozen=True)
class Optional:
    run: str | None = operand("RUN", "a run", None)
    lr: float = setting(0.1, "rate")


ONE = Command("titan.one", "One.", {}, One, overrides="Other arguments are overrides.")


@pytest.mark.parametrize(
    ("cls", "words", "parsed"),
    [
        pytest.param(One, ["runs/a", "lr=1"], One("runs/a", 1.0), id="one"),
        pytest.param(One, ["runs/lr=1"], One("runs/lr=1"), id="trial"),
        pytest.param(One, ["seed=1"], One("seed=1"), id="trial-here"),
        pytest.param(One, ["a", "sizes.rows=3"], One("a", sizes=Sizes(3)), id="group"),
        pytest.param(Several, ["a", "runs/lr=1", "lr=1"], Several(("a", "runs/lr=1"), 1.0), id="several"),
        pytest.param(Optional, ["lr=1"], Optional(None, 1.0), id="left-out"),
        pytest.param(Optional, ["a"], Optional("a"), id="given"),
        pytest.param(One, ["~/runs/lr=1"], One("~/runs/lr=1"), id="home"),
    ],
)
def test_first_words(
    cls: type, words: list[str], parsed: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seed=1").mkdir()
    Path("lr=1").mkdir()  # of the same name as a setting, which comes first
    assert parse_arguments(cls, words) == parsed


@pytest.mark.parametrize(
    ("cls", "words", "sentence"),
    [
        pytest.param(Example, [], "source is missing: where from; give source=VALUE.", id="missing"),
        pytest.param(Example, ["x"], "x: not understood", id="no-value"),
        pytest.param(Example, ["--fast"], "--fast: not understood", id="a-flag"),
        pytest.param(Example, ["=3"], "=3: not understood", id="no-key"),
        pytest.param(Example, ["sorce=x"], "sorce=x: there is no such setting; did you mean 'source'?", id="unknown"),
        pytest.param(Example, ["source=x", "source=y"], "source=y: source is given twice", id="twice"),
        pytest.param(Example, ["source=x", "number=0"], "number=0: must be at least 1.", id="range"),
        pytest.param(Example, ["source=x", "number=few"], "number=few: expected a whole number", id="type"),
        pytest.param(Example, ["source=x", "number=[1"], "number=[1: not understood", id="syntax"),
        pytest.param(
            Example,
            ["source=x", "number=1,2"],
            "number=1,2: one value is expected; write [a,b] for a list.",
            id="sweep",
        ),
        pytest.param(Example, ["source=x", "files=[a"], "files=[a: not understood; write [a,b] for a list", id="list"),
        pytest.param(Example, ["source=x", "really=off"], "really=off: expected true or false", id="no-yaml"),
        pytest.param(Example, ["source="], "source=: is empty; give a value, or leave it out.", id="empty"),
        pytest.param(Example, ["source=x", "kind=c"], "kind=c: choose one of a, b", id="choice"),
        pytest.param(One, [], "RUN is missing: a run; give it as the first word, before KEY=VALUE.", id="no-word"),
        pytest.param(One, ["lr=1", "a"], "RUN is missing", id="behind"),
        pytest.param(One, ["lr=1"], "RUN is missing", id="only-a-setting"),
        pytest.param(One, ["--fast"], "RUN is missing", id="option"),
        pytest.param(One, ["hydra/launcher=slurm"], "RUN is missing", id="override"),
        pytest.param(One, ["a", "b"], "b: not understood; give KEY=VALUE", id="two-words"),
        pytest.param(Several, ["a", "lr=1", "b"], "b: not understood", id="several-apart"),
        pytest.param(One, ["a", "sizes.rows=0"], "sizes.rows=0: must be at least 1.", id="group-range"),
        pytest.param(One, ["a", "sizes.row=1"], "did you mean 'sizes.rows'?", id="group-key"),
        pytest.param(One, ["a", "run=b"], "run=b: there is no such setting", id="by-name"),
    ],
)
def test_refusals(cls: type, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        parse_arguments(cls, words)
    assert sentence in str(rejected.value)


def test_other_words_are_overrides() -> None:
    words = ["runs/a", "--config-dir", "mine", "lr=1", "optimizer.lr=2", "sizes.rows=3", "+x.y=1"]
    command_line = ONE.parse(words)
    assert command_line.settings == One("runs/a", 1.0, Sizes(3))
    assert command_line.overrides == ["--config-dir", "mine", "optimizer.lr=2", "+x.y=1"]
    assert command_line.words == words


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("+mine/group=x", id="group"),
        pytest.param("++mine/group=x", id="group-forced"),
        pytest.param("~mine/group=x", id="group-removed"),
        pytest.param(f"dataset.path=[{'file.txt,' * 40}]", id="long"),
    ],
)
def test_a_first_word_may_be_an_override(word: str) -> None:
    command_line = Command("titan.x", "X.", {}, Optional, overrides="Others.").parse([word])
    assert command_line.settings == Optional() and command_line.overrides == [word]


def test_the_usage_shows_what_is_required() -> None:
    usages = [
        Command("titan.x", "X.", {}, cls).format_help().splitlines()[2] for cls in (One, Several, Optional, Example)
    ]
    assert [usage.removeprefix("Usage: python -m titan.x ") for usage in usages] == [
        "RUN [KEY=VALUE ...]", "DIR [DIR ...] [KEY=VALUE ...]", "[RUN] [KEY=VALUE ...]", "source=VALUE [KEY=VALUE ...]",
    ]  # fmt: skip
    assert ONE.format_help().splitlines()[2].endswith("RUN [KEY=VALUE ...] [OVERRIDE ...]")


def test_an_unknown_key_of_a_group_is_no_override() -> None:
    with pytest.raises(ConfigError, match=r"sizes.row=1: there is no such setting; did you mean 'sizes.rows'\?"):
        ONE.parse(["runs/a", "sizes.row=1"])
