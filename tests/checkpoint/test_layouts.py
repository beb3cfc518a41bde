"""Law 4: what one mix of parallelisms saved, any other resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_manager import in_two_lives
from tests.matrix import MODEL, Outcome
from tests.runs import difference, tiny, train, weights

MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9", "training.steps=6", *MODEL)
LAYOUTS = {
    "single": (),
    "fsdp": ("parallelism.shard=2",),
    "tp": ("parallelism.tensor=2",),
    "fsdp_tp": ("parallelism.shard=2", "parallelism.tensor=2"),
    "pp": ("parallelism.pipeline=2", "parallelism.microbatches=4"),
    "pp4": ("parallelism.pipeline=4", "parallelism.microbatches=4"),
    "zbv": ("parallelism.pipeline=2", "parallelism.microbatches=4", "parallelism.schedule=ZBVZeroBubble"),
    "fsdp_cp": ("parallelism.shard=2", "parallelism.context=2"),
    "3d": ("parallelism=3d", "parallelism.microbatches=4", "parallelism.schedule=Interleaved1F1B"),
}
MOVES = [
    pytest.param("3d", "single", True, id="3d-single-tied"),
    pytest.param("single", "zbv", True, id="single-zbv-tied"),
    pytest.param("zbv", "pp4", True, id="zbv-pp4-tied"),
    pytest.param("fsdp_tp", "pp", False, id="fsdp_tp-pp"),
    pytest.param("pp4", "fsdp_cp", False, id="pp4-fsdp_cp"),
    pytest.param("fsdp_cp", "tp", False, id="fsdp_cp-tp"),
    pytest.param("tp", "3d", False, id="tp-3d"),
]


@pytest.mark.parametrize(("before", "after", "tied"), MOVES)
def test_any_layout_resumes_what_another_saved(before: str, after: str, tied: bool, tmp_path: Path) -> None:
    settings = (*MOMENTUM, *(["model.tied=true"] if tied else []))
    one = tiny(tmp_path / "one", *settings)
    expected = Outcome(one, train(one), 0).merged("last")
    runs = [tiny(tmp_path / "parts", *settings, *LAYOUTS[layout]) for layout in (before, after)]
    first, second = (Outcome(run, seen, 0) for run, seen in zip(runs, in_two_lives(*runs), strict=True))
    saved, loaded = first.merged("last"), second.merged("first")
    assert saved.keys() == loaded.keys() == expected.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert difference(weights(second.merged("last")), weights(expected)) <= 1e-5
