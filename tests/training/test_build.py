"""Assembly: from a recipe and a world to what trains, and the train_step that comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.dataset.loader import IGNORED
from titan.parallelism import mesh
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.train_step import TrainStep


def built(run: Run, notes: list[str] | None = None) -> TrainStep:
    world = mesh.connect_world(RankInfo(), run.layout, "cpu", 30)
    return build_train_step(run, world, (notes if notes is not None else []).append)


def batch(microbatches: int, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(2))[: microbatches * rows]
    return tokens[:, :-1].reshape(microbatches, rows, 16), tokens[:, 1:].reshape(microbatches, rows, 16)


@pytest.mark.full
def test_says_each_transformation_in_order(tmp_path: Path) -> None:
    notes: list[str] = []
    built(compose_tiny_run(tmp_path, "memory=full", "compile=block", "compile.backend=eager"), notes)
    starts = [
        "built on meta: ",
        "precision: fp32",
        "attention kernel: flash (CPU)",
        "activation checkpointing: full",
        "compile: block",
        "initial weights from",
    ]
    assert len(notes) == len(starts)
    assert all(note.startswith(start) for note, start in zip(notes, starts, strict=True))


TECHNIQUES = [
    pytest.param([], id="none"),
    full(["memory=full"], id="checkpointing"),
    pytest.param(["compile=block", "compile.backend=eager"], id="compile"),
    full(["memory=full", "compile=block", "compile.backend=eager"], id="both"),
    full(["precision=bf16"], id="bf16"),
]


@pytest.mark.full
@pytest.mark.parametrize("settings", TECHNIQUES)
def test_techniques_keep_names_types_and_the_optimizers_parameters(settings: list[str], tmp_path: Path) -> None:
    train_step, plain = built(compose_tiny_run(tmp_path, *settings)), built(compose_tiny_run(tmp_path))
    named, expected = dict(train_step.named_parameters()), dict(plain.named_parameters())
    assert named.keys() == expected.keys()
    assert all(torch.equal(named[n], expected[n]) for n in named)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in named.values())
    managed = [p for group in train_step.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in managed} == {id(p) for p in named.values()}


def named_on(rank: int, size: int, run: Run, meeting: str) -> list[tuple[str, tuple[int, ...], str]]:
    world = mesh.connect_world(RankInfo(rank, size, rank, meeting), run.layout, "cpu", 300)
    train_step = build_train_step(run, world)
    managed = {id(p) for group in train_step.optimizer.param_groups for p in group["params"]}
    assert managed == {id(p) for p in train_step.parameters()}
    world.barrier()  # before anyone leaves: the others may connect further groups still
    world.close()
    return [(n, tuple(p.shape), str(p.dtype)) for n, p in train_step.named_parameters()]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp2", full("fsdp2"), full("hsdp4")])
def test_layouts_keep_names_and_shapes(layout: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "memory=full", layout=layout)
    expected = [(n, tuple(p.shape), str(p.dtype)) for n, p in built(compose_tiny_run(tmp_path)).named_parameters()]
    meeting = f"file://{tmp_path}/meeting"
    assert run_ranks(named_on, run.layout.devices, run, meeting, joined=False) == [expected] * run.layout.devices


@pytest.mark.parametrize("cut", [(2, 4), (4, 2), (8, 1)], ids=str)
def test_microbatches_add_up(cut: tuple[int, int], tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    whole, parts = built(run), built(run)
    loss, other = whole.backward(Microbatches(*batch(1, 8)), 0.25), parts.backward(Microbatches(*batch(*cut)), 0.25)
    assert other.item() == pytest.approx(loss.item(), rel=1e-6)
    assert parts.evaluate(Microbatches(*batch(*cut))).item() == pytest.approx(loss.item(), rel=1e-6)
    for gradient, expected in zip(parts.list_gradients(), whole.list_gradients(), strict=True):
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rows_of_weight_zero_count_for_nothing(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    (tokens, targets), empty = batch(1, 3), torch.full((1, 2, 16), IGNORED)
    padded = torch.cat([tokens, torch.zeros_like(empty)], 1), torch.cat([targets, empty], 1)
    without, train_step, alone = built(run), built(run), built(run)
    loss, other = without.backward(Microbatches(tokens, targets), 1.0), train_step.backward(Microbatches(*padded), 1.0)
    assert other.item() == pytest.approx(loss.item(), rel=1e-6)
    for gradient, expected in zip(train_step.list_gradients(), without.list_gradients(), strict=True):
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert alone.backward(Microbatches(torch.zeros_like(empty), empty), 1.0) == 0
    assert all(not g.any() for g in alone.list_gradients())


def test_evaluation_leaves_no_gradient(tmp_path: Path) -> None:
    train_step: Any = built(compose_tiny_run(tmp_path))
    assert not train_step.evaluate(Microbatches(*batch(1, 2))).requires_grad
    assert train_step.list_gradients() == []


@pytest.mark.full
@pytest.mark.parametrize(("memory", "times"), [("none", 1), ("full", 2)])
def test_full_checkpointing_computes_each_block_again(memory: str, times: int, tmp_path: Path) -> None:
    train_step = built(compose_tiny_run(tmp_path, f"memory={memory}"))
    calls: list[int] = []
    for number, block in enumerate(train_step.stages[0].model.blocks()):
        block.attention.register_forward_hook(lambda *_, number=number: calls.append(number))
    train_step.backward(Microbatches(*batch(1, 2)), 1.0)
    assert sorted(calls) == sorted([0, 1] * times)


def test_a_part_of_rows_has_its_own_positions_and_documents() -> None:
    """Rotation is relative, so that no training would show positions of another token."""
    tokens = torch.arange(24).view(1, 2, 12)
    positions, documents, indices = tokens % 5, tokens // 5, torch.tensor([0, 1, 10, 11])
    keys = torch.tensor([[7, 8]])
    part = Microbatches(tokens, tokens + 1, positions, documents, keys).select_tokens(indices)
    expected = [*(t[..., [0, 1, 10, 11]] for t in (tokens, tokens + 1, positions, documents)), keys]
    assert all(torch.equal(a, b) for a, b in zip(part, expected, strict=True) if a is not None)
    assert torch.equal(Microbatches(tokens).select_tokens(indices).positions, indices)  # type: ignore[arg-type]
    assert [t is None for t in Microbatches(tokens).select_tokens(indices)] == [False, True, False, True, True]
