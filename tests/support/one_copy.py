"""What DeepEP does, on CPUs: one copy of a token for each rank, and sums on the rank of the experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.expert_exchange.deep_ep import ReceivedTokens
from titan.parallelism import collectives


class OneCopyTransport:
    """A transport (`experiments.expert_exchange.deep_ep`) of all-to-alls; received tokens are in their ranks' order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int) -> ReceivedTokens:
        """See `Transport.send`."""
        ranks, local = self.group.size(), count // self.group.size()
        goes_to = torch.stack([(experts // local == rank).any(1) for rank in range(ranks)])
        tokens, sent = goes_to.nonzero()[:, 1], goes_to.sum(1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = (tokens, sent.tolist(), received.tolist(), len(x))
        local_experts = self.send_again(experts, handle) - self.group.rank() * local
        is_local = (local_experts >= 0) & (local_experts < local)
        received_weights = None if weights is None else self.send_again(weights, handle)
        return ReceivedTokens(
            self.send_again(x, handle),
            local_experts.where(is_local, local),
            received_weights,
            int(is_local.sum()),
            handle,
        )

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        """See `Transport.send_again`."""
        tokens, sent, received, _ = handle
        return self.exchange(x[tokens], sent, received)

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return collectives.start_exchange(x, collectives.PendingExchange(sent, received, self.group)).finish()

    def add(self, x: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `Transport.add`."""
        return self._add(x, handle), None if weights is None else self._add(weights, handle)

    def _add(self, x: Tensor, handle: Any) -> Tensor:
        tokens, sent, received, count = handle
        returned = self.exchange(x, received, sent)
        return torch.zeros(count, x.shape[1]).index_add_(0, tokens, returned.float()).to(x.dtype)


class CountingTransport(OneCopyTransport):
    """Counts what is sent, by exchanges that selective checkpointing does not save, as it does not save DeepEP's."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.sends, self.tokens_again = 0, 0

    def send(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int) -> ReceivedTokens:
        """See `Transport.send`."""
        self.sends += 1
        received = super().send(x, experts, weights, count)
        self.tokens_again = 0
        return received

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        """See `Transport.send_again`."""
        self.tokens_again += 1
        tokens, sent, received, _ = handle
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x[tokens].contiguous(), received, sent, group=self.group)
        return out


class SentBytes(TorchDispatchMode):
    """Counts the bytes that leave a rank in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            x, sent = args[0], args[2]
            self.total += (len(x) - sent[dist.get_rank()]) * x[:1].nbytes  # its own rows stay
        return func(*args, **(kwargs or {}))
