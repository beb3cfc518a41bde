"""Profiles of tiny runs: ranges, files, the command, profiles on demand, and that a profile changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import compose_tiny_run, read_learned_values, train_run
from tests.support.tiers import full
from titan.profile import __main__ as command
from titan.profile import summary
from titan.profile.trace import read
from titan.training import profiling
from titan.training.trainer import Trainer

FAST = ("metrics.sample_tokens=0", "checkpoint=off", "compile=off")
EXPECTED = {
    "ProfilerStep#3", "data", "micro-batch 1", "forward", "backward", "embedding", "layer 0", "layer 1", "head",
    "recomputation", "FSDP::all_gather (model.layers.1)", "Optimizer.step#AdamW.step",
}  # fmt: skip


@pytest.mark.full
def test_a_profile_has_readable_ranges_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*FAST, "training.steps=5", "memory=full", "parallelism.microbatches=2"]
    plain = compose_tiny_run(tmp_path / "plain", *settings, layout="fsdp2")
    train_run(plain)
    assert list((tmp_path / "plain" / "profile").iterdir()) == []
    profiled = compose_tiny_run(
        tmp_path / "run", *settings, "profile.active=1", "profile.wait=1", "profile.ranks=[]", layout="fsdp2"
    )
    hooks = [rank.extra for rank in train_run(profiled, _hooks_at_the_end)]
    assert read_learned_values(profiled) == read_learned_values(plain)
    assert hooks == [[0], [0]], "hooks of recorded steps are removed"
    for rank in range(2):
        names = {one.name for one in read(tmp_path / "run" / "profile" / "step-3" / f"rank-{rank}.json.gz").slices}
        assert names >= EXPECTED, EXPECTED - names
        assert "ProfilerStep#2" not in names and "ProfilerStep#4" not in names
    for found in summary.read(tmp_path / "run", 3):
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert {"matmuls", "recomputation", "attention", "all-gather", "reduce-scatter"} <= found.parts.keys()
    capsys.readouterr()
    assert command.main([str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "profile of step 3, rank" in shown and "rank 1: its own work" in shown
    assert command.main([str(tmp_path / "run"), "step=2"]) == 2
    assert "step=2: was not profiled; give one of 3." in capsys.readouterr().err


def _hooks_at_the_end(trainer: Trainer) -> list[int]:
    """The number of hooks on a block beside FSDP's, when a profile has ended."""
    block, found = trainer.train_step.stages[0].model.blocks()[0], []
    before, close = len(block._forward_hooks), trainer.profiler.close

    def closing() -> None:
        close()
        found.append(len(block._forward_hooks) - before)

    trainer.profiler.close = closing  # type: ignore[method-assign]
    return found


@pytest.mark.full
def test_the_file_now_asks_for_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "POLL_SECONDS", 0.0)
    run = compose_tiny_run(tmp_path, *FAST, "training.steps=7", "profile.ranks=[1]", layout="ddp2")
    train_run(run, _touch_in_step_2)
    (found,) = summary.read(tmp_path, None)
    assert (found.rank, found.steps) == (1, [5, 6])
    assert not (tmp_path / "profile" / "now").exists()


def _touch_in_step_2(trainer: Trainer) -> None:
    step = trainer._step

    def stepped(*given: object) -> object:
        if trainer.step == 1 and trainer.world.is_rank0:
            (Path(trainer.run.directory) / "profile" / "now").touch()
        return step(*given)  # type: ignore[arg-type]

    trainer._step = stepped  # type: ignore[assignment, method-assign]


def test_a_run_without_a_profile_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").touch()
    assert command.main([str(tmp_path)]) == 2
    assert f"touch {tmp_path}/profile/now while it runs, or train with profile=once" in capsys.readouterr().err


@pytest.mark.full
def test_holistic_trace_analysis_opens_the_traces(tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis")
    settings = [*FAST, "training.steps=4", "profile.active=2", "profile.wait=1", "profile.ranks=[]"]
    train_run(compose_tiny_run(tmp_path, *settings, layout="fsdp2"))
    opened = analysis.TraceAnalysis(trace_dir=str(tmp_path / "profile" / "step-3")).t
    assert sorted(opened.traces) == [0, 1]
    names = {opened.symbol_table.sym_table[i] for i in opened.traces[0]["name"].unique()}
    assert {"ProfilerStep#3", "forward", "layer 1"} <= names  # it leaves out the last step


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [
        full("block", {"layer 0", "layer 1", "head", "forward", "backward"}, id="block"),
        full("model", {"micro-batch 0", "forward", "backward"}, id="model"),
    ],
)
def test_compiled_code_has_no_hooks_inside(scope: str, wanted: set[str], tmp_path: Path) -> None:
    """Even where the first step, which compiles, is profiled: blocks are compiled as one graph."""
    first = ["profile.active=1", "profile.wait=0", "profile.warmup=0", "training.steps=2"]
    settings = ["metrics.sample_tokens=0", "checkpoint=off", f"compile={scope}", "compile.backend=eager"]
    train_run(compose_tiny_run(tmp_path, *settings, *first))
    names = {one.name for one in read(tmp_path / "profile" / "step-1" / "rank-0.json.gz").slices}
    assert names >= wanted, wanted - names
