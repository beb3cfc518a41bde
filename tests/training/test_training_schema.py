"""The learning rate's schedule, at every step."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.training.lr_schedule import lr_factor
from titan.training.schema import Training

Schedule = Literal["wsd", "cosine", "linear"]
SHARES = st.floats(0, 1)


@st.composite
def trainings(draw: st.DrawFn, schedule: str | None = None) -> Training:
    """Any training that `check` lets pass."""
    steps = draw(st.integers(1, 500))
    values: dict[str, Any] = {
        "steps": steps,
        "warmup": draw(st.one_of(st.just("auto"), st.integers(0, steps - 1))),
        "schedule": schedule or draw(st.sampled_from(["wsd", "cosine", "linear"])),
        "decay": draw(SHARES),
        "final_lr": draw(SHARES),
    }
    training = Training(**values)
    training.check()
    return training


def factors(training: Training) -> list[float]:
    """The factor of steps 1 to `steps`."""
    return [lr_factor(training, step) for step in range(1, training.steps + 1)]


@given(trainings())
def test_is_a_share_and_never_zero(training: Training) -> None:
    assert all(0 < factor <= 1 for factor in factors(training))


@given(trainings())
def test_warm_up_is_linear_from_zero_to_the_peak(training: Training) -> None:
    start = training.warmup_steps
    assert factors(training)[:start] == pytest.approx([step / start for step in range(1, start + 1)])
    assert factors(training)[start] == 1.0, "the first step after warm-up is at the peak"


@given(trainings())
def test_falls_after_warm_up_and_stays_above_the_end(training: Training) -> None:
    rest = factors(training)[training.warmup_steps :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    assert min(rest) >= training.final_lr - 1e-12


@given(trainings("wsd"))
def test_wsd_is_flat_and_then_falls_evenly(training: Training) -> None:
    end = training.steps - round(training.decay * training.steps)
    plateau = max(training.warmup_steps, end)
    found = factors(training)
    assert all(factor == 1.0 for factor in found[training.warmup_steps : plateau])
    fall = [*found[plateau:], training.final_lr]
    even = (1 - training.final_lr) / max(1, training.steps - plateau)
    if plateau < training.steps:
        assert [a - b for a, b in itertools.pairwise(fall)] == pytest.approx([even] * (len(fall) - 1), abs=1e-9)


@given(trainings("cosine"))
def test_cosine_is_halfway_in_the_middle(training: Training) -> None:
    start, steps = training.warmup_steps, training.steps
    if (steps - start) % 2 == 0:
        middle = lr_factor(training, start + (steps - start) // 2 + 1)
        assert middle == pytest.approx((1 + training.final_lr) / 2)


@given(trainings("linear"))
def test_linear_falls_evenly(training: Training) -> None:
    fall = [*factors(training)[training.warmup_steps :], training.final_lr]
    even = (1 - training.final_lr) / (training.steps - training.warmup_steps)
    assert [a - b for a, b in itertools.pairwise(fall)] == pytest.approx([even] * (len(fall) - 1), abs=1e-9)


@given(trainings())
def test_would_end_at_the_final_rate(training: Training) -> None:
    flat = training.schedule == "wsd" and round(training.decay * training.steps) == 0
    if not flat:
        assert lr_factor(training, training.steps + 1) == pytest.approx(training.final_lr, abs=1e-12)


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear"])
def test_has_no_jump(schedule: Schedule) -> None:
    training = Training(steps=1000, warmup=100, schedule=schedule, decay=0.2, final_lr=0.1)
    found = [0.0, *factors(training), 0.1]
    assert max(abs(a - b) for a, b in itertools.pairwise(found)) <= 0.0101


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
    assert Training(steps=steps, warmup=warmup).warmup_steps == expected


@given(st.integers(2, 4096), st.integers(1, 10**6))
def test_refused_batch_names_the_nearest_that_fits(seq_len: int, batch: int) -> None:
    training = Training(seq_len=seq_len, global_batch=batch)
    if batch % seq_len == 0:
        training.check()
        assert training.rows * seq_len == batch
        return
    with pytest.raises(ConfigError) as raised:
        training.check()
    nearest = int(str(raised.value).split()[-1].rstrip("."))
    assert nearest > 0
    assert nearest % seq_len == 0
    assert abs(nearest - batch) <= seq_len / 2 or nearest == seq_len
