"""Replicas: which ranks must be equal, and which of them is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from titan.cluster.rank_error import describe_error
from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.parallelism.mesh import build_world
from titan.parallelism.replicas import RankName, ReplicaDifference, _split_majority, find_difference, find_replicas
from titan.parallelism.schema import Layout

N = [RankName(rank, f"n{rank // 2}", f"n{rank // 2}") for rank in range(6)]


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        pytest.param((7, 7, 7, 7), [], id="equal"),
        pytest.param((7, 7, 8, 7), [2], id="one"),
        pytest.param((7, 8, 9, 7, 7), [1, 2], id="two"),
        pytest.param((7, 8), [0, 1], id="two-replicas"),
        pytest.param((7, 8, 7, 8), [0, 1, 2, 3], id="no-majority"),
        pytest.param((7, 8, 9), [0, 1, 2], id="all-differ"),
    ],
)
def test_the_majority_decides(values: Sequence[int], odd: list[int]) -> None:
    wrong, right = _split_majority(list(zip(N, values, strict=False)))
    assert sorted(name.rank for name in wrong) == odd
    assert {name.rank for name in right} == (set(range(len(values))) - set(odd))


def test_what_is_said_of_a_difference() -> None:
    one = ReplicaDifference("model.norm.weight", 3, (N[3],), (N[0], N[1]))
    assert one.describe() == ("rank 3 (on n1) has other bits of model.norm.weight, and 2 more than ranks 0, 1 (on n0)")
    both = ReplicaDifference("x", 1, (N[1], N[2]), ())
    assert both.describe() == "ranks 1, 2 (on n0, n1) have different bits of x, and no majority decides"
    error = describe_error(both.build_error("no."), rank=0)
    assert (error.rank, error.node, error.code, error.text) == (1, "n0,n1", 1, "no.")
    assert both.advise() == "with cluster.exclude=n0,n1"


def _compare(rank: int, size: int) -> list[Any]:
    """With 2 x 2 ranks: clean, then with a bit flipped in each tensor on rank 3; and what is not known."""
    world = build_world(RankInfo(rank, size), Layout(replicate=2, shard=2), torch.device("cpu"))
    mesh, full = world.get_mesh("replicate", "shard"), torch.arange(16.0).view(4, 4)
    assert mesh is not None
    placements = {"rows": [Replicate(), Shard(0)], "shards": [Shard(0), Shard(1)], "whole": [Replicate(), Replicate()]}
    tensors = {name: distribute_tensor(full, mesh, p, src_data_rank=None) for name, p in placements.items()}
    tensors |= {"plain": torch.ones(3), "step": torch.ones(())}  # type: ignore[dict-item]
    found: list[Any] = [find_difference(tensors, world)]
    for name, tensor in tensors.items():
        flipped = {**tensors, name: tensor.clone()}
        local: Any = flipped[name]._local_tensor if isinstance(tensor, DTensor) else flipped[name]
        local.view(-1)[:1].view(torch.int32).bitwise_xor_(int(rank == 3))
        found.append(difference := find_difference(flipped, world))
        assert difference is None or difference.name == name
    fewer = {name: tensor for name, tensor in tensors.items() if rank != 3 or name != "plain"}
    found.append(find_difference(fewer, world))
    try:
        find_replicas("odd", DTensor.from_local(full, mesh, [Partial(), Replicate()]), world)
    except RunError as error:
        found.append(str(error))
    return [[n.rank for n in f.odd] if isinstance(f, ReplicaDifference) else f for f in found]


def test_ranks_find_the_same_difference() -> None:
    """One of four is outvoted; of two nobody is; what exists once has nothing to be compared with."""
    answers = run_ranks(_compare, 4, timeout=60)
    unknown = "odd has the placement Partial, of which it is not known which ranks are equal."
    assert answers == [[None, [1, 3], None, [3], [3], [3], [1, 2, 3], unknown]] * 4
