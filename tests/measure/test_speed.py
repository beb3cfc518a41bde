"""The benchmark runs and its figures are consistent; speeds are not tested."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.measure import command, separate_runs, speed, training
from tests.measure.common import LONG, QUIET
from tests.measure.separate_runs import EVERY, summarise_run, write_plain_file
from tests.measure.speed import SideResult, SpeedCase, list_cpu_cases, list_gpu_cases
from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.runs import train_run
from tests.support.tiers import select_cases
from titan.cluster import devices
from titan.run import checks, compile_scope
from titan.run.compose import compose_run
from titan.training.trainer import Trainer

SMALL = [
    "cluster.device=cpu", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16", "model.ffn=32",
    "model.vocab=256", "training.seq_len=32", "training.global_batch=64",
]  # fmt: skip

CEILINGS = {"matmul_bf16_tflops": 750.0, "matmul_fp32_tflops": 50.0, "copy_gb_per_second": 4200.0}


@pytest.mark.full
def test_whole_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = ["suite=tiny", "rounds=2", "steps=2", "case=fp32, compile off", f"to={out}"]
    assert command.main(arguments) == 0
    found = json.loads(out.read_text())
    (row,) = found["speed"]
    assert len(row["ratios"]) == 2 and row["mfu"] is None
    assert min(row["ratios"]) <= row["titan"] / row["bare"] <= max(row["ratios"])
    assert min(found["start"].values()) > 0
    assert found["memory"]["ratio"] == pytest.approx(found["memory"]["titan"] / found["memory"]["bare"])
    assert found["ceilings"]["matmul_fp32_tflops"] > 0
    assert row["roofline"] * sum(row["parts"].values()) == pytest.approx(256)
    out = capsys.readouterr().out
    assert "command to first step" in out
    assert "fastest titan (fp32, compile off) / bare (fp32, compile off)" in out
    assert out.endswith("1 case: 0 skipped, 0 with a failed side\n")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with the packages that compiling and float8 need."""
    monkeypatch.setattr(devices, "detect_machine", make_detector("h200"))
    for module in (checks, compile_scope):
        monkeypatch.setattr(module, "find_missing_compiler", lambda *rest: None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "torchao" or find(name, *rest))


QUICK = (
    "qwen3_30b_a3b, layers 8, experts 32, bf16, compile off",
    "qwen3_30b_a3b, layers 8, experts 32, bf16, compile block",
    "llama8b, bf16, compile block, memory full",
    "llama8b, float8_rowwise, compile block, memory selective",
    "llama8b, float8, compile block, memory full",
    "llama8b, bf16_pure, compile block, memory none",
)


@pytest.mark.full
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("case", select_cases([pytest.param(case, id=case.title) for case in list_gpu_cases()], QUICK))
def test_an_h200_has_room_for_each_of_its_cases(case: SpeedCase) -> None:
    run = compose_run([*LONG, *command.BASES["gpu"], *case.overrides])
    assert run.machine.memory_gib == pytest.approx(139.8, abs=0.05)
    assert (run.layout.devices, run.training.seq_len, run.precision.compute) == (1, 8192, "bf16")
    assert (run.microbatches, run.precision.emulate) == (1, False)


def test_gpu_cases() -> None:
    titles = [case.title for case in list_gpu_cases()]
    assert len(titles) == len(set(titles))
    large = {f"llama8b, {p}, compile block, memory {m}" for p in ("bf16", "float8") for m in ("selective", "full")}
    assert {"llama1b, bf16, compile model", "llama8b, bf16_pure, compile block, memory none", *large} <= set(titles)


def test_each_kind_of_case_is_searched_for_host_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def started(what: str, how: Any, overrides: Any) -> dict[str, Any]:
        asked.append(" ".join(overrides))
        return {"failure": "CUDA out of memory"} if "compile=off" in overrides else {"location": "x.py:1: y.item()"}

    monkeypatch.setattr(speed, "_run_process", started)
    monkeypatch.setattr(speed.compose, "compose_run", lambda overrides: None)
    found = training._find_host_syncs(list_gpu_cases(), [])
    assert len(asked) == len(found) == 8
    assert (
        sum("compile=block" in each for each in asked) == 5 and sum("precision=float8" in each for each in asked) == 2
    )
    assert found["llama1b, bf16, compile off"] == {"location": "", "failure": "CUDA out of memory"}


ENDS = {
    "advice": ("W1 a warning\ntorch.OutOfMemoryError: CUDA out of memory.\nSet X=1 for more", "torch.OutOf"),
    "rank": ("[rank0]: ValueError: no\nWarning: leaked", "[rank0]: ValueError: no"),
    "compiler": ("torch._dynamo.exc.Unsupported: jump\n  Hint: none", "torch._dynamo.exc.Unsup"),
    "config-error": ("titan: model=x: there is no such choice.\n", "titan: model=x"),
    "killed": ("loading\n", "exit code -9"),
}


@pytest.mark.parametrize("case", ENDS)
def test_error_line_of_a_process(case: str) -> None:
    text, line = ENDS[case]
    assert speed.find_error_line(text, -9).startswith(line)


@pytest.mark.full
@pytest.mark.parametrize("suite", ["tiny", "modes"])
def test_unknown_case(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([f"suite={suite}", "case=fp23", "cluster.device=cpu"]) == 2
    assert (
        "titan: case=fp23: no case has a title that contains this; give a part of one of: " in capsys.readouterr().err
    )


@pytest.mark.full
def test_the_bare_loop_computes_as_many_logits_at_a_time() -> None:
    chunk = ["training.loss_chunk=16", "precision=fp32", "compile=off", "training.steps=3", "dataset=synthetic"]
    run = compose_run([*chunk, *QUIET, *SMALL])
    with speed.open_trainer(run) as trainer:
        bare = speed.build_bare_loop(SpeedCase("", ()), trainer)
    assert bare.model.head.fused.chunk == 16
    before = bare.model.head.weight.detach().clone()
    bare.train_steps(1)
    assert not torch.equal(before, bare.model.head.weight)


def test_a_cpu_is_asked_for_a_bare_loop_compiled_as_a_whole() -> None:
    cases = {case.title: case for case in list_cpu_cases()}
    assert len(cases) == len(list_cpu_cases())
    for precision in ("fp32", "bf16"):
        assert cases[f"{precision}, compile model"].bare == ""
        case = cases[f"{precision}, compile block, bare: model"]
        assert (case.bare, case.overrides) == ("model", (f"precision={precision}", "compile=block"))


@pytest.mark.full
def test_the_bare_loop_compiles_what_a_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as titan does, or all at once if the case says so; in a separate process too."""
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled.append(getattr(f, "__name__", "a block")) or f)
    overrides = ["precision=fp32", "compile=block", "compile.backend=eager", "training.steps=3", "dataset=synthetic"]
    run = compose_run([*overrides, *QUIET, *SMALL])
    with speed.open_trainer(run) as trainer:
        compiled.clear()
        speed.build_bare_loop(SpeedCase("", ()), trainer)
        assert len(compiled) == run.model.layers + 1 and "compute_loss" not in compiled
        compiled.clear()
        speed.build_bare_loop(SpeedCase("", (), bare="model"), trainer)
        assert compiled == ["compute_loss"]
    asked: list[tuple[str, list[str]]] = []

    def run_side(side: str, how: list[str], overrides: list[str]) -> dict[str, Any]:
        asked.append((side, overrides))
        return {"seconds": [len(asked)], "memory_gib": 10.0 - len(asked)}

    monkeypatch.setattr(speed, "_run_process", run_side)
    measured = speed.measure_separately(SpeedCase("", ("compile=block",), bare="model"), [], 1, 1)
    bare, titan = ("bare", ["compile=block", "compile=model"]), ("titan", ["compile=block"])
    assert asked == [bare, titan, titan, bare]  # a device that becomes slower slows both sides
    assert measured == {"bare": SideResult((1, 4), 9.0), "titan": SideResult((2, 3), 8.0)}


def one_fails(*given: Any) -> dict[Any, SideResult]:
    return {"bare": SideResult(failure="CUDA out of memory"), "titan": SideResult((0.16, 0.15, 0.17), 30.0)}


@pytest.mark.full
def test_a_failed_side_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    monkeypatch.setattr(speed, "measure_separately", one_fails)
    overrides = [*LONG, *command.BASES["gpu"]]
    assert "compile=off" in list_gpu_cases()[0].overrides  # so that no compiler is looked for
    found = speed.measure_case(list_gpu_cases()[0], overrides, CEILINGS, 3, 1)
    assert (found.bare, found.titan, found.ratios) == (0, pytest.approx(8192 / 0.16), ())
    assert found.mfu is not None and 0.3 < found.mfu < 0.6  # of an H100
    text = found.format_rows()
    assert "bare: CUDA out of memory" in text and "titan 30.0 GiB" in text and "roofline" in text


@pytest.mark.full
def test_a_side_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = ["dataset=synthetic", "training.steps=100", "precision=fp32", "compile=off", *QUIET, *SMALL]
    how = ["rounds=2", "steps=1"]
    taken = speed._run_process("titan", how, overrides)
    assert len(taken["seconds"]) == 2 and taken["memory_gib"] and not taken["failure"]
    wrong = speed._run_process("bare", how, ["training.sleep=1"])
    assert "there is no such setting" in wrong["failure"] and "seconds" not in wrong


@pytest.mark.full
def test_a_case_that_can_not_be_composed_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [SpeedCase("none", ("training.sleep=1",))]
    assert list(training._measure_speeds(cases, [], {}, command.Settings(rounds=1, steps=1))) == []
    assert "skipped: training.sleep=1: there is no such setting" in capsys.readouterr().out


@pytest.mark.full
def test_where_steps_spend_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["suite=tiny", "operators=true", "case=fp32, compile off", "steps=1"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "fp32, compile off: 1 steps" in out and "aten::mm" in out and "Self CPU" in out


@pytest.mark.full
def test_host_synchronisation_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing synchronises: torch's debug mode and its error are simulated."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    run = compose_run([*LONG, "cluster=cpu", "dataset=synthetic", "compile=off", *SMALL])
    assert speed.locate_host_sync(run, steps=1) == ""

    def failing(self: Trainer, before: Any = None) -> Any:
        if modes[-1] == "error":
            raise RuntimeError(message)
        return step(self, before)

    step, message = Trainer._step, "called a synchronizing CUDA operation\nand where"
    monkeypatch.setattr(Trainer, "_step", failing)
    assert re.fullmatch(
        r"measure/test_speed\.py:\d+: raise RuntimeError\(message\)", speed.locate_host_sync(run, steps=1)
    )
    message = "CUDA out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        speed.locate_host_sync(run, steps=1)
    assert modes == ["error", "default"] * 3


@pytest.mark.full
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["suite=gpu"]) == 2
    assert capsys.readouterr().err.startswith("titan: cluster.device=cuda")


@pytest.mark.full
def test_a_mode_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "modes.json"
    arguments = ["suite=modes", "case=single: full, off", f"to={out}", "dataset=synthetic"]
    assert command.main([*arguments, *SMALL]) == 0
    (row,) = json.loads(out.read_text())
    assert row["title"] == "single: full, off"
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    assert 0 < row["memory_gib"] < 4


@pytest.mark.full
def test_modes() -> None:
    run = compose_run(["cluster.device=cpu"])
    titles = [mode.title for mode in separate_runs.list_modes(run)]
    assert len(titles) == len(set(titles)) == 6 * (6 * 3 - 1)
    assert "3d: selective, block" in titles
    assert "fsdp: budget, off" not in titles


@pytest.mark.full
def test_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs forked from here: their start would take most of the time."""
    monkeypatch.setattr(separate_runs, "run_training", lambda overrides: train_run(compose_test_run(overrides))[0].code)
    out = tmp_path / "figures.json"
    assert (
        command.main(["suite=checkpoint", "rounds=1", f"to={out}", *SMALL, "model.layers=2", "dataset.vocab=256"]) == 0
    )
    found = json.loads(out.read_text())
    off, sync, beside = found["saving"]
    assert [row["mode"] for row in found["saving"]] == ["off", "sync", "async"]
    assert off["stall"] is None and off["step"] > 0
    assert sync["stall"] > 0 and beside["save"] > 0
    assert sync["gib"] == pytest.approx(beside["gib"], rel=0.01)
    assert len(found["plain_gib_per_second"]) == 3 and found["fingerprint_seconds"] > 0
    assert "one plain file of the same size" in capsys.readouterr().out


def test_metrics_are_summarised() -> None:
    lines = [
        {"step": s, "step_seconds": 5.0 if s % EVERY == 1 else 2.0, "memory_gib": 1 + s / 100} for s in range(1, 16)
    ]
    saves = [(6, 3.0, 9.0), (12, 1.0, 4.0), (15, 8.0, 8.0)]
    names = ("step", "stall_seconds", "seconds", "gib", "compare_seconds")
    values = [(s, wait, seconds, 1.0, wait / 2) for s, wait, seconds in saves]
    lines += [{"step": row[0], **{f"checkpoint_{n}": v for n, v in zip(names, row, strict=True)}} for row in values]
    found = summarise_run("async", lines, 15)
    assert (found.step, found.beside, found.first, found.stall, found.save) == (2.0, 5.0, 3.0, 1.0, 4.0)
    assert found.compare == 0.5
    assert found.memory == pytest.approx(1.15)
    assert "50.0%" in found.row()


def test_the_plain_file_is_removed(tmp_path: Path) -> None:
    assert write_plain_file(tmp_path / "file", 40 * 2**20 + 1) > 0
    assert not list(tmp_path.iterdir())
