"""The benchmark runs and its figures hang together; how fast anything is, is no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan import bench

SMALL = [
    "cluster.device=cpu", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16", "model.ffn=32",
    "model.vocab=256", "training.seq_len=32", "training.global_batch=64",
]  # fmt: skip


def test_whole_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--suite", "tiny", "--rounds", "2", "--steps", "2", "--case", "fp32, compile off", "--json", str(out)]
    assert bench.main(arguments) == 0
    found = json.loads(out.read_text())
    (speed,) = found["speed"]
    assert len(speed["ratios"]) == 2 and speed["mfu"] is None
    assert min(speed["ratios"]) <= speed["titan"] / speed["bare"] <= max(speed["ratios"])
    assert found["start"]["first_step_seconds"] > 0.8 * found["start"]["import_seconds"] > 0
    assert found["memory"]["ratio"] == pytest.approx(found["memory"]["titan"] / found["memory"]["bare"])
    assert found["ceilings"]["matmul_fp32_tflops"] > 0
    assert "command to first step" in capsys.readouterr().out


def test_gpu_cases_at_a_size_for_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    base = [*bench._base("gpu"), *SMALL]
    cases = bench._gpu_cases(bench.compose.composed([*bench.LONG, *base]), base)
    titles = [c.title for c in cases if "compile off" in c.title]
    assert titles == ["llama1b, 16 of 16 layers, compile off", "llama8b, 32 of 32 layers, compile off"]
    result = bench._measure(cases[0], [*bench.LONG, *base], rounds=2, steps=1)
    assert result.bare > 0 and result.titan > 0


def test_layers_that_fit_twice(capsys: pytest.CaptureFixture[str]) -> None:
    base = [*bench._base("gpu"), "cluster.device=cpu"]
    run = bench.compose.composed([*base, *SMALL, "cluster.memory_gib=141"])
    assert bench._layers_that_fit(run, "llama1b", 16, base) == 16
    assert 1 <= bench._layers_that_fit(run, "llama8b", 32, base) < 32


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
