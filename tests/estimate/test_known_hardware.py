"""Intervals say whether runs were measured on the hardware that is planned with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.measure import fit_costs
from tests.support.composing import compose_test_run
from titan.cluster.schema import Hardware
from titan.estimate.plan import (
    CALIBRATED_FIGURES,
    EXPERTS_HARDWARE,
    PUBLISHED,
    PUBLISHED_HARDWARE,
    build_plan,
    describe_unmeasured,
    resolve_hardware,
)
from titan.run.compose import compose_run


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "hardware"),
    [
        pytest.param(fit_costs.PUBLISHED, PUBLISHED_HARDWARE, id="dense"),
        pytest.param(fit_costs.EXPERTS, EXPERTS_HARDWARE, id="experts"),
    ],
)
def test_the_published_hardware_is_that_of_the_fit(file: Path, hardware: tuple[Hardware, ...]) -> None:
    kinds = {row["gpu"] for row in fit_costs.read_runs(file)}
    runs = [compose_run([*fit_costs.DEVICES[kind], "model=llama8b", "parallelism=fsdp"], remote=True) for kind in kinds]
    assert {resolve_hardware(run.cluster, run.machine) for run in runs} == set(hardware)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cluster", "end"),
    [
        pytest.param("b200", "", id="published"),
        pytest.param("a100", "; they ran on H100 and B200, not on hardware with these figures", id="data-sheet"),
    ],
)
def test_a_plan_of_experts_names_their_hardware(cluster: str, end: str) -> None:
    run = compose_test_run(["model=qwen3_moe_debug", "parallelism=ep", f"cluster={cluster}"], remote=True)
    text = build_plan(run, run.layout, run.microbatches, run.machine).intervals
    assert (end in text) if end else ("they ran on" not in text)


@pytest.mark.full
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
