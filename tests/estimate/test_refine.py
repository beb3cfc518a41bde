"""Factors that measured runs ask for: their arithmetic, and what they change in a plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.composing import compose_test_run
from titan.estimate import plan as planning
from titan.estimate import refine
from titan.estimate.refine import CorrectionFactors, MeasuredRun, Refinement
from titan.estimate.step_time import COMMUNICATION, IDLE, sum_groups

FACTOR, SECONDS = st.floats(0.4, 2.5), st.floats(0.01, 100.0)
NOISE = st.floats(-0.5, 0.5)
SHARES = (0.0, 0.1, 0.3, 0.5, 0.7)
"""Of communication in made runs."""


def sample(
    share: float, seconds: float, factors: CorrectionFactors = refine.UNCHANGED, noise: float = 0.0
) -> MeasuredRun:
    """A run that takes what the factors say, times exp(noise)."""
    computation, communication = (1 - share) * seconds, share * seconds
    taken = factors.computation * computation + factors.communication * communication
    return MeasuredRun(computation, communication, taken * math.exp(noise), 10.0, 10.0 * factors.memory)


def squares(samples: list[MeasuredRun], factors: CorrectionFactors) -> float:
    return sum(refine.compute_time_error(s, factors) ** 2 for s in samples)


samples_with_noise = st.lists(
    st.builds(sample, st.floats(0.0, 0.9), SECONDS, st.just(refine.UNCHANGED), NOISE), min_size=1, max_size=8
)


@given(FACTOR, FACTOR, FACTOR, st.lists(SECONDS, min_size=5, max_size=5))
@pytest.mark.full
def test_factors_that_the_runs_were_made_with_are_found(
    computation: float, communication: float, memory: float, seconds: list[float]
) -> None:
    asked = CorrectionFactors(computation, communication, memory)
    found = refine.fit_factors([sample(share, s, asked) for share, s in zip(SHARES, seconds, strict=True)])
    assert found.factors.memory == pytest.approx(memory)
    assert found.time.after < 1e-3 or computation == pytest.approx(communication, rel=1e-3)
    assert found.factors.computation == pytest.approx(computation, rel=1e-2)
    assert found.factors.communication == pytest.approx(communication, rel=1e-2)


@given(samples_with_noise)
def test_no_factors_in_the_range_are_better(samples: list[MeasuredRun]) -> None:
    one, separate = refine.fit_single_factor(samples), refine.fit_separate_factors(samples)
    assert squares(samples, separate) <= squares(samples, one) + 1e-9 <= squares(samples, refine.UNCHANGED) + 2e-9
    assert min(separate.computation, separate.communication) > 0
    for computation in (0.3, 0.7, 1.0, 1.5, 3.0):
        for communication in (0.3, 1.0, 3.0):
            other = CorrectionFactors(computation, communication)
            assert squares(samples, separate) <= squares(samples, other) * 1.02 + 1e-6


@given(samples_with_noise, FACTOR)
def test_slower_runs_are_predicted_as_much_slower(samples: list[MeasuredRun], slower: float) -> None:
    slowed = [replace(s, seconds=slower * s.seconds) for s in samples]
    one, two = refine.fit_separate_factors(samples), refine.fit_separate_factors(slowed)
    for s in samples:  # not the factors themselves, which alike runs do not determine
        assert refine.compute_time_error(s, two) - refine.compute_time_error(s, one) == pytest.approx(
            math.log(slower), abs=1e-3
        )


@pytest.mark.parametrize(
    ("shares", "separate"),
    [
        pytest.param((0.1, 0.3, 0.6), False, id="too-few"),
        pytest.param((0.1, 0.3, 0.6, 0.8), True, id="enough"),
        pytest.param((0.3, 0.3, 0.3, 0.3), False, id="all-alike"),
        pytest.param((0.0, 0.0, 0.0, 0.0), False, id="no-communication"),
    ],
)
def test_separate_factors_need_runs_that_determine_them(shares: tuple[float, ...], separate: bool) -> None:
    asked = CorrectionFactors(1.5, 0.5)
    noises = (0.01, -0.01, 0.005, -0.005)
    found = refine.fit_factors(
        [sample(share, 1.0, asked, noise) for share, noise in zip(shares, noises, strict=False)]
    ).factors
    assert (found.computation != found.communication) == separate


def test_errors_are_of_runs_that_are_left_out() -> None:
    exact = refine.fit_factors([sample(0.0, 1.0, CorrectionFactors(2.0, 2.0))] * 3).time
    assert exact.before == pytest.approx(1.0) and exact.after == pytest.approx(0.0)
    assert exact.ninety == refine.NOISE
    runs = [sample(0.0, 1.0, refine.UNCHANGED, noise) for noise in (0.0, 0.0, 0.3)]
    errors = refine.fit_factors(runs).time
    assert errors.ninety == pytest.approx(math.expm1(0.3))  # the third, by the first two
    assert errors.after == pytest.approx(math.expm1(0.15))
    assert not refine.fit_factors(runs[1:]).time.left_out


@pytest.mark.full
def test_a_plan_takes_the_factors_and_the_interval() -> None:
    run = compose_test_run(["model=llama1b", "dataset=synthetic", "checkpoint=off", "parallelism=pp", "cluster=h100",
                    "compile=block", "hydra.run.dir=/x"], remote=True)  # fmt: skip
    planned = planning.build_plan(run, run.layout, run.microbatches, run.machine)
    errors = refine.RelativeErrors(0.3, 0.02, 0.03, left_out=True)
    found = Refinement(CorrectionFactors(2.0, 0.5, 1.1), 4, planned.step.devices, errors, None)
    refined = found.refine_plan(planned)
    before, after = sum_groups(planned.step.parts), sum_groups(refined.step.parts)
    assert after[COMMUNICATION] == pytest.approx(0.5 * before[COMMUNICATION])
    assert after[IDLE] == pytest.approx(2 * before[IDLE]) and before[IDLE] > 0
    assert refined.fullest.bytes == pytest.approx(1.1 * planned.fullest.bytes)
    assert (refined.error, refined.memory_error) == (0.03, planned.memory_error)
    last = [max(span.end for span in each.step.spans) for each in (planned, refined)]
    assert last[1] / last[0] == pytest.approx(refined.step.seconds / planned.step.seconds)
    assert replace(found, devices=1).refine_plan(planned).error == planned.error  # more devices than any run had
    few = replace(found, time=replace(errors, left_out=False))
    assert few.refine_plan(planned).error == planned.error
    assert replace(few, time=replace(few.time, ninety=0.5)).refine_plan(planned).error == 0.5
    same = replace(found, factors=refine.UNCHANGED).refine_plan(planned)
    assert same.step == planned.step
