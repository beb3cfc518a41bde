"""The schedule axis: learning rate and weight decay at every step."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.schedule.schema import KINDS, WSD, Constant, Cosine, InverseSqrt, Linear, Schedule

SHARES = st.floats(0, 1)
FALLING = ("wsd", "cosine", "linear")


@dataclass(frozen=True)
class Case:
    """A schedule with the number of steps of a training that it fits."""

    schedule: Schedule
    steps: int

    @property
    def start(self) -> int:
        return self.schedule.warmup_steps(self.steps)

    def at(self, step: int) -> float:
        return self.schedule.build(self.steps)(step).lr

    def factors(self) -> list[float]:
        """The factors of all steps."""
        return [self.at(step) for step in range(1, self.steps + 1)]


@st.composite
def cases(draw: st.DrawFn, *kinds: str) -> Case:
    """Any schedule that `check` lets pass."""
    steps, name = draw(st.integers(1, 500)), draw(st.sampled_from(kinds or FALLING))
    values: dict[str, Any] = {"warmup": draw(st.one_of(st.just("auto"), st.integers(0, steps - 1)))}
    values |= {} if name == "constant" else {"final_lr": draw(SHARES)}
    values |= {"decay": draw(SHARES)} if name == "wsd" else {}
    schedule = KINDS[name](**values)
    schedule.check(steps)
    return Case(schedule, steps)


def formula(case: Case, step: int) -> float:
    """The factor by the definitions: a plateau and a line, half a cosine, or a line."""
    schedule, start = case.schedule, case.start
    if step <= start:
        return step / start
    if isinstance(schedule, WSD):
        start = max(start, case.steps - round(schedule.decay * case.steps))
    if step <= start:
        return 1.0
    done = min(1.0, (step - 1 - start) / (case.steps - start))
    shape = (1 + math.cos(math.pi * done)) / 2 if isinstance(schedule, Cosine) else 1 - done
    return schedule.final_lr + (1 - schedule.final_lr) * shape


@given(cases())
def test_learning_rates_are_bitwise_as_defined(case: Case) -> None:
    assert case.factors() == [formula(case, step) for step in range(1, case.steps + 1)]


@given(cases(*KINDS))
def test_is_a_share_and_never_zero(case: Case) -> None:
    assert all(0 < factor <= 1 for factor in case.factors())


@given(cases(*KINDS))
def test_warm_up_is_linear_from_zero_to_the_peak(case: Case) -> None:
    assert case.factors()[: case.start] == pytest.approx([step / case.start for step in range(1, case.start + 1)])
    peak = case.start - 1 if isinstance(case.schedule, InverseSqrt) and case.start else case.start
    assert case.factors()[peak] == 1.0


@given(cases(*KINDS))
def test_falls_after_warm_up_and_stays_above_the_end(case: Case) -> None:
    rest = case.factors()[case.start :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    assert min(rest) >= case.schedule.final_lr - 1e-12


def test_inverse_square_root_has_halved_at_four_times_the_warm_up() -> None:
    case = Case(InverseSqrt(warmup=10, final_lr=0.2), 1000)
    assert [case.at(step) for step in (10, 40, 90, 1000)] == [1.0, 0.5, pytest.approx(1 / 3), 0.2]
    assert case.at(40) == Case(case.schedule, 5000).at(40), "it does not depend on the last step"


def test_constant_stays_at_the_peak() -> None:
    assert Case(Constant(warmup=2), 5).factors() == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, [1.0, 1.0, 1.0, 1.0, 1.0], id="constant"),
        pytest.param({"weight_decay_shape": "lr"}, [0.5, 1.0, 1.0, 2 / 3, 1 / 3], id="as-the-learning-rate"),
        pytest.param({"weight_decay_shape": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2], id="linear"),
        pytest.param(
            {"weight_decay_shape": "linear", "final_weight_decay": 2.0}, [1.0, 1.2, 1.4, 1.6, 1.8], id="linear-rising"
        ),
        pytest.param(
            {"weight_decay_shape": "cosine", "final_weight_decay": 0.5},
            [0.5 + 0.25 * (1 + math.cos(math.pi * i / 5)) for i in range(5)],
            id="cosine",
        ),
    ],
)
def test_weight_decay(settings: dict[str, Any], expected: list[float]) -> None:
    factors = Linear(warmup=2, **settings).build(5)
    assert [factors(step).weight_decay for step in range(1, 6)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        pytest.param(9, "auto", 0, id="none-for-few-steps"),
        pytest.param(240, "auto", 24, id="a-tenth"),
        pytest.param(10**6, "auto", 2000, id="at-most-2000"),
        pytest.param(100, 7, 7, id="given"),
        pytest.param(100, 0, 0, id="none"),
    ],
)
def test_warm_up_steps(steps: int, warmup: int | str, expected: int) -> None:
    assert Schedule(warmup=warmup).warmup_steps(steps) == expected


class Unfinished(Schedule):
    pass


class Negative(Schedule):
    def after_warmup(self, step: int, steps: int) -> float:
        return 0.5 - step / steps


class Undefined(Schedule):
    def lr_factor(self, step: int, steps: int) -> float:
        return 1 / (step - steps)


class Text(Schedule):
    def after_warmup(self, step: int, steps: int) -> Any:
        return "fast"


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        pytest.param(Unfinished, "has no after_warmup", id="not-implemented"),
        pytest.param(Negative, r"factor of lr at step 6 of 10 is -0.09\d*; it must be", id="negative"),
        pytest.param(Undefined, "ZeroDivisionError for training.steps=10", id="raises"),
        pytest.param(Text, "is fast; it must be", id="no-number"),
    ],
)
def test_a_wrong_class_of_the_user_is_rejected(cls: type[Schedule], expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^schedule\._target_={__name__}.{cls.__name__}: .*{expected}"):
        cls(warmup=1).check(10)
