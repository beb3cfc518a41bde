"""The benchmark runs and its figures hang together; how fast anything is, is no test."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import detector
from titan import bench, measure
from titan.cluster import devices
from titan.measure import Alone
from titan.run import Run
from titan.settings import Refusal
from titan.suites import Case, gpu_cases
from titan.trainer import Trainer

SMALL = [
    "cluster.device=cpu", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16", "model.ffn=32",
    "model.vocab=256", "training.seq_len=32", "training.global_batch=64",
]  # fmt: skip

CEILINGS = {"matmul_bf16_tflops": 750.0, "matmul_fp32_tflops": 50.0, "copy_gb_per_second": 4200.0}


def test_whole_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--suite", "tiny", "--rounds", "2", "--steps", "2", "--case", "fp32, compile off", "--json", str(out)]
    assert bench.main(arguments) == 0
    found = json.loads(out.read_text())
    (speed,) = found["speed"]
    assert len(speed["ratios"]) == 2 and speed["mfu"] is None
    assert min(speed["ratios"]) <= speed["titan"] / speed["bare"] <= max(speed["ratios"])
    assert min(found["start"].values()) > 0
    assert found["memory"]["ratio"] == pytest.approx(found["memory"]["titan"] / found["memory"]["bare"])
    assert found["ceilings"]["matmul_fp32_tflops"] > 0
    assert speed["limit"] * sum(speed["parts"].values()) == pytest.approx(256)
    out = capsys.readouterr().out
    assert "command to first step" in out
    assert "fastest titan (fp32, compile off) / bare (fp32, compile off)" in out


def test_gpu_cases_are_what_the_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", detector("gpu"))
    titles = [case.title for case in gpu_cases()]
    assert len(titles) == len(set(titles))
    assert {"llama1b, bf16, compile model", "llama8b, float8, compile block, memory none"} <= set(titles)
    base = [*bench.LONG, *bench._base("gpu"), "cluster.memory_gib=1000000"]
    for case in gpu_cases():
        try:
            run = bench.compose.composed([*base, *case.overrides])
        except Refusal as refusal:
            # settings that may not be there yet, and packages that need not be
            assert re.search("there is no such setting|torchao", str(refusal)), case.title
        else:
            assert (run.layout.devices, run.training.seq_len, run.precision.compute) == (1, 8192, "bf16")


def one_fails(run: Run, *rest: Any) -> dict[Any, Alone]:
    assert run.machine.device == "cuda"
    return {"bare": Alone(failure="CUDA out of memory"), "titan": Alone((0.16, 0.15, 0.17), 30.0)}


def test_a_side_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", detector("gpu"))
    monkeypatch.setattr(measure, "apart", one_fails)
    overrides = [*bench.LONG, *bench._base("gpu")]
    found = measure.speed(gpu_cases()[0], overrides, CEILINGS, 3, 1)
    assert (found.bare, found.titan, found.ratios) == (0, pytest.approx(8192 / 0.16), ())
    assert found.mfu is not None and 0.3 < found.mfu < 0.6  # of an H100
    text = found.rows()
    assert "bare: CUDA out of memory" in text and "titan 30.0 GiB" in text and "limit" in text


def test_a_side_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = ["dataset=synthetic", "training.steps=100", "precision=fp32", "compile=off", *bench.QUIET, *SMALL]
    how = ["--rounds", "2", "--steps", "1"]
    taken = measure._started("titan", how, overrides)
    assert len(taken.seconds) == 2 and taken.memory_gib and not taken.failure
    wrong = measure._started("bare", how, ["training.sleep=1"])
    assert "there is no such setting" in wrong.failure and not wrong.seconds


def test_a_case_that_can_not_be_composed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("none", ("training.sleep=1",))]
    assert bench._speeds(cases, [], {}, argparse.Namespace(rounds=1, steps=1)) == []
    assert "left out: training.sleep=1: there is no such setting" in capsys.readouterr().out


def test_where_steps_spend_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--suite", "tiny", "--profile", "--case", "fp32, compile off", "--steps", "1"]
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    assert "fp32, compile off: 1 steps" in out and "aten::mm" in out and "Self CPU" in out


def test_what_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing waits for a device: torch's switch is simulated, and what it raises."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    run = bench.compose.composed([*bench.LONG, "cluster=cpu", "dataset=synthetic", "compile=off", *SMALL])
    assert measure.waits(run, steps=1) is None

    def waiting(self: Trainer, before: Any = None) -> Any:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand where")
        return step(self, before)

    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", waiting)
    assert measure.waits(run, steps=1) == "called a synchronizing CUDA operation"
    assert modes == ["error", "default"] * 2


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.main(["--suite", "gpu"]) == 2
    assert capsys.readouterr().err.startswith("titan: cluster.device=cuda")


def test_what_a_mode_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "modes.json"
    arguments = ["--suite", "modes", "--case", "single: full, off", "--json", str(out), "dataset=synthetic"]
    assert bench.main([*arguments, *SMALL]) == 0
    (taken,) = json.loads(out.read_text())
    assert taken["title"] == "single: full, off"
    assert taken["tokens_per_second"] == pytest.approx(64 / taken["seconds"])
    assert 0 < taken["memory_gib"] < 4


def test_modes_that_there_are() -> None:
    run = bench.compose.composed(["cluster.device=cpu"])
    titles = [mode.title for mode in bench.modes.modes(run)]
    assert len(titles) == len(set(titles)) == 6 * (5 * 3 - 1)
    assert "3d: selective, block" in titles
    assert "fsdp: budget, off" not in titles


def test_how_fast_text_is_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert bench.main(["--suite", "generate", "--rounds", "1", "--json", str(out), "dataset=synthetic", *SMALL]) == 0
    found = json.loads(out.read_text())
    assert [line["new_tokens"] for line in found] == [64, 256, 512]
    for line in found:
        rates = line["tokens_per_second"]
        assert line["ratios"] == [pytest.approx(rates["cache"] / rates["anew"])]
    assert len(capsys.readouterr().out.strip().splitlines()) == 6
