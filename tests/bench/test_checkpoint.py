"""Saving is measured; its speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.composing import compose_test_run
from tests.support.runs import train_run
from titan.bench import __main__ as command
from titan.bench import separate_runs
from titan.bench.separate_runs import EVERY, summarise_run, write_plain_file

SMALL = [
    "cluster.device=cpu", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.head_dim=16",
    "model.ffn=32", "model.vocab=256", "dataset.vocab=256", "training.seq_len=32", "training.global_batch=64",
]  # fmt: skip


@pytest.mark.full
def test_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs forked from here: their start would take most of the time."""
    monkeypatch.setattr(separate_runs, "run_training", lambda overrides: train_run(compose_test_run(overrides))[0].code)
    out = tmp_path / "figures.json"
    assert command.main(["suite=checkpoint", "rounds=1", f"to={out}", *SMALL]) == 0
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
    lines += [
        {
            "step": s,
            "checkpoint_step": s,
            "checkpoint_stall_seconds": w,
            "checkpoint_seconds": t,
            "checkpoint_gib": 1.0,
            "checkpoint_compare_seconds": w / 2,
        }
        for s, w, t in saves
    ]
    found = summarise_run("async", lines, 15)
    assert (found.step, found.beside, found.first, found.stall, found.save) == (2.0, 5.0, 3.0, 1.0, 4.0)
    assert found.compare == 0.5
    assert found.memory == pytest.approx(1.15)
    assert "50.0%" in found.row()


def test_the_plain_file_is_removed(tmp_path: Path) -> None:
    assert write_plain_file(tmp_path / "file", 40 * 2**20 + 1) > 0
    assert not list(tmp_path.iterdir())
