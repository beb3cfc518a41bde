"""The gradient's norm and its clipping, against float64 on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.parallelism.mesh import World
from titan.parallelism.norms import clip_gradients, count_replicas, sum_squares
from titan.parallelism.schema import Layout

SHAPES = [(5, 3), (8, 8), (7,), (1, 64), (2, 3, 4)]
CPU = torch.device("cpu")
ALONE = World(RankInfo(0, 1, 0), Layout(), CPU)
Placed = list[tuple[Any, ...] | None]


def tensors(scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def total_norm(gradients: list[Tensor], world: World = ALONE) -> Tensor:
    """The norm over all ranks, as a step computes it."""
    part = sum_squares(((gradient, count_replicas(gradient, world)) for gradient in gradients), CPU)
    return world.all_reduce(part).sqrt().float()


def exact(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients]).norm())


@example([3.0], 100.0)
@given(st.lists(st.floats(-1e8, 1e8, width=32), min_size=1, max_size=9), st.floats(0.125, 1e6))
def test_plain_tensors_as_torch(values: list[float], largest: float) -> None:
    ours = [torch.tensor(values), torch.tensor(values[:1])]
    theirs = [torch.nn.Parameter(torch.zeros_like(t)) for t in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = total_norm(ours)
    assert norm.item() == pytest.approx(exact(ours), rel=1e-6)
    clip_gradients(ours, norm, largest)
    torch.nn.utils.clip_grad_norm_(theirs, largest)
    for gradient, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=2e-6, atol=0)


def test_a_large_matrix_loses_no_digits() -> None:
    big = torch.full((4096, 1024), 0.1)
    assert total_norm([big]).item() == pytest.approx(exact([big]), rel=1e-6)


def test_gradients_in_bf16_are_summed_in_fp32() -> None:
    gradients = [t.bfloat16() for t in tensors()]
    assert total_norm(gradients).dtype == torch.float32
    assert total_norm(gradients).item() == pytest.approx(exact(gradients), rel=1e-6)


def test_no_gradients_have_no_norm() -> None:
    assert total_norm([]) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_not_finite_shows(bad: float) -> None:
    assert not total_norm([*tensors(), torch.tensor([bad])]).isfinite()


def place(gradients: list[Tensor], mesh: DeviceMesh, placements: Placed) -> list[Tensor]:
    return [g if p is None else distribute_tensor(g, mesh, p) for g, p in zip(gradients, placements, strict=True)]


def measured(rank: int, world: int, sizes: tuple[int, ...], placements: Placed, largest: float) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    gradients = place(tensors(), mesh, placements)
    norm = total_norm(gradients, World(RankInfo(rank, world, rank), Layout(shard=world), CPU))
    clip_gradients(gradients, norm, largest)
    return norm, [(g.full_tensor() if isinstance(g, DTensor) else g) for g in gradients]


ROWS, HYBRID = (Shard(0),), (Replicate(), Shard(0))
LAYOUTS = [
    pytest.param((2,), [ROWS] * 5, id="one-dimension"),
    pytest.param((3,), [ROWS] * 5, id="uneven-and-empty-parts"),
    pytest.param((2,), [ROWS, None, (Replicate(),), ROWS, None], id="plain-and-cut"),
    pytest.param((2, 2), [HYBRID] * 5, id="two-dimensions"),
    pytest.param((2, 2), [HYBRID, None, HYBRID, (Replicate(), Replicate()), HYBRID], id="two-dimensions-mixed"),
    pytest.param((2, 2), [(Shard(0), Shard(1)), HYBRID, HYBRID, HYBRID, (Shard(1), Shard(0))], id="cut-over-both"),
]


@pytest.mark.parametrize(
    ("sizes", "placements", "largest"),
    [
        *(pytest.param(*layout.values, 0.5, id=f"{layout.id}-clipped") for layout in LAYOUTS),
        full(*LAYOUTS[-1].values, 1e6, id=f"{LAYOUTS[-1].id}-not-clipped"),
    ],
)
def test_cut_tensors_have_the_norm_of_the_whole(sizes: tuple[int, ...], placements: Placed, largest: float) -> None:
    whole = tensors()
    size = exact(whole)
    found = run_ranks(measured, torch.Size(sizes).numel(), sizes, placements, largest)
    for norm, gradients in found:
        assert norm.item() == pytest.approx(size, rel=1e-6)
        assert torch.equal(norm, found[0][0])
        for gradient, original in zip(gradients, whole, strict=True):
            torch.testing.assert_close(gradient, original * min(1.0, largest / size), rtol=2e-6, atol=0)
