"""Traps of torch that titan has to walk around, each with a test that fails if it is stepped into again.

Others have their tests elsewhere: sums on gloo in parallelism/test_data.py, compiled blocks that tensor-parallel
layers feed in the matrix, compilers after a fork in test_compile.py, votes of pipeline stages and counting under
schedules that split the backward pass in test_fake_world.py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError
from titan.model import init_weights
from titan.model.layers import Head, cross_entropy
from titan.model.loss_terms import Objective
from titan.model.schema import Llama
from titan.parallelism import collectives, norms, tensor
from titan.parallelism.mesh import World
from titan.parallelism.norms import count_replicas
from titan.parallelism.schema import Layout


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_weights_stay_gathered_between_two_backward_passes(schedule: str, tmp_path: Path) -> None:
    """With weights freed in between gradients come out wrong, without a word."""
    settings = ["model.layers=4", f"parallelism.schedule={schedule}", "parallelism.pipeline=2", "parallelism.shard=2"]
    run = compose_tiny_run(tmp_path, *settings, "parallelism.microbatches=4")
    assert run.staging.splits_backward
    assert run.parallelism.resolve_reshard(run.layout) is False
    for reshard in ("always", "2"):
        with pytest.raises(ConfigError, match="reshard"):
            compose_tiny_run(tmp_path, *settings, "parallelism.microbatches=4", f"parallelism.reshard={reshard}")


def start(rank: int, world: int) -> tuple[Tensor, bool]:
    """A matrix drawn in parts: whole, and whether the parts of two ranks are the same."""
    mesh = init_device_mesh("cpu", (world,))
    module = nn.Linear(8, 16, bias=False, device="meta")
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
    module.init_buffers = lambda device: None  # type: ignore[assignment]
    init_weights.materialise_model(module, {"weight": init_weights.Normal(1.0)}, 0, "cpu")
    whole: Tensor = module.weight.full_tensor().detach()  # type: ignore[attr-defined]
    first, second = whole.chunk(2)
    return whole, bool(torch.equal(first, second))


@pytest.mark.full
def test_ranks_do_not_draw_the_same_part() -> None:
    """torch's own initialisation of a DTensor on CPU gives every rank the same numbers."""
    (whole, repeated), (other, _) = run_ranks(start, 2)
    assert not repeated
    assert torch.equal(whole, other)


def mixed(rank: int, world: int) -> tuple[float, float]:
    """The norm of gradients on several meshes and on none, and what it should be."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    values = torch.arange(32.0).view(8, 4)
    cut = distribute_tensor(values, mesh["tensor"], [Shard(0)], src_data_rank=None)
    both = distribute_tensor(values, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    whole = distribute_tensor(values, mesh["shard"], [Replicate()], src_data_rank=None)
    all_ranks = World(RankInfo(rank, world, rank), Layout(shard=2, tensor=2), torch.device("cpu"))
    gradients = ((gradient, count_replicas(gradient, all_ranks)) for gradient in (cut, values, both, whole))
    total = all_ranks.all_reduce(norms.sum_squares(gradients, torch.device("cpu"))).sqrt()
    return total.item(), (4 * values.square().sum()).sqrt().item()


@pytest.mark.full
def test_a_norm_over_any_mix_of_meshes() -> None:
    """torch's clipping rejects mixed placements, and treats a shard of a shard as a whole tensor."""
    for found, expected in run_ranks(mixed, 4):
        assert found == pytest.approx(expected, rel=1e-6)


def coordinator(rank: int, world: int) -> list[tuple[type, bool]]:
    """The types of what collectives give, and whether a gradient came back through them."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for collective in (
        lambda x: collectives.all_gather_autograd(x, 1, group),
        lambda x: collectives.reduce_scatter_autograd(x, 1, group),
        lambda x: collectives.gather_from_region(x, 1, group),
        lambda x: collectives.copy_to_region(x, group),
        lambda x: collectives.reduce_from_region(x, group),
    ):
        x = torch.ones(1, 4, requires_grad=True)
        out = collective(x)
        out.sum().backward()
        found.append((type(out), x.grad is not None and bool(x.grad.all())))
    return found


@pytest.mark.full
def test_collectives_give_plain_tensors() -> None:
    """One that is still under way, in a compiled block, would give wrong gradients without a word."""
    for found in run_ranks(coordinator, 2):
        assert found == [(Tensor, True)] * 5


def losses(rank: int, world: int) -> tuple[Tensor, Tensor, float, float]:
    """Gradients of the loss from parts of the logits and from whole ones; each goes back long after it was computed."""
    mesh = init_device_mesh("cpu", (world,))
    hidden, targets = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1, -100, 5])
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    model: Any = Llama(dim=8, layers=1, heads=2, kv_heads=2, ffn=8, vocab=6).build()
    model.keep([], first=False, last=True)
    tensor.apply_tensor_plan(model, mesh, sequence_parallel=False, loss_parallel=True)
    head: Head = model.head
    head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
    x, other = hidden[None].clone().requires_grad_(), hidden[None].clone().requires_grad_()
    first, second = head(x, targets[None]), head(other, targets[None])
    with torch.no_grad():
        again = head(x, targets[None])
    second.backward()
    first.backward()
    alone = hidden.clone().requires_grad_()
    expected = cross_entropy(alone @ weight.T, targets)
    expected.backward()
    return x.grad[0] - alone.grad, other.grad[0] - alone.grad, (again - expected).item(), (first - expected).item()  # type: ignore[index, operator]


def test_the_loss_from_parts_needs_no_context() -> None:
    """torch's loss_parallel() must be entered once, and be around the backward pass too."""
    for one, other, *rest in run_ranks(losses, 2):
        assert max(one.abs().max(), other.abs().max()) <= 1e-6
        assert max(map(abs, rest)) <= 1e-5


def large(rank: int, world: int) -> tuple[float, bool]:
    """The loss from parts of logits whose exponentials overflow, less that from whole ones; are gradients finite?"""
    group = dist.group.WORLD
    assert group is not None
    logits = 200 * torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    mine, targets = logits.chunk(world, -1)[rank].clone().requires_grad_(), torch.tensor([1, -100, 5])
    loss = Objective(vocabulary=tensor._SplitVocabulary(group)).compute_figures(mine[:, :0], mine, targets, ())[0]
    loss.backward()
    return (loss - cross_entropy(logits, targets)).item(), mine.grad is not None and bool(mine.grad.isfinite().all())


def test_the_loss_from_parts_of_large_logits_is_finite() -> None:
    for difference, finite in run_ranks(large, 2):
        assert abs(difference) <= 1e-3
        assert finite


def test_weights_drawn_at_the_same_time_are_as_if_alone() -> None:
    """Threads of one process share torch's global generator."""

    def drawn(seed: int) -> Tensor:
        values = torch.empty(512, 512)
        init_weights.fill_normal(values, name="w", seed=seed, std=1.0, shape=values.shape, offset=(0, 0))
        return values

    alone = [drawn(seed) for seed in range(4)]
    together: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda s=s: together.update({s: drawn(s)})) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[seed], alone[seed]) for seed in range(4))
