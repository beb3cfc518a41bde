"""Typed settings: strict conversion, ranges, and what a refusal says."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.config.settings import (
    MISSING,
    build,
    collect_defaults,
    format_value,
    setting,
    suggest_nearest,
    suggest_pattern,
    to_plain,
)
from titan.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """A nested schema."""

    depth: int = setting(3, "how deep", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One field of every kind."""

    path: str = setting(MISSING, "where")
    count: int = setting(1, "how many", at_least=0, below=10)
    rate: float = setting(0.5, "how fast", above=0, at_most=1)
    on: bool = setting(False, "whether")
    kind: Literal["off", "on", "fast"] = setting("off", "which")
    rest: int | str = setting("auto", "how many more", words=("auto",), at_least=-1)
    few: int | str = setting("auto", "how many at once", words=("auto",), at_least=1, at_most=8)
    limit: float | None = setting(None, "at most", above=0)
    label: str | None = setting(None, "a text")
    pair: tuple[float, float] = setting((0.1, 0.2), "two", at_least=0, below=1)
    names: tuple[str, ...] = setting((), "any")
    inner: Inner


def sample(**values: Any) -> Sample:
    made = build(Sample, {"path": "p", "inner": {}} | values, "sample")
    assert isinstance(made, Sample)
    return made


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        pytest.param("count", 3.0, 3, id="whole-float"),
        pytest.param("rate", 1, 1.0, id="int-as-float"),
        pytest.param("path", 3, "3", id="number-as-text"),
        pytest.param("kind", False, "off", id="yaml-off"),
        pytest.param("kind", True, "on", id="yaml-on"),
        pytest.param("rest", "auto", "auto", id="word"),
        pytest.param("rest", -1, -1, id="number-beside-words"),
        pytest.param("limit", None, None, id="null"),
        pytest.param("limit", 2, 2.0, id="not-null"),
        pytest.param("label", "x", "x", id="text-or-null"),
        pytest.param("pair", [0, 0.5], (0.0, 0.5), id="pair"),
        pytest.param("names", ["a", "b"], ("a", "b"), id="names"),
        pytest.param("inner", {"depth": 5}, Inner(5), id="nested"),
    ],
)
def test_converts_what_loses_nothing(name: str, value: Any, expected: Any) -> None:
    found = getattr(sample(**{name: value}), name)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("count", 1.5, "sample.count=1.5: expected a whole number (how many).", id="fraction"),
        pytest.param("count", True, "sample.count=true: expected a whole number (how many).", id="bool-as-int"),
        pytest.param("count", "3", "sample.count=3: expected a whole number; it is text, write it without quotes "
                     "(how many).", id="text-as-int"),
        pytest.param("count", "4m", "sample.count=4m: expected a whole number; write 4M for millions (how many).",
                     id="unit"),
        pytest.param("rate", [0.1], "sample.rate=[0.1]: expected a number; the values of a sweep (-m) have no brackets "
                     "(how fast).", id="brackets"),
        pytest.param("count", 10, "sample.count=10: must be at least 0 and below 10.", id="below"),
        pytest.param("count", -1, "sample.count=-1: must be at least 0 and below 10.", id="at-least"),
        pytest.param("rate", 0, "sample.rate=0: must be at most 1 and above 0.", id="above"),
        pytest.param("rate", 1.5, "sample.rate=1.5: must be at most 1 and above 0.", id="at-most"),
        pytest.param("rate", math.nan, "sample.rate=nan: must be at most 1 and above 0 and finite.", id="nan"),
        pytest.param("rate", True, "sample.rate=true: expected a number (how fast).", id="bool-as-float"),
        pytest.param("on", 1, "sample.on=1: expected true or false (whether).", id="int-as-bool"),
        pytest.param("kind", "fats", "sample.kind=fats: choose one of off, on, fast; did you mean 'fast'?", id="word"),
        pytest.param("kind", "x", "sample.kind=x: choose one of off, on, fast.", id="far-word"),
        pytest.param("rest", "some", "sample.rest=some: expected a number or auto (how many more).", id="other-word"),
        pytest.param("rest", -2, "sample.rest=-2: must be at least -1 or auto.", id="range-beside-words"),
        pytest.param("few", 9, "sample.few=9: must be auto, or at least 1 and at most 8.", id="range-behind-words"),
        pytest.param("rest", 1.5, "sample.rest=1.5: expected a whole number (how many more).", id="fraction-of-words"),
        pytest.param("limit", "x", "sample.limit=x: expected a number or null (at most).", id="text-as-optional"),
        pytest.param("limit", 0, "sample.limit=0: must be above 0.", id="range-of-optional"),
        pytest.param("path", None, "sample.path=null: expected text (where).", id="null"),
        pytest.param("pair", 1, "sample.pair=1: expected a list, such as sample.pair=[a,b] (two).", id="no-list"),
        pytest.param("pair", [1], "sample.pair=[1]: expected a list of 2 values (two).", id="short-list"),
        pytest.param("pair", [0, 1], "sample.pair=[0,1]: must be at least 0 and below 1.", id="range-in-list"),
        pytest.param("inner", {"depht": 1}, "sample.inner.depht=1: there is no such setting; did you mean "
                     "'sample.inner.depth'?", id="nested-name"),
        pytest.param("inner", {"depth": 0}, "sample.inner.depth=0: must be at least 1.", id="nested-range"),
        pytest.param("inner", 3, "sample.inner=3: expected names and values, such as sample.inner={depth:VALUE}.",
                     id="no-group"),
        pytest.param("path", MISSING, "sample.path is missing: where; give it as sample.path=VALUE.", id="missing"),
        pytest.param("zzz", 1, "sample.zzz=1: there is no such setting.", id="far-name"),
        pytest.param("_target_", "os.system", "sample._target_=os.system: there is no such setting.", id="target"),
    ],
)  # fmt: skip
def test_refuses_with_the_setting_its_value_and_the_way_out(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        sample(**{name: value})
    assert str(refusal.value) == message


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans(), st.lists(st.integers())))
def test_a_field_holds_its_type_and_range_or_is_refused(value: Any) -> None:
    try:
        found = sample(count=value).count
    except ConfigError:
        assert type(value) is not int or not 0 <= value < 10
        return
    assert type(found) is int and 0 <= found < 10 and found == value


@dataclass(frozen=True, kw_only=True)
class Pluggable(Inner):
    """A schema that others may take the place of."""

    def build(self) -> int:
        return self.depth


@dataclass(frozen=True, kw_only=True)
class Other(Pluggable):
    """Another one."""

    extra: int = setting(1, "more")


@pytest.mark.parametrize("allowed", [(), ("else",)], ids=str)
def test_target_must_be_in_a_package_that_may_be_named(allowed: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"only classes under titan, experiments.*add modules=\[theirs\]"):
        build(Pluggable, {"_target_": "theirs.ship.Ship"}, "axis", allowed)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        pytest.param("subprocess.Popen", "subprocess is a module of Python; name a dataclass of yours", id="python"),
        pytest.param("torch.optim.AdamW", "torch is a library that titan uses; name a dataclass of yours", id="torch"),
        pytest.param("eval", "names no module; write MODULE.CLASS", id="function"),
        pytest.param("Lion", "names no module; write MODULE.CLASS", id="no-module"),
    ],
)
def test_what_can_be_no_class_of_settings_is_rejected_outright(target: str, reason: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        build(Pluggable, {"_target_": target}, "axis", ("subprocess", "torch"))
    assert str(rejected.value).startswith(f"axis._target_={target}: {reason}") and "modules=" not in str(rejected.value)


def test_target_of_a_package_that_only_begins_alike() -> None:
    with pytest.raises(ConfigError, match="only classes under"):
        build(Pluggable, {"_target_": "titanic.Ship"}, "axis")


def test_target_takes_the_place_and_its_fields_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])
    data = {"_target_": "elsewhere.Other", "extra": 2}
    assert build(Pluggable, data, "axis", ("elsewhere",)) == Other(extra=2)
    with pytest.raises(ConfigError, match=r"axis\.more=1: there is no such setting"):
        build(Pluggable, data | {"more": 1}, "axis", ("elsewhere",))


def test_defaults_build_themselves_and_go_through_json() -> None:
    content = collect_defaults(Sample) | {"path": "p"}
    assert json.loads(json.dumps(content)) == content
    assert build(Sample, content) == sample()
    assert build(Sample, to_plain(sample())) == sample()


@pytest.mark.parametrize(
    ("word", "end"),
    [
        pytest.param("training.sed", "; did you mean 'training.seed'?", id="near"),
        pytest.param("seed", "; did you mean 'training.seed'?", id="without-its-axis"),
        pytest.param("model.seed", "; did you mean 'training.seed'?", id="under-another-axis"),
        pytest.param("trainig.step", "; did you mean 'training.steps'?", id="two-slips"),
        pytest.param("training.zzz", ".", id="far-in-the-same-axis"),
        pytest.param("zzz", ".", id="far"),
    ],
)
def test_nearest(word: str, end: str) -> None:
    assert suggest_nearest(word, ["training.seed", "training.steps", "model.dim"]) == end


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ([1, None], "[1,null]"), ({"a": (1, 2)}, "{a:[1,2]}"), ("x", "x"), (1.5, "1.5")],
)
def test_show(value: Any, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("pattern", "end"),
    [
        pytest.param("*rms.weight", "; did you mean '*norm.weight'?", id="end"),
        pytest.param("*.wqq.weight", "; did you mean '*.wq.weight'?", id="dot"),
        pytest.param("*zebra", ".", id="nothing-near"),
        pytest.param("*", ".", id="wildcard-alone"),
        pytest.param("layers.6.*", ".", id="no-end"),
    ],
)
def test_patterns_are_compared_with_the_ends_of_names(pattern: str, end: str) -> None:
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention_norm.weight", "norm.weight"]
    assert suggest_pattern(pattern, names) == end
