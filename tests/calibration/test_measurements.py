"""The prices of a step's causes: fitted to times that known prices explain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiers import select_cases
from titan.calibration import measurements
from titan.calibration.measurements import SHAPES, TimedRun, _compose_run, _predict_seconds
from titan.estimate.fit import estimate_memory
from titan.estimate.overhead import PROCESS_GIB
from titan.run.run import Run

FIGURES = {
    "bf16_tflops": 2.0, "fp32_tflops": 0.3, "memory_gb_per_second": 40.0, "matmul_efficiency": 1.0,
    "matmul_prologue": 0.0, "memory_efficiency": 1.0, "attention_tflops": 0.3, "attention_backward_tflops": 0.3,
    "link_gb_per_second": 0.8, "link_microseconds": 250.0, "reduce_gb_per_second": 0.4, "cores": 2,
}  # fmt: skip
PRICES = {
    "eager_factor": 8.0, "loss_factor": 5.0, "update_factor": 2.0, "launch_microseconds": 9.0,
    "step_microseconds": 2000.0,
}  # fmt: skip


def timed(layout: str, figures: dict[str, float], shapes: range = range(len(SHAPES))) -> list[TimedRun]:
    def one(run: Run) -> TimedRun:
        return TimedRun(run, _predict_seconds(run, figures))

    return [one(_compose_run(SHAPES[i], layout)) for i in shapes]


@pytest.mark.full
def test_prices_of_one_device_are_recovered() -> None:
    found = measurements.fit_single_prices(timed("single", FIGURES | PRICES), FIGURES)
    assert found == pytest.approx(PRICES, rel=1e-3)


@pytest.mark.full
def test_the_speed_of_a_rank_is_recovered() -> None:
    figures: Any = FIGURES | PRICES
    runs = timed("single", figures, range(2))
    slower = [TimedRun(each.run, _slowed(each.run, figures)) for each in runs]
    assert measurements.fit_rank_speed(slower, figures, 2) == pytest.approx(1.25)


def _slowed(run: Run, figures: dict[str, float]) -> float:
    """The time with half of the machine at 1.25 times its speed."""
    parts = measurements._predict_parts(run, figures)
    return parts["host"] + 2 / 1.25 * (sum(parts.values()) - parts["host"])


DIMENSIONS = [pytest.param(*names, id="-".join(names)) for names in measurements.DIMENSIONS.items()]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dimension"), select_cases(DIMENSIONS, ("ddp-replicate",)))
def test_host_time_of_a_dimension_is_recovered(layout: str, dimension: str) -> None:
    unit = "action" if dimension == "pipeline" else "block"
    added = {f"{dimension}_{unit}_microseconds": 700.0, f"{dimension}_step_microseconds": 3000.0}
    given = FIGURES | PRICES
    found = measurements.fit_dimension_prices(timed(layout, given | added, range(3)), given, dimension)
    assert found == pytest.approx(added, rel=0.02)


def test_no_price_is_negative() -> None:
    causes = [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    assert measurements.solve_least_squares(causes, [2.0, 1.0], [1.0, 1.0]) == pytest.approx([1.5, 0.0])


@pytest.mark.full
def test_more_ranks_than_cores_take_turns() -> None:
    """What the host does takes longer by ranks per core; a rank that waits in a pipeline leaves its core to others."""
    run = _compose_run(SHAPES[1], "fsdp")
    figures: Any = FIGURES | PRICES | {"shard_step_microseconds": 5000.0}
    crowded, roomy = (measurements._predict_parts(run, figures | {"cores": cores})["host"] for cores in (1, 2))
    assert crowded == pytest.approx(2 * roomy)
    pipeline = _compose_run(SHAPES[1], "pp")
    idle = [measurements._predict_parts(pipeline, figures | {"cores": n}).get("pipeline idle", 0.0) for n in (1, 2)]
    assert idle[0] < 0.1 * idle[1]


@pytest.mark.full
def test_the_measured_memory_of_a_process_counts() -> None:
    run = _compose_run(SHAPES[0], "single")
    hardware = replace(run.cluster.hardware, process_gib=0.3)
    lighter: Any = replace(run, cluster=replace(run.cluster, hardware=hardware))
    both = [estimate_memory(each, each.layout, each.microbatches, "cpu").gib for each in (run, lighter)]
    assert both[0] - both[1] == pytest.approx(PROCESS_GIB - 0.3)
