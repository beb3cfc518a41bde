"""Expert parallelism (arXiv:2006.16668): the experts of a layer on different ranks, tokens exchanged by all-to-all.

Each rank of a group has some consecutive experts of every layer, and computes what the tokens of all the group's ranks
need of them. The group's ranks are consecutive ones of shard, context and tensor; the experts of a rank are sharded by
FSDP over the ranks of other groups that have the same ones. So the gradients of an expert are sums over all ranks,
through the exchange and FSDP, and no tensor parallelism splits an expert.

The host waits for the device once in each forward pass of a layer, to know how many rows it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan.model.balance import tally
from titan.model.experts import Compute, ExpertLinear, MixtureOfExperts, inverse, permute, spread, with_zeros
from titan.parallelism import collectives
from titan.parallelism.mesh import World
from titan.parallelism.schema import Layout
from titan.parallelism.strategy import Strategy
from titan.parallelism.tensor import held

EXPERTS = "feed_forward.experts"
"""The name of a block's experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertSharding(Strategy):
    """How FSDP shards the experts of a rank: over the ranks that have the same ones.

    Attributes:
        experts: of a layer.
        ranks: that share them.
    """

    match: tuple[str, ...] = (f"layers.*.{EXPERTS}",)
    experts: int = 1
    ranks: int = 1

    def shards(self, layout: Layout) -> int:
        """See `Strategy.shards`."""
        return layout.expert_shards

    def mesh(self, world: World) -> DeviceMesh:
        """See `Strategy.mesh`."""
        if world.experts is None:
            raise RuntimeError(f"{world.layout}: experts are as other weights")
        return world.experts["replicate", "shard"] if world.layout.replicate > 1 else world.experts["shard"]

    def wrap(self, modules: list[nn.Module], mesh: DeviceMesh, options: Any) -> None:
        """Shard along the dimension of experts where a rank has enough of them, else along the next one if it fits."""
        ranks = mesh.size(-1)

        def placement(parameter: nn.Parameter) -> Shard:
            experts, width = parameter._local_tensor.shape[:2]  # type: ignore[attr-defined]
            return Shard(1 if experts % ranks and not width % ranks else 0)

        super().wrap(modules, mesh, {**options, "shard_placement_fn": placement})

    def describe(self, mesh: DeviceMesh) -> str:
        """See `Strategy.describe`."""
        _, _, sharded = super().describe(mesh).partition(", ")
        return f"{self.experts // self.ranks} of {self.experts} on each of {self.ranks} ranks, {sharded}"


class Exchange:
    """Computes tokens by the experts of a group of ranks; see `titan.model.experts.dispatch`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks, of which each has an equal number of consecutive experts."""
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, experts: Tensor, count: int, compute: Compute) -> Tensor:
        """See `titan.model.experts.dispatch`; `compute` has the experts of this rank."""
        ranks, flat = self.group.size(), experts.flatten()
        order = flat.argsort(stable=True)
        sent = tally(flat, count).view(ranks, -1)
        received = collectives.all_to_all(sent, self.group)
        sending, receiving = _sizes(sent, received, len(flat))
        rows = spread(x, order, sum(sending))
        rows = collectives.exchange(rows, sending, receiving, self.group)
        by_expert = _owners(received, sum(receiving)).argsort(stable=True)
        out = compute(permute(rows, by_expert), received.sum(0).cumsum(0).to(torch.int32))
        out = collectives.exchange(permute(out, inverse(by_expert)), receiving, sending, self.group)
        return permute(with_zeros(out, len(flat)), inverse(order))


def _sizes(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the rows that go to each rank, and that come from it; of fake tensors as many as an even load has."""
    if isinstance(sent, FakeTensor):
        even = [rows // len(sent)] * len(sent)
        return even, even
    sending, receiving = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return sending, receiving


def _owners(received: Tensor, rows: int) -> Tensor:
    """Return the local expert of each received row, int64 [rows]: they come rank by rank, sorted by expert.

    Args:
        received: the rows of each rank and expert, int64 [ranks, experts].
        rows: their sum.
    """
    ends = received.flatten().cumsum(0)
    places = torch.arange(rows, device=received.device)
    return torch.searchsorted(ends, places, right=True) % received.shape[1]


def apply(model: Any, mesh: DeviceMesh) -> None:
    """Divide the experts of a model, built on meta, over a mesh of one dimension.

    Args:
        model: its blocks may have a `titan.model.experts.MixtureOfExperts`.
        mesh: the ranks that share the experts of a layer.
    """
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.dispatch = Exchange(mesh.get_group())
            for module in layer.experts.children():
                _divide(module, mesh)


def _divide(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, ExpertLinear):
        raise TypeError(f"{type(module).__name__} is no titan.model.experts.ExpertLinear")
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
    module.use = held
