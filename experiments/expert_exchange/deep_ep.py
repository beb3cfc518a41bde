"""An exchange of tokens that sends one copy of a token to each rank which has experts for it.

That rank adds its experts' weighted results before they return, so less is sent both ways than by an all-to-all of
rows: a token whose K experts are on fewer ranks travels less often. DeepEP's kernels do that (`deep_ep.ElasticBuffer`,
its version 2); what the gradients are, and how a rank computes the tokens that it received, is the same for any
transport. A recomputation keeps what the forward pass received beside the tokens, and sends only these again, so that
the host waits once.

Shapes: N tokens of the rank, R received tokens, K experts of a token, D hidden width.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titan.errors import ConfigError
from titan.memory.kept_values import keep
from titan.model.experts import Compute, dispatch
from titan.parallelism.schema import ExpertExchange


class ReceivedTokens(NamedTuple):
    """What a rank received.

    Attributes:
        x: tokens [R, D].
        experts: of this rank, int64 [R, K], by their number on it; that of all its experts where there is none.
        weights: of the experts' results, float32 [R, K]; None: none were sent.
        rows: how many of `experts` are experts of this rank.
        handle: what the transport needs to send other vectors of the same tokens, and results back.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor | None
    rows: int
    handle: Any


class Transport(Protocol):
    """Sends vectors of tokens between ranks that share experts. No gradients; all ranks call each method together."""

    def send(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int) -> ReceivedTokens:
        """Send one copy of each token to each rank that has experts for it.

        Args:
            x: tokens [N, D].
            experts: those of each token, int64 [N, K]; `count` where none computes it.
            weights: of the experts' results, float32 [N, K]; None: none are sent.
            count: of all ranks' experts.
        """

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        """Return [R, D]: other vectors [N, D] of the same tokens, sent to the same ranks."""

    def add(self, x: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Return the sums [N, D] of what ranks have of a token, [R, D], and of float32 [N, K] from [R, K]."""


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, experts: Tensor, count: int, transport: Transport) -> Any:
        received = _receive(x, experts, weights, count, transport)
        ctx.transport, ctx.handle = transport, received.handle
        ctx.mark_non_differentiable(received.experts)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_grad, _, weights_grad, *_ = grads
        return *ctx.transport.add(x_grad.contiguous(), weights_grad, ctx.handle), None, None, None


def _receive(x: Tensor, experts: Tensor, weights: Tensor | None, count: int, transport: Transport) -> ReceivedTokens:
    """Return what this rank receives; in the recomputation of a block only the tokens are sent again."""
    tokens: list[Tensor] = []

    def send() -> ReceivedTokens:
        received = transport.send(x, experts, weights, count)
        tokens.append(received.x)
        return received._replace(x=received.x.new_empty(0))

    kept = keep(send)
    # autograd gives what is returned a history, which the kept tensors must not have
    kept_weights = None if kept.weights is None else kept.weights.detach()
    received_x = tokens[0] if tokens else transport.send_again(x.contiguous(), kept.handle)
    return kept._replace(x=received_x, experts=kept.experts.detach(), weights=kept_weights)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport, handle: Any) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        return transport.add(x, None, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transport.send_again(grads[0].contiguous(), ctx.handle), None, None


class AddingDispatch:
    """Computes tokens by the experts of a group of ranks, and adds on each rank; see `titan.model.experts.dispatch`."""

    def __init__(self, group: dist.ProcessGroup, transport: Transport) -> None:
        """Take the ranks, of which each has an equal number of consecutive experts, and what sends between them."""
        self.group, self.transport = group, transport

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute) -> Tensor:
        """See `titan.model.experts.dispatch`; `compute` has the experts of this rank."""
        received = ReceivedTokens(
            *_Send.apply(x, weights, experts, count, self.transport)  # type: ignore[no-untyped-call]
        )
        local_count = count // self.group.size()
        results = dispatch(received.x, received.experts, received.weights, local_count, compute, received.rows)
        out: Tensor = _Add.apply(results, self.transport, received.handle)  # type: ignore[no-untyped-call]
        return out


class DeepEPTransport:
    """Sends by DeepEP's kernels, in bfloat16, on GPUs.

    Tokens arrive in the same order each time, at the cost of a sort: recomputed blocks use results of the first pass.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks; buffers are created with the first tokens."""
        self.group, self.capacity = group, 0
        self.buffer: Any = None

    def send(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int) -> ReceivedTokens:
        """See `Transport.send`; the host waits for the number of tokens."""
        import deep_ep

        if x.shape[0] > self.capacity:
            self._create_buffer(x, experts.shape[1])
        choices = experts.masked_fill(experts == count, -1).to(deep_ep.topk_idx_t)
        tokens, received, received_weights, handle, _ = self.buffer.dispatch(
            x.contiguous(), topk_idx=choices, topk_weights=weights, num_experts=count, expert_alignment=1
        )
        local_experts = received.long().masked_fill(received < 0, count // self.group.size())
        rows = sum(handle.num_recv_tokens_per_expert_list)
        return ReceivedTokens(tokens, local_experts, received_weights, rows, handle)

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        """See `Transport.send_again`."""
        tokens: Tensor = self.buffer.dispatch(x, handle=handle)[0]
        return tokens

    def add(self, x: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `Transport.add`."""
        total, total_weights, _ = self.buffer.combine(x, handle=handle, topk_weights=weights)
        return total, total_weights

    def _create_buffer(self, x: Tensor, top_k: int) -> None:
        """Create the buffers of all ranks, which have equally many tokens."""
        import deep_ep

        self.capacity = x.shape[0]
        sizes = {"num_max_tokens_per_rank": self.capacity, "hidden": x.shape[1], "num_topk": top_k}
        self.buffer = deep_ep.ElasticBuffer(self.group, **sizes, deterministic=True)


@dataclass(frozen=True, kw_only=True)
class DeepEP(ExpertExchange):
    """DeepEP's kernels in place of titan's all-to-all; needs CUDA, bf16 and the package deep_ep, version 2."""

    def build(self, group: dist.ProcessGroup) -> AddingDispatch:
        """See `ExpertExchange.build`."""
        if importlib.util.find_spec("deep_ep") is None or not torch.cuda.is_available():
            raise ConfigError(
                "parallelism.exchange=deep_ep: needs CUDA and the package deep_ep, version 2; install it from "
                "github.com/deepseek-ai/DeepEP, or leave parallelism.exchange out."
            )
        return AddingDispatch(group, DeepEPTransport(group))
