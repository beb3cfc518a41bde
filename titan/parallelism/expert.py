"""Expert parallelism (arXiv:2006.16668): the experts of a layer on different ranks, tokens exchanged by all-to-all.

Each rank of a group has some consecutive experts of every layer, and computes what the tokens of all the group's ranks
need of them. The group's ranks are consecutive ones of shard, context and tensor; the experts of a rank are sharded by
FSDP over the ranks of other groups that have the same ones. So the gradients of an expert are sums over all ranks,
through the exchange and FSDP, and no tensor parallelism splits an expert.

The host waits for the device once in each forward pass of a layer, to know how many rows it receives. A recomputation
keeps these numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan.config.text_kinds import Label
from titan.memory.kept_values import keep
from titan.model.balance import count_experts
from titan.model.expert_ops import (
    expand_tokens,
    permute_rows,
    select_weights,
    sort_choices,
    sum_rows,
    transpose_segments,
)
from titan.model.experts import Compute, Dispatcher, ExpertLinear, MixtureOfExperts, dispatch
from titan.model.steps import Steps, run_steps
from titan.parallelism import collectives
from titan.parallelism.mesh import World
from titan.parallelism.schema import ExpertExchange, Strategy
from titan.parallelism.tensor import local_shard

EXPERTS = "feed_forward.experts"
"""The name of a block's experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertSharding(Strategy):
    """How FSDP shards the experts of a rank: over the ranks that have the same ones.

    Attributes:
        match: patterns of the experts' modules.
        shard: number of the ranks that have the same experts.
        experts: number of experts of a layer.
        ranks: number of ranks that divide them.
    """

    match: tuple[Label, ...] = (f"layers.*.{EXPERTS}",)
    experts: int = 1
    ranks: int = 1

    def mesh(self, world: World) -> DeviceMesh:
        """See `Strategy.mesh`."""
        mesh: Any = world.get_mesh("replicate", "shard", experts=True)
        return mesh  # type: ignore[no-any-return]

    def dimension(self, name: str, shape: Sequence[int]) -> int:
        """Shard along the dimension of experts where a rank has enough of them, else along the next one if it fits."""
        shards, (experts, width, *_) = self.shard or 1, shape
        return 1 if experts % shards and not width % shards else 0

    def describe(self, mesh: DeviceMesh) -> str:
        """See `Strategy.describe`."""
        _, _, sharding = super().describe(mesh).partition(", ")
        return f"{self.experts // self.ranks} of {self.experts} on each of {self.ranks} ranks, {sharding}"


class ExpertDispatch:
    """Computes tokens by the experts of a group of ranks; see `titan.model.experts.dispatch`.

    Attributes:
        pending_type: what starts an exchange of rows and waits for it.
    """

    pending_type = collectives.PendingExchange

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks, of which each has an equal number of consecutive experts."""
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute) -> Tensor:
        """See `titan.model.experts.dispatch`; `compute` has the experts of this rank."""
        return run_steps(self.iterate(x, experts, weights, count, compute))

    def iterate(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute
    ) -> Steps[Tensor]:
        """See `titan.model.experts.SteppedDispatcher`."""
        received_per_expert, send_counts, receive_counts = keep(lambda: self._exchange_counts(experts.flatten(), count))
        order = sort_choices(experts, sum(send_counts))
        counts = send_counts, receive_counts
        pending = self._start_exchange(expand_tokens(x, order), *counts)
        pending_weights = None if weights is None else self._start_exchange(select_weights(weights, order), *counts)
        yield "dispatch"
        by_expert, by_rank = transpose_segments(received_per_expert, sum(receive_counts))
        rows = permute_rows(pending.finish(), by_expert, by_rank)
        row_weights = None if pending_weights is None else permute_rows(pending_weights.finish(), by_expert, by_rank)
        out = compute(rows, row_weights, received_per_expert.sum(0).cumsum(0).to(torch.int32), exact=True)
        out = permute_rows(out, by_rank, by_expert)
        result = self._start_exchange(out, receive_counts, send_counts)
        yield "combine"
        return sum_rows(result.finish(), order)

    def _start_exchange(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Any:
        return collectives.start_exchange(x, self.pending_type(send_counts, receive_counts, self.group))

    def _exchange_counts(self, experts: Tensor, count: int) -> tuple[Tensor, list[int], list[int]]:
        """Return the rows of each rank and local expert that come here, and the rows to and from each rank.

        Selective checkpointing must not see the exchange, which is not repeated: so it is no functional collective.

        Args:
            experts: of each row, int64 [N]; `count` where none computes it.
            count: of experts.
        """
        sent_per_expert = count_experts(experts, count).view(self.group.size(), -1)
        received_per_expert = torch.empty_like(sent_per_expert)
        dist.all_to_all_single(received_per_expert, sent_per_expert, group=self.group)
        return received_per_expert, *_count_exchanged_rows(sent_per_expert, received_per_expert, len(experts))


def _count_exchanged_rows(
    sent_per_expert: Tensor, received_per_expert: Tensor, rows: int
) -> tuple[list[int], list[int]]:
    """Return the rows that go to each rank, and that come from it; of fake tensors as many as an even load has."""
    if isinstance(sent_per_expert, FakeTensor):
        even_counts = [rows // len(sent_per_expert)] * len(sent_per_expert)
        return even_counts, even_counts
    send_counts, receive_counts = torch.stack([sent_per_expert.sum(1), received_per_expert.sum(1)]).tolist()
    return send_counts, receive_counts


def exchanges_tokens(module: nn.Module) -> bool:
    """Return whether a module's tokens travel to other ranks' experts, or are dispatched by another library."""
    return isinstance(module, MixtureOfExperts) and module.dispatch is not dispatch


def shard_experts(model: Any, mesh: DeviceMesh, exchange: ExpertExchange) -> None:
    """Divide the experts of a model, built on meta, over a mesh of one dimension.

    Args:
        model: its blocks may have a `titan.model.experts.MixtureOfExperts`.
        exchange: how tokens reach them.
    """
    dispatcher = _build_dispatcher(exchange, mesh.get_group())
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.dispatch = dispatcher
            for module in layer.experts.children():
                _shard_weight(module, mesh)


@functools.cache
def _build_dispatcher(exchange: ExpertExchange, group: dist.ProcessGroup) -> Dispatcher:
    """Return what all layers of all stages send their tokens by: buffers may be gigabytes."""
    return exchange.build(group) or ExpertDispatch(group)


def _shard_weight(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, ExpertLinear):
        raise TypeError(f"{type(module).__name__} is no titan.model.experts.ExpertLinear")
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
    module.get_weight = local_shard
