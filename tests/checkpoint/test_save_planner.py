"""A rank's items of a save are those of torch's planner, and their boxes are computed once for each sharding."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.process_groups import simulate_rank
from titan.checkpoint import save_planner
from titan.checkpoint.save_planner import create_write_items

RANKS = 6
PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "two-dimensions": (Shard(0), Shard(1)),
    "replicated-over-tensor": (Shard(0), Replicate()),
    "replicated": (Replicate(), Replicate()),
}


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with simulate_rank(request.param, RANKS):
        yield DeviceMesh("cpu", torch.arange(RANKS).view(3, 2), _init_backend=False)


def made(mesh: DeviceMesh, placements: tuple[Placement, Placement], dtype: torch.dtype = torch.float32) -> DTensor:
    """A tensor of 7 x 5, which no number of ranks divides."""
    size = torch.Size((7, 5))
    shape, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    local = torch.zeros(shape, dtype=dtype)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=(5, 1))


def test_items_are_those_of_torch(mesh: DeviceMesh) -> None:
    state: dict[str, Tensor] = {name: made(mesh, placements) for name, placements in PLACEMENTS.items()}
    state |= {f"{name}.moment": made(mesh, placements, torch.bfloat16) for name, placements in PLACEMENTS.items()}
    state |= {"step": torch.zeros(()), "vector": torch.zeros(3), "wanted": torch.zeros(2, requires_grad=True)}
    assert create_write_items(state) == create_default_local_save_plan(state, is_coordinator=False).items


def test_tensors_of_a_mesh_without_this_rank_are_not_its() -> None:
    with simulate_rank(4, RANKS):
        others = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
        tensor = DTensor.from_local(
            torch.zeros(0), others, [Shard(0), Shard(0)], run_check=False, shape=(8,), stride=(1,)
        )
        assert create_write_items({"a": tensor}) == []


def test_boxes_are_computed_once_for_each_sharding() -> None:
    with simulate_rank(0, RANKS):
        mesh = DeviceMesh("cpu", torch.arange(RANKS).view(3, 2), _init_backend=False)
        state = {f"{name}{n}": made(mesh, cut) for n in range(4) for name, cut in PLACEMENTS.items()}
        with mock.patch.object(
            save_planner, "compute_local_shape_and_global_offset", wraps=compute_local_shape_and_global_offset
        ) as computed:
            assert len(create_write_items(state)) == 4 * len(PLACEMENTS)
    assert computed.call_count == len(PLACEMENTS)
