"""The roofline's arithmetic: by hand for known models, and properties of any."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.measure import roofline
from tests.measure.roofline import DeviceRates
from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from titan.cluster import devices
from titan.run.run import Run

H200 = DeviceRates(matmul=750e12, matmul_8bit=1400e12, copy=4.2e12, attention=0.65 * 750e12)
"""About what an H200 is measured to do."""
LONG = ("training.seq_len=8192", "training.global_batch=8192", "precision=bf16", "cluster.memory_gib=1000000")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    monkeypatch.chdir(tmp_path)


@cache
def run_of(*overrides: str) -> Run:
    return compose_test_run(["dataset=synthetic", *LONG, *overrides])


def least(run: Run, rates: DeviceRates) -> roofline.Roofline:
    return roofline.compute_roofline(run, run.microbatches, rates)


EXPECTED = [
    pytest.param("model=llama1b", 53_000, id="1b"),
    pytest.param("model=llama8b", 11_800, id="8b"),
]


@pytest.mark.parametrize(("model", "expected"), EXPECTED)
def test_known_models_are_expected_near_their_roofline(model: str, expected: float) -> None:
    most = least(run_of(model), H200).tokens_per_second
    assert 0.85 * expected < most < 1.25 * expected


@pytest.mark.full
def test_parts_of_a_block_by_hand() -> None:
    run = run_of("model=debug", "model.layers=1", "training.seq_len=256", "training.global_batch=1024")
    parts, tokens = least(run, DeviceRates(1, 1, 1, 1)).parts, 1024
    block = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640
    head = 256 * 4096
    weights = block + head + head + 3 * 256
    assert parts["matmuls"] == tokens * 6 * (block + head)
    assert parts["attention"] == tokens * 7 * 256 * 256  # half of 12, and one matmul more
    assert parts["loss"] == tokens * 3 * 2 * 4096
    assert parts["casts"] == 2 * (2 + 4) * (block + head)
    assert parts["clipping and optimizer"] == weights * (12 + 12 + 16)
    assert parts["8-bit matmuls"] == 0
    per_token = 16 * 256 + 4 * 384 + 8 * 640 + 5 * 256 + 2 * 256 * 3
    assert parts["elementwise"] == tokens * 2 * per_token


def test_recomputation_takes_time() -> None:
    kept: tuple[Any, ...] = ("none", "every_n", "full")
    plain = run_of("model=llama1b")
    runs = [replace(plain, memory=replace(plain.memory, checkpointing=kind)) for kind in kept]
    seconds = [least(run, H200).parts for run in runs]
    for part in ("matmuls", "attention", "casts", "elementwise"):
        assert seconds[0][part] < seconds[1][part] < seconds[2][part]
    blocks = 6 * runs[0].model.layers * runs[0].model.block_matmul_parameters() * 8192 / H200.matmul
    assert seconds[2]["matmuls"] - seconds[0]["matmuls"] == pytest.approx(blocks / 3)


def test_8_bit_matmuls_are_counted_apart() -> None:
    plain = run_of("model=llama1b")
    small = replace(plain, precision=replace(plain.precision, matmuls="float8"))
    before, after = least(plain, H200), least(small, H200)
    head = 6 * plain.model.vocab * plain.model.dim * 8192 / H200.matmul
    assert after.parts["matmuls"] == pytest.approx(head)
    moved = before.parts["matmuls"] - after.parts["matmuls"]
    assert after.parts["8-bit matmuls"] == pytest.approx(moved * H200.matmul / H200.matmul_8bit)
    assert before.parts["casts"] < after.parts["casts"]
    assert before.tokens_per_second < after.tokens_per_second


def test_rates_come_from_what_was_measured() -> None:
    found = {"matmul_bf16_tflops": 700.0, "matmul_fp32_tflops": 50.0, "copy_gb_per_second": 4000.0}
    assert roofline.select_rates(found, run_of("model=llama1b"), "cuda") == DeviceRates(
        7e14, 7e14, 4e12, pytest.approx(0.65 * 7e14)
    )
    assert (
        roofline.select_rates(found | {"matmul_float8_tflops": 1300.0}, run_of("model=llama1b"), "cuda").matmul_8bit
        == 1.3e15
    )


@pytest.mark.full
def test_more_rows_are_never_slower_a_token() -> None:
    run = run_of("model=debug", "training.seq_len=256")
    batches = [replace(run, training=replace(run.training, global_batch=rows * 256)) for rows in (1, 2, 3, 8, 64)]
    pace = [least(each, H200).tokens_per_second for each in batches]
    assert pace == sorted(pace) and len(set(pace)) == len(pace)
