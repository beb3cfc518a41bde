"""Metrics of every layer: the same numbers on every layout, and training that is the same with and without them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.matrix import EXACT, MODEL
from tests.support.runs import compose_tiny_run, read_learned_values, read_step_records, train_run
from tests.support.tiers import select_cases
from titan.training.observe import Observer

EVERY = (*MODEL, "optimizer=sgd", "checkpoint=off", "metrics.layers_every=2", "training.global_batch=112")
LAYOUTS = {
    "3d": ("parallelism=3d",),
    "4d": ("parallelism=4d", "parallelism.microbatches=4"),
    "fsdp of 3 tp whole": ("parallelism.shard=3", "parallelism.tensor=2", "parallelism.sequence_parallel=false"),
    "cp documents": ("parallelism.context=2", "dataset.mask_documents=true", "dataset.longest=12"),
    "ddp tied": ("parallelism.replicate=2", "model.tied=true"),
    "pp tied": ("parallelism.pipeline=2", "parallelism.microbatches=4", "model.tied=true"),
    "fsdp compiled": ("parallelism.shard=2", "compile=block", "compile.backend=aot_eager"),
    "zbv full": ("parallelism.pipeline=2", "parallelism.microbatches=4", "parallelism.schedule=ZBVZeroBubble",
                 "memory=full"),
}  # fmt: skip


@pytest.mark.parametrize("layout", select_cases(LAYOUTS, ("ddp tied",)))
def test_the_numbers_are_those_of_one_device(tmp_path: Path, layout: str) -> None:
    science = tuple(s for s in LAYOUTS[layout] if s.startswith(("dataset.", "model.")))
    alone, split = (
        compose_tiny_run(tmp_path / "alone", *EVERY, *science),
        compose_tiny_run(tmp_path / "split", *EVERY, *LAYOUTS[layout]),
    )
    train_run(alone)
    train_run(split)
    (_, there, _), (_, here, _) = read_step_records(alone), read_step_records(split)
    names = [name for name in there if name.startswith("layer_")]
    assert len(names) >= 4 * 5 and [n for n in here if n.startswith("layer_")] == names
    far = {name: abs(here[name] / there[name] - 1) for name in names}
    assert max(far.values()) <= EXACT, far
    whole = math.sqrt(sum(there[n] ** 2 for n in names if n.startswith("layer_grad_norm/")))
    assert whole == pytest.approx(there["grad_norm"], rel=EXACT)


@pytest.mark.full
def test_other_steps_and_what_is_learned_are_as_without_them(tmp_path: Path) -> None:
    measured, plain = (
        compose_tiny_run(tmp_path / "measured", *EVERY),
        compose_tiny_run(tmp_path / "plain", *EVERY, "metrics.layers_every=0"),
    )
    train_run(measured)
    train_run(plain)
    assert read_learned_values(measured) == read_learned_values(plain)
    assert [any(k.startswith("layer_") for k in line) for line in read_step_records(measured)] == [False, True, False]


def largest(chunk: int | None, positions: Tensor | None, documents: Tensor | None) -> float:
    """The largest logit; the last token's query has the logit 10 - place with a key, the others' are negative."""
    k = (10 - torch.arange(6.0))[None, None, :, None].expand(2, 1, 6, 4)
    q = torch.full((2, 1, 6, 4), -1e3)
    q[:, :, 5] = 0.5
    fake: Any = SimpleNamespace(
        rows=SimpleNamespace(count_rows=lambda microbatch: 2),
        train_step=SimpleNamespace(world=SimpleNamespace(get_group=lambda name: None)),
    )
    given = {"positions": positions, "document_ids": documents}
    call: Any = SimpleNamespace(microbatch=0, get_argument=lambda place, name: given[name])
    return float(Observer._find_largest_logit(fake, call, q, k, chunk))


@pytest.mark.parametrize(
    ("chunk", "documents", "first"),
    [
        pytest.param(None, False, 0, id="row"),
        pytest.param(4, False, 4, id="chunk"),
        pytest.param(None, True, 1, id="document"),
        pytest.param(4, True, 5, id="chunk-of-a-document"),
    ],
)
def test_logits_within_chunks(chunk: int | None, documents: bool, first: int) -> None:
    ids = torch.tensor([0, 1, 1, 1, 1, 1]).expand(2, -1) if documents else None
    positions = torch.tensor([0, 0, 1, 2, 3, 4]).expand(2, -1) if documents else None
    assert largest(chunk, positions, ids) == pytest.approx(10 - first)
