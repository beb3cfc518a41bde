"""Data parallelism by itself: sums instead of means, once for several micro-batches, and parts after a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from titan.cluster.rank_info import RankInfo
from titan.model import init_weights
from titan.model.schema import Llama
from titan.parallelism import data, mesh
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.schema import Layout
from titan.training.train_step import GradAccumulation, ModelStage, TrainStep

CONFIG = Llama(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab=32)
TIED = Llama(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab=32, tied=True)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Micro-batches of one row each, int64 [count, 1, 8]."""
    tokens = torch.randint(0, 32, (count, 1, 9), generator=torch.Generator().manual_seed(1))
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def build(config: Llama, wrap: str) -> TrainStep:
    """The model of `config`, under the data parallelism `wrap` of all ranks: none, ddp, hsdp, fsdp, or fsdp that keeps
    whole gradients, or weights."""
    with torch.device("meta"):
        model: Any = config.build()
    initial, stage = model.initial(), ModelStage(model)
    if "fsdp" in wrap or wrap == "hsdp":
        sizes = (2, dist.get_world_size() // 2) if wrap == "hsdp" else (dist.get_world_size(),)
        group = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        data.shard_stage(stage, group, torch.float32, reshard=wrap != "fsdp-kept")
    init_weights.materialise_model(model, initial, 0, "cpu")
    wrapped: nn.Module = stage
    if wrap == "ddp":
        wrapped = data.replicate(
            stage, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
        )
    world = mesh.RunContext(RankInfo(), Layout(), torch.device("cpu"))
    return TrainStep(
        (stage,), GradAccumulation(stage, wrapped, wrap == "fsdp-whole"), torch.optim.SGD(model.parameters()), world
    )


def summed(rank: int, world: int, config: Llama, wrap: str, each: int) -> Any:
    """On each rank: the gradients of its own micro-batches, and how often ranks talked in the backward passes."""
    train_step, (tokens, targets) = build(config, wrap), batch(world * each)
    mine = slice(rank * each, (rank + 1) * each)
    with torch.profiler.profile() as profile:
        train_step.backward(Microbatches(tokens[mine], targets[mine]), 0.5)
    count = {e.key: e.count for e in profile.key_averages()}
    gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in train_step.list_gradients()]
    return gradients, count.get("c10d::allreduce_", 0), count.get("c10d::_reduce_scatter_base_", 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "wrap", "ranks", "scatters"),
    [
        pytest.param(TIED, "fsdp-whole", 2, 1, id="fsdp-whole-tied"),
        pytest.param(CONFIG, "ddp", 2, 0, id="ddp-untied"),
        pytest.param(CONFIG, "fsdp", 2, 2, id="fsdp-untied"),
        pytest.param(CONFIG, "fsdp-kept", 2, 2, id="fsdp-kept-untied"),
        pytest.param(CONFIG, "hsdp", 4, 2, id="hsdp-untied"),
    ],
)
def test_gradients_are_summed_over_ranks_and_micro_batches(config: Llama, wrap: str, ranks: int, scatters: int) -> None:
    """`scatters`: how often each gradient is reduced to parts in two micro-batches; copies are summed once."""
    alone = build(config, "none")
    alone.backward(Microbatches(*batch(2 * ranks)), 0.5)
    (gradients, reduced, scattered), (others, *_) = run_ranks(summed, ranks, config, wrap, 2)[:2]
    _, reduced_once, scattered_once = run_ranks(summed, ranks, config, wrap, 1)[0]
    assert reduced == reduced_once
    assert scattered == scatters * scattered_once
    assert bool(scattered) == (wrap != "ddp")
    assert bool(reduced) == (wrap in ("ddp", "hsdp"))
    for gradient, other, expected in zip(gradients, others, alone.list_gradients(), strict=True):
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(gradient, other)


def looked_at(rank: int, world: int, config: Llama) -> tuple[int, int]:
    train_step = build(config, "fsdp")
    train_step.evaluate(Microbatches(*batch(1)))
    gathered = sum(not isinstance(p, DTensor) for p in train_step.parameters())
    data.reshard_parameters(train_step.stages[0])
    return gathered, sum(not isinstance(p, DTensor) for p in train_step.parameters())


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_part_undoes_what_an_evaluation_gathered(config: Llama) -> None:
    for before, after in run_ranks(looked_at, 2, config):
        assert before > 0
        assert after == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [Layout(replicate=4), Layout(shard=4), Layout(replicate=2, shard=2)], ids=["ddp", "fsdp", "hsdp"]
)
def test_each_data_rank_has_a_share_of_its_own(layout: Layout, tmp_path: Any) -> None:
    def joined(rank: int, size: int) -> Any:
        world = mesh.connect_world(RankInfo(rank, size, rank, f"file://{tmp_path}/meeting"), layout, "cpu", 300)
        ones, gathered = world.all_reduce(torch.ones(2)), world.all_gather_object(rank * 2)
        world.close()
        return world.data_shard.rank, world.data_shard.ranks, world.is_rank0, ones.tolist(), gathered

    found = run_ranks(joined, 4, joined=False)
    assert [(share, ranks) for share, ranks, *_ in found] == [(rank, 4) for rank in range(4)]
    assert [is_rank0 for _, _, is_rank0, _, _ in found] == [True, False, False, False]
    assert all(rest == [[4.0, 4.0], [0, 2, 4, 6]] for _, _, _, *rest in found)


def test_one_rank_needs_nobody() -> None:
    world = mesh.connect_world(RankInfo(), Layout(), "cpu", 30)
    assert (world.mesh, world.data_shard.rank, world.data_shard.ranks, world.is_rank0) == (None, 0, 1, True)
    assert world.all_gather_object("a") == ["a"]
    assert world.all_reduce(torch.tensor(3.0)) == 3
    assert world.get_mesh("replicate", "shard") is None
