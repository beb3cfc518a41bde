"""What counts of several attempts, what they cost, and how fast they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.made_runs import BETWEEN, START, Story, StoryAttempt, make_run, read_lines, write_lines
from titan.report import estimate
from titan.report.collect import RawRun, collect_runs
from titan.report.comparison import compare
from titan.report.estimate import build_member
from titan.report.history import History
from titan.report.render import comparison_report
from titan.report.render.table_data import build_columns

SEVERAL = Story(
    attempts=(
        StoryAttempt(0, 22),
        StoryAttempt(15, 30, ("parallelism=fsdp",)),
        StoryAttempt(30, 40, ("parallelism=fsdp",)),
    ),
    jitter=0,
)
"""On one device to step 22, of which 7 steps are lost; then on two devices."""
STEP, STALL = SEVERAL.seconds, SEVERAL.stall


def read(directory: Path, story: Story, *overrides: str) -> RawRun:
    return collect_runs([make_run(directory, story, *overrides)]).runs[0]


def test_each_step_counts_once_by_its_last_attempt(tmp_path: Path) -> None:
    history = History(read(tmp_path / "run", SEVERAL))
    assert list(history.steps.step) == list(range(1, 41))
    assert list(history.steps.attempt) == [1] * 15 + [2] * 15 + [3] * 10
    assert [v["step"] for v in history.validations] == [10, 20, 30, 40]
    assert {v["step"]: v["attempt"] for v in history.validations}[20] == 2


def test_what_was_lost_and_not_done_again_does_not_count(tmp_path: Path) -> None:
    history = History(read(tmp_path / "run", Story(attempts=(StoryAttempt(0, 22), StoryAttempt(15, 18)))))
    assert list(history.steps.step) == list(range(1, 19))
    assert [v["step"] for v in history.validations] == [10]


def test_device_hours_are_of_all_lives_each_with_its_devices(tmp_path: Path) -> None:
    cost = History(read(tmp_path / "run", SEVERAL)).compute_cost()
    attempts = [START + count * STEP + STALL for count in (22, 15, 10)]
    assert cost.device_hours == pytest.approx((attempts[0] + 2 * attempts[1] + 2 * attempts[2]) / 3600, rel=0.01)
    assert cost.goodput == pytest.approx(40 * STEP / sum(attempts), rel=0.01)
    assert (cost.attempts, cost.steps_again, cost.checkpoint_seconds) == (3, 7, 3 * STALL)
    assert cost.start_seconds == pytest.approx(3 * START, abs=3)  # run.yaml gives whole seconds
    assert cost.data_seconds == pytest.approx(47 * 0.01 * STEP)
    assert cost.device_hours < BETWEEN / 3600 / 2  # the time between attempts costs nothing


def test_device_hours_of_a_step_hold_stalls_and_lost_steps_and_no_start_up(tmp_path: Path) -> None:
    hours = History(read(tmp_path / "run", SEVERAL)).device_hours * 3600
    first = 22 * STEP + STALL
    assert hours[14] == pytest.approx(15 * STEP, abs=1.1)
    assert hours[15] == pytest.approx(first + 2 * STEP, abs=3)
    assert hours[-1] == pytest.approx(first + 2 * (25 * STEP + STALL), abs=5)
    assert (np.diff(hours) >= 0).all()


def test_a_run_that_did_nothing(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", Story(attempts=(StoryAttempt(0, 20),)))
    write_lines(raw.directory, [])
    (raw,) = collect_runs([tmp_path / "run"]).runs
    found = build_member(raw, "it").run
    assert (found.step, found.tokens, found.loss, found.speed, found.cost.device_hours) == (0, 0, None, None, 0)


def test_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", Story(sources={"web": 0.1, "code": -0.1}))
    found, last = build_member(raw, "it").run, [x for x in read_lines(tmp_path / "run") if "validation_loss" in x][-1]
    assert (found.state, found.decayed, found.step, found.steps, found.tokens) == ("finished", True, 40, 40, 40 * 128)
    assert (found.validation, found.bits) == (last["validation_loss"], last["bits_per_byte"])
    assert found.bits_by_source == {"web": last["bits_per_byte/web"], "code": last["bits_per_byte/code"]}
    assert (found.hardware, found.devices) == ("NVIDIA H200", 1)


def test_a_final_validation_that_metrics_lack_is_that_of_the_result(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", Story())
    write_lines(raw.directory, [x for x in read_lines(raw.directory) if "validation_loss" not in x])
    (again,) = collect_runs([raw.directory]).runs
    assert build_member(again, "it").run.validation == raw.result["validation_loss"]


def test_an_unfinished_run_has_no_final_validation(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Story(attempts=(StoryAttempt(0, 30),)))
    said = {"finished": False, "step": 30, "attempt": 1, "validation_loss": 3.0, "bits_per_byte": 1.0}
    (tmp_path / "run/result.json").write_text(json.dumps(said))
    found = build_member(collect_runs([tmp_path / "run"]).runs[0], "it").run
    assert (found.state, found.decayed, found.validation, found.bits) == ("stopped", False, None, None)
    assert len(found.curves.validation) == 3


def test_warm_up_steps_of_each_life_are_not_timed(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", SEVERAL)
    lines = read_lines(raw.directory)
    for attempt in (1, 2, 3):
        for line in [x for x in lines if "loss" in x and x["attempt"] == attempt][:3]:
            line["step_seconds"] = 60.0
    write_lines(raw.directory, lines)
    (raw,) = collect_runs([raw.directory]).runs
    found = estimate.measure_attempts(raw)
    assert [s.steps for s in found] == [19, 12, 7]
    assert all(s.step_seconds.p90 == pytest.approx(STEP) for s in found)
    whole = estimate.measure_run(raw)
    assert whole is not None and whole.steps == 19  # of the attempts with the last layout


def test_a_life_of_warm_up_alone_has_no_speed(tmp_path: Path) -> None:
    assert estimate.measure_run(read(tmp_path / "run", Story(attempts=(StoryAttempt(0, 3),)))) is None


def test_both_conventions_of_mfu(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", Story())
    found, model = estimate.measure_run(raw), raw.model
    assert found and model and found.mfu and found.mfu_causal
    attention = 12 * model.layers * model.heads * model.head_size * 16
    full = model.flops_per_token(16)
    assert found.mfu_causal / found.mfu == pytest.approx((full - attention / 2) / full)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [pytest.param((), "Llama", id="llama"), pytest.param(("model=qwen3_debug", "model.vocab=64"), "Qwen3", id="qwen3")],
)
def test_flops_are_of_the_models_own_class(overrides: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    model = read(tmp_path / "run", Story(), *overrides).model
    assert type(model).__name__ == kind


def test_a_model_that_is_not_here_has_no_flops(tmp_path: Path) -> None:
    raw = read(tmp_path / "run", Story())
    raw.last_document["science"]["model"] = "experiments.gone.Model"
    found = estimate.measure_run(raw)
    assert raw.model is None and found is not None and found.mfu_causal is None


def test_figures_of_tasks_are_compared(tmp_path: Path) -> None:
    """In the table one column for each task and average of weights, in the CSV every figure."""
    for seed in (0, 1):
        raw = read(tmp_path / f"run-{seed}", Story(seed=seed))
        lines = read_lines(raw.directory)
        ours = {"evaluation/hs/acc": 0.5 + seed / 10, "evaluation/hs/acc_low": 0.4, "ema/validation_loss": 3.0 + seed}
        last = max(line["step"] for line in lines)
        write_lines(raw.directory, [x | ours if "validation_loss" in x and x["step"] == last else x for x in lines])
    found = compare([tmp_path])
    (variant,) = found.variants
    assert dict(variant.runs[1].figures) == {"evaluation/hs/acc": 0.6, "ema/validation_loss": 4.0}
    shown = {(column.name, column.unit): column.cells[0].main for column in build_columns(found)}
    assert shown["hs", "acc"] == "0.5500" and shown["ema", "validation_loss"] == "3.5000"
    assert "ema/validation_loss,evaluation/hs/acc" in comparison_report.format_csv(found).splitlines()[0]


@pytest.mark.full
def test_the_load_of_experts_is_compared(tmp_path: Path) -> None:
    """The mean of the last ten steps, then over seeds; columns only where a variant has experts, or dropped tokens."""
    make_run(tmp_path / "dense", Story(), "model=debug", "model.vocab=64")
    for seed in (0, 1):
        lines = read_lines(make_run(tmp_path / f"moe-{seed}", Story(seed=seed), "model=qwen3_moe_debug"))
        first = max(line["step"] for line in lines) - 10
        load = {"expert_entropy": 0.9, "expert_dropped": 0.0}
        for line in (line for line in lines if "loss" in line):
            line |= load | {"expert_load_max": 2.0 + seed if line["step"] > first else 8.0}
        write_lines(tmp_path / f"moe-{seed}", lines)
    found = compare([tmp_path])
    assert [dict(run.experts) for run in found.variants[1].runs] == [
        {"expert_load_max": 2.0 + seed, "expert_entropy": pytest.approx(0.9), "expert_dropped": 0.0} for seed in (0, 1)
    ]
    shown = {
        column.unit: [cell.main for cell in column.cells] for column in build_columns(found) if column.name == "experts"
    }
    assert shown == {"largest load": ["", "2.5"], "entropy": ["", "0.9"]}
    assert "expert_load_max" in comparison_report.format_csv(found).splitlines()[0]
