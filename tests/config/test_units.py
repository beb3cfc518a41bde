"""Numbers with units: what each means follows from what its setting counts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.composing import compose_test_run
from tests.support.runs import TINY
from tests.support.tiers import full
from titan.config.settings import build, setting
from titan.errors import ConfigError
from titan.run import identity


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A setting of every unit."""

    every: int = setting(1, "steps", at_least=0)
    tokens: float | None = setting(None, "tokens")
    few: int | str = setting("auto", "how many", words=("auto",))
    seq_len: int = setting(256, "tokens per row", unit="powers")
    grow: tuple[tuple[int, int], ...] = setting((), "later batches", unit="powers")
    share: float = setting(0.1, "share", at_least=0, below=1)
    decay: float = setting(0.1, "decay")
    minutes: float = setting(1.0, "minutes between")
    wait_seconds: int = setting(1, "seconds", at_most=10_000)
    grace: float = setting(1.0, "how long", unit="seconds")
    memory_gib: float | None = setting(None, "memory")
    margin: float | str = setting(0.1, "a number, or a share as text")


def read(name: str, text: object) -> object:
    """The value of a setting for a text."""
    return getattr(build(Counts, {name: text}), name)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("every", "10k", 10_000), ("every", "1.5K", 1500), ("every", "2Ki", 2048), ("every", "1 B", 10**9),
        ("tokens", "1B", 1e9), ("tokens", "0.5M", 5e5), ("tokens", "15T", 1.5e13), ("tokens", "1b", 1e9),
        ("tokens", ".5M", 5e5), ("few", "4k", 4000), ("seq_len", "32Ki", 32768), ("seq_len", "1B", 10**9),
        ("grow", [["1B", "4Mi"]], ((10**9, 4 * 2**20),)), ("share", "5%", 0.05), ("share", "0.1%", 0.001),
        ("minutes", "1h", 60.0), ("minutes", "90s", 1.5), ("minutes", "2d", 2880.0), ("minutes", "30m", 30.0),
        ("wait_seconds", "2min", 120), ("grace", "1h", 3600.0), ("memory_gib", "80GiB", 80.0),
        ("margin", "2%", "2%"), ("margin", "1k", 1000.0),
    ],
)  # fmt: skip
def test_a_unit_is_that_of_the_setting(name: str, text: object, value: object) -> None:
    assert (read(name, text), type(read(name, text))) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("seq_len", "32k", "write 32Ki (32,768) or 32000 ("), ("seq_len", "0.5M", "write 0.5Mi (524,288) or 500000"),
        ("grow", [["1B", "4k"]], "write 4Ki (4,096) or 4000"), ("every", "1h", "write minutes=60 for time"),
        ("every", "30m", "write 30M for millions or minutes=30 for time"), ("every", "5%", "it is no share"),
        ("every", "0.0001k", "every=0.0001k: expected a whole number"), ("decay", "10%", "it is no share"),
        ("minutes", "1k", "expected a number (minutes between)"), ("wait_seconds", "1.5s", "a whole number"),
        ("wait_seconds", "1d", "must be at most 10000"), ("few", "5%", "a number or auto; it is no share"),
        ("few", "0.0001k", "few=0.0001k: expected a whole"), ("seq_len", "1m", "write 1Mi or minutes=1 for time"),
        ("memory_gib", "80GB", "expected a number or null"), ("tokens", "1e9B", "expected a number"),
        ("tokens", "1kk", "expected a number"), ("every", "3", "expected a whole number"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_is_rejected(name: str, text: object, advice: str) -> None:
    with pytest.raises(ConfigError) as rejection:
        read(name, text)
    assert advice in str(rejection.value)


@given(st.integers(0, 10**6), st.sampled_from(["", "0", "25", "125"]), st.sampled_from([("k", 3), ("M", 6), ("T", 12)]))
def test_a_number_with_a_unit_is_the_plain_one(whole: int, fraction: str, unit: tuple[str, int]) -> None:
    text = f"{whole}.{fraction}" if fraction else str(whole)
    assert read("tokens", text + unit[0]) == float(f"{text}e{unit[1]}") == float(Fraction(text) * 10 ** unit[1])


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        (("training.tokens=5k", "training.seq_len=0.0625Ki"), ("training.tokens=5000", "training.seq_len=64")),
        full(("dataset.validation=5%",), ("dataset.validation=0.05",), id="share"),
        full(("schedule.warmup=0.001k",), ("schedule.warmup=1",), id="words"),
    ],
)
def test_a_run_records_the_number(typed: tuple[str, ...], plain: tuple[str, ...]) -> None:
    small = [o for o in TINY if not o.startswith("training.steps")]
    runs = [compose_test_run([*small, *overrides, "name=x"]) for overrides in (typed, plain)]
    assert identity.collect_science(runs[0], "", None) == identity.collect_science(runs[1], "", None)
    assert runs[0].training == runs[1].training and runs[0].dataset == runs[1].dataset
