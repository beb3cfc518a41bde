"""`python -m titan.calibrate`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from titan import calibrate, plan
from titan.calibration import machine as measuring
from titan.calibration import measurements, trials
from titan.calibration.machine import MeasuredParts
from titan.cluster.devices import Machine
from titan.errors import ConfigError, RunError
from titan.estimate.operations import compute_slowdown

GPUS = Machine("cuda", "NVIDIA H100", 2, 8, 80.0, bf16_fast=True)
CPU = Machine("cpu", "CPU", 1, 2, 8.0, bf16_fast=True)


@pytest.mark.full
def test_what_is_measured_can_be_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "REPEATS", 1)
    monkeypatch.setattr(measurements, "ATTENTION", {"cpu": ((1, 2, 128, 32),)})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(trials, "measure_step_seconds", lambda runs: [0.1] * len(runs))
    monkeypatch.setattr(trials, "measure_crowded_steps", lambda runs, ranks: [0.2] * len(runs))
    monkeypatch.setattr(trials, "measure_process_gib", lambda run: 0.3)
    file = tmp_path / "mine" / "cluster" / "here.yaml"
    assert calibrate.main([f"to={file}"]) == 0
    assert {"link_gb_per_second", "process_gib", "shard_block_microseconds"} <= yaml.safe_load(file.read_text())[
        "hardware"
    ].keys()
    given = ["--config-dir", str(tmp_path / "mine"), "cluster=here", "model=debug", "dataset=synthetic"]
    assert plan.main([*given, "parallelism=ddp"]) == 0
    assert "tokens/s per device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["to=here.txt"], "unknown file format"), ([], "to is missing"), (["to=x.yaml", "ranks=0"], "ranks=0")],
    ids=["format", "nothing", "ranks"],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_figures_are_printed_where_the_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "_measure_figures", lambda *_: {"bf16_tflops": 1.0})
    (tmp_path / "x.yaml").symlink_to("/dev/full")
    assert calibrate.main([f"to={tmp_path}/x.yaml"]) == 1
    assert "  bf16_tflops: 1" in capsys.readouterr().out


def test_a_calibration_that_fails_continues_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(name: str, figures: dict[str, float]) -> dict[str, float]:
        measured.append(name)
        if name == "c" and measured.count("c") == 1:
            raise RunError("rank 1 failed.")
        return {name: float(len(figures))}

    monkeypatch.setattr(measuring, "_list_parts", lambda *_: {name: partial(measure, name) for name in "abcd"})
    monkeypatch.setattr(measuring, "format_cluster", lambda machine, figures, ranks: str(figures))
    words = [f"to={tmp_path}/mine/x.yaml"]
    assert calibrate.main(words) == 1
    assert "kept: a, b; the same command measures the rest" in capsys.readouterr().out
    assert calibrate.main(words) == 0
    assert "measured before: a, b; delete" in capsys.readouterr().out
    assert "".join(measured) == "abc" + "cd"
    assert [file.name for file in tmp_path.glob("mine/*")] == ["x.yaml"]
    assert (tmp_path / "mine/x.yaml").read_text() == "{'a': 0.0, 'b': 1.0, 'c': 2.0, 'd': 3.0}"


def test_a_calibration_continues_on_the_same_machine_only(tmp_path: Path) -> None:
    parts = MeasuredParts(tmp_path / "x.yaml", {"host": "a"})
    parts.add("links", {"link_microseconds": 5.0})
    assert MeasuredParts(tmp_path / "x.yaml", {"host": "a"}).parts == {"links": {"link_microseconds": 5.0}}
    assert MeasuredParts(tmp_path / "x.yaml", {"host": "b"}).parts == {}
    parts.file.write_text('{"subject": {"host": "a"}, "parts": {"links": 3}}')
    assert MeasuredParts(tmp_path / "x.yaml", {"host": "a"}).parts == {}
    parts.remove()
    assert list(tmp_path.iterdir()) == []


def test_matmuls_with_a_start_up_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(work: tuple[int, int, int], _: object) -> float:
        m, n, k = work
        return 2 * m * n * (k + 64) / 1e12

    monkeypatch.setattr(measurements, "_build_matmul", lambda m, n, k, *_: (m, n, k))
    monkeypatch.setattr(measurements, "_time_best", times)
    rate, prologue = measurements.measure_matmul(torch.device("cpu"), torch.float32)
    assert prologue == 64 and rate == pytest.approx(1e12)


@pytest.mark.parametrize(
    ("given", "machine", "expected"),
    [("auto", CPU, 2), ("auto", GPUS, 2), ("auto", replace(GPUS, count=1), 1), (4, CPU, 4)],
    ids=["cpu", "all GPUs", "one GPU", "given"],
)
def test_ranks(given: int | str, machine: Machine, expected: int) -> None:
    assert measuring.choose_ranks(given, machine) == expected
    with pytest.raises(ConfigError, match=r"ranks=3: this machine has 2 x NVIDIA H100.* give ranks=2"):
        measuring.choose_ranks(3, GPUS)


def test_a_machine_without_links_is_described_as_such() -> None:
    figures = {"bf16_tflops": 1.0}
    assert "No link was measured" in measuring.format_cluster(GPUS, figures, ranks=1)
    assert "No link was measured" not in measuring.format_cluster(GPUS, figures, ranks=2)


def fails(rank: int, ranks: int, meeting: str) -> dict[str, float]:
    if rank == 1:
        raise ValueError("no such interface")
    time.sleep(600)
    return {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        pytest.param(300, "rank 1 of 2 failed while it measured: ValueError: no such interface", id="failed"),
        pytest.param(0.1, "2 ranks did not finish their measurements within 0.1 seconds", id="silent"),
    ],
)
def test_ranks_that_fail_are_ended(seconds: float, message: str) -> None:
    with pytest.raises(RunError, match=message):
        trials.run_together(fails, 2, seconds)
    command = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [line for line in command if "spawn_main" in line]


def test_attention_of_short_rows_and_narrow_heads_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(shape: tuple[int, int, int, int], *_: object) -> tuple[float, float]:
        b, h, t, d = shape
        there, back = (compute_slowdown(t, d, short, 0.75) for short in (128, 1024))
        return 2 * b * h * t * t * d * there / 2e12, 5 * b * h * t * t * d * back / 1e12

    monkeypatch.setattr(measurements, "_time_attention", times)
    found = measurements.measure_attention(torch.device("cpu"), torch.float32)
    assert list(found.values()) == pytest.approx([2.0, 1.0, 128, 1024, 0.75])
