"""What a rank records as progress where it takes long: micro-batches, and the parts of a file."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import full
from titan.checkpoint import manifest, remote
from titan.checkpoint.remote import Remote
from titan.training.trainer import Trainer

MIB = 2**20
STEPS = 2


def count(trainer: Trainer) -> list[int]:
    """The progress before each update."""
    found: list[int] = []
    activity = trainer.world.activity
    trainer.train_step.optimizer.register_step_pre_hook(lambda *_: found.append(activity.progress_count))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "least"),
    [
        pytest.param(("parallelism.microbatches=4",), 4, id="accumulation"),
        full(("parallelism=pp", "parallelism.microbatches=4"), 8, id="1F1B"),
        full(
            ("parallelism=pp", "parallelism.microbatches=4", "parallelism.schedule=ZBVZeroBubble", "model.layers=4"),
            16,
            id="ZBV",
        ),
    ],
)
def test_each_micro_batch_is_progress(settings: tuple[str, ...], least: int, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, *settings, f"training.steps={STEPS}", "checkpoint=off", "metrics.sample_tokens=0")
    for rank in train_run(run, count):
        first, second = rank.extra
        assert second - first >= least


def test_the_parts_of_a_file_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CHUNK", MIB)
    monkeypatch.setattr(manifest, "_CHUNK", MIB)
    folder, back = tmp_path / "step-3", tmp_path / "back"
    folder.mkdir()
    back.mkdir()
    (folder / "weights").write_bytes(bytes(10 * MIB))
    files, parts = {"weights": manifest.checksum_file(folder / "weights")}, list[str]()
    there = Remote(f"memory://{uuid.uuid4().hex}")
    there.upload_files(folder, files, lambda: parts.append("upload"))
    there.fetch_files(3, back, files, lambda: parts.append("fetch"))
    manifest.verify_checksums(back, files, lambda: parts.append("verify"))
    assert parts.count("upload") >= 3 and parts.count("fetch") >= 20 and parts.count("verify") >= 10
    assert (back / "weights").read_bytes() == (folder / "weights").read_bytes()
