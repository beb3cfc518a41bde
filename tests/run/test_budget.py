"""A budget of tokens or device-hours makes steps, and the same ones when the run is composed again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.composing import compose_test_run
from tests.support.runs import TINY, begin_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.run import identity
from titan.run.budget import apply_tokens, build_continuation, count_steps, describe_hours
from titan.training.schema import MOST_STEPS, Training

RECIPE = compose_test_run([*TINY, "name=x"])
STEPLESS = [o for o in TINY if not o.startswith("training.steps")]


@given(
    st.integers(1, 10**7), st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 50)), max_size=3),
)  # fmt: skip
def test_steps_are_the_fewest_that_read_the_tokens(tokens: int, rows: int, growth: list[tuple[int, int]]) -> None:
    grow, start, batch = [], 0, rows
    for more_tokens, more_rows in growth:
        start, batch = start + more_tokens, batch + more_rows
        grow.append((start, batch * 64))
    training = Training(global_batch=rows * 64, seq_len=64, grow=tuple(grow))
    steps = count_steps(training, tokens)
    assert training.count_rows_before(steps + 1) * 64 >= tokens > training.count_rows_before(steps) * 64


@given(
    st.floats(1e-3, 1e19), st.integers(1, 10**10), st.integers(2, 10**9),
    st.lists(st.tuples(st.integers(-9, 10**12), st.integers(0, 10**10)), max_size=2),
    st.sampled_from([None, 1e-3, 1e12]),
)  # fmt: skip
def test_any_budget_makes_steps_or_is_rejected(
    tokens: float, batch: int, seq_len: int, grow: list[tuple[int, int]], hours: float | None
) -> None:
    training = Training(global_batch=batch, seq_len=seq_len, grow=tuple(grow), tokens=tokens, hours=hours)
    try:
        recipe = apply_tokens(dataclasses.replace(RECIPE, training=training), [])
    except ConfigError:
        return
    assert 1 <= recipe.training.steps <= MOST_STEPS and batch % seq_len == 0


def test_tokens_make_the_same_run_as_their_steps() -> None:
    by_tokens = compose_test_run([*STEPLESS, "training.tokens=5000", "name=x"])
    steps = by_tokens.training.steps
    by_steps = compose_test_run([*STEPLESS, f"training.steps={steps}", "name=x"])
    assert (steps - 1) * by_steps.training.global_batch < 5000 <= steps * by_steps.training.global_batch
    assert identity.collect_science(by_tokens, "", None) == identity.collect_science(by_steps, "", None)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        pytest.param(["training.hours=1", "training.step_seconds=0.5"], 7200, id="one-device"),
        pytest.param(["training.hours=1", "training.step_seconds=0.5", "parallelism=fsdp"], 3600, id="two-devices"),
        full(["recipe=shipped_8b", "training.tokens=1e9"], 15259, id="instead-of-a-recipes-steps"),
    ],
)
def test_a_budget_decides_the_steps(overrides: list[str], steps: int) -> None:
    own = [] if overrides[0].startswith("recipe") else STEPLESS
    assert compose_test_run([*own, *overrides, "name=x"], remote=not own).training.steps == steps


@pytest.mark.full
def test_predicted_time_decides_the_steps() -> None:
    run = compose_test_run(["recipe=shipped_8b", "training.hours=8", "name=x"], remote=True)
    longer = compose_test_run(["recipe=shipped_8b", "training.hours=16", "name=x"], remote=True)
    assert 1000 < run.training.steps < 4000
    assert longer.training.steps == pytest.approx(2 * run.training.steps, abs=1)


@pytest.mark.full
def test_an_unfinished_run_keeps_the_steps_of_its_hours(tmp_path: Path) -> None:
    line = [*STEPLESS, "training.hours=1", f"hydra.run.dir={tmp_path}"]
    run = compose_test_run([*line, "training.step_seconds=100"])
    begin_run(run)
    again = compose_test_run([*line, "training.step_seconds=50", "parallelism=fsdp"])
    assert again.training.steps == run.training.steps == 36
    assert compose_test_run([*line, "training.hours=2", "training.step_seconds=50"]).training.steps == 144


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, ""),
        ({"hours": 8.0}, "8 device-hours by the time of a step as predicted"),
        ({"hours": 8.0, "step_seconds": 0.5}, "8 device-hours by the time of a step as given"),
        ({"hours": 8.0, "measured": "runs/a"}, "8 device-hours by the time of a step measured in runs/a"),
    ],
    ids=["none", "predicted", "given", "measured"],
)
def test_where_the_time_of_a_step_is_from_is_said(settings: dict[str, Any], sentence: str) -> None:
    assert describe_hours(Training(**settings)) == sentence


@pytest.mark.full
def test_a_finished_run_is_continued_without_its_budget(tmp_path: Path) -> None:
    line = [*STEPLESS, "training.tokens=5000", f"hydra.run.dir={tmp_path}"]
    run = compose_test_run(line)
    longer = compose_test_run([*line, *build_continuation(run, run.training.steps * 2)])
    assert (longer.training.steps, longer.training.tokens) == (run.training.steps * 2, None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.tokens=5000", "training.steps=5"], "training.steps=5 sets the number of steps too"),
        (["training.tokens=5000", "training.hours=2"], "training.hours=2 sets the number of steps too"),
        (["training.tokens=5000", "checkpoint.decay_steps=5"], "checkpoint.decay_steps sets the number of steps too"),
        (["training.hours=1"], "the time of a step is not known"),
        (["training.hours=1e-9", "training.step_seconds=0.5"], "takes longer; give at least 0.00014"),
        (["training.hours=1e-9", "training.step_seconds=0.5"], "on 1 device takes"),
        (["training.tokens=0"], "must be above 0"),
        (["training.tokens=1e18"], "makes 7,812,500,000,000,000 steps, and a run has 1,000,000,000 at most"),
        (["training.hours=1e9", "training.step_seconds=1e-3"], "training.hours=1e\\+09: makes 3,600,000,000,000,000"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_rejected(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        compose_test_run([*STEPLESS, *overrides, "name=x"])


def test_a_budget_is_no_part_of_a_run_that_has_none() -> None:
    training = dataclasses.asdict(compose_test_run([*TINY, "name=x"]).training)
    assert (training["tokens"], training["hours"]) == (None, None)
