"""Intervals say whether runs were measured on the hardware that is planned with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.composing import compose_test_run
from titan.bench import fit_costs
from titan.cluster.hardware import Hardware
from titan.estimate.known_hardware import CALIBRATED_FIGURES, PUBLISHED_HARDWARE, describe_unmeasured
from titan.estimate.plan import PUBLISHED, build_plan, resolve_hardware
from titan.run.compose import compose_run


def test_the_published_hardware_is_that_of_the_fit() -> None:
    kinds = {row["gpu"] for row in fit_costs.read_runs()}
    runs = [compose_run([*fit_costs.DEVICES[kind], "model=llama8b", "parallelism=fsdp"], remote=True) for kind in kinds]
    assert {resolve_hardware(run.cluster, run.machine) for run in runs} == set(PUBLISHED_HARDWARE)


@pytest.mark.parametrize(
    ("overrides", "is_known"),
    [
        pytest.param(["cluster=h100"], True, id="published"),
        pytest.param(["cluster=a100"], False, id="data-sheet"),
        pytest.param(["cluster=h100", "cluster.hardware.link_gb_per_second=100"], False, id="typed"),
    ],
)
def test_a_plan_says_so(overrides: list[str], is_known: bool) -> None:
    run = compose_test_run(["parallelism=fsdp", *overrides], remote=True)
    text = build_plan(run, run.layout, run.microbatches, run.machine).intervals
    assert text == PUBLISHED if is_known else text.startswith(f"{PUBLISHED}; they ran on H100, not on hardware with")


def test_a_cpu_is_known_where_it_was_calibrated() -> None:
    measured = Hardware(**dict.fromkeys(CALIBRATED_FIGURES, 1.0))  # type: ignore[arg-type]
    assert describe_unmeasured(measured, "cpu") == ""
    assert "titan.calibrate has not measured this one" in describe_unmeasured(
        replace(measured, eager_factor=None), "cpu"
    )
