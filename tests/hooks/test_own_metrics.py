"""What hooks log reaches metrics.jsonl, result.json, TensorBoard, W&B and titan.compare."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.hooks.test_hooks import hook, trained
from titan import compare
from titan.metrics.reader import read_records
from titan.metrics.tracker_run import extract_scalars
from titan.report.render import table_data

KEY = "hooks/norms/layers.1.attention.wq.weight"
LIKE = ("checkpoint=off", "evaluation.tokens=64")


@pytest.mark.full
def test_from_the_hook_to_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(table_data, "MOST_METRICS", 3)
    for seed in (0, 1):
        asked = (*LIKE, f"training.seed={seed}", "metrics.tensorboard=true", hook("norms", "Norms"))
        assert trained(tmp_path / f"seed-{seed}", *asked) == 0
    steps = [line for line in read_records(tmp_path / "seed-0" / "metrics.jsonl") if "loss" in line]
    events = loader.EventAccumulator(str(tmp_path / "seed-0" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars(KEY)] == pytest.approx([line[KEY] for line in steps])
    last = [json.loads((tmp_path / f"seed-{seed}/result.json").read_text())[KEY] for seed in (0, 1)]
    assert last[0] == steps[-1][KEY] != last[1]
    files = [tmp_path / f"compare.{kind}" for kind in ("csv", "md", "html")]
    assert (
        compare.main([*(str(tmp_path / f"seed-{seed}") for seed in (0, 1)), f"to=[{','.join(map(str, files))}]"]) == 0
    )
    rows = list(csv.DictReader(files[0].open()))
    assert [float(row[KEY]) for row in rows] == pytest.approx(last)
    first = min(key for key in steps[0] if key.startswith("hooks/"))
    mean = sum(float(row[first]) for row in rows) / 2
    assert f"| {first.removeprefix('hooks/').replace('_', chr(92) + '_')} | {mean:.4g} |" in files[1].read_text()
    assert "more, in CSV and JSON" in files[1].read_text() and f"{mean:.4g}" in files[2].read_text()


def test_trackers_keep_the_names_of_own_metrics() -> None:
    record = {"step": 1, "validation_loss": 1.0, "hooks/a/b": 2.0}
    assert extract_scalars(record) == {"validation/loss": 1.0, "hooks/a/b": 2.0}
