"""Mixture of experts: a router sends each token to some of many feed-forward networks, and adds up their outputs.

Nothing is dropped. Ties between experts are broken by their number, on every device, so that the choice depends on the
token's scores alone.

Shapes: B rows, T tokens of a row, D hidden width, E experts, K experts of a token, F width of an expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model.grouped import grouped_product
from titan.model.layers import Block, Use, cast


class Route(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: int64 [..., K], the largest score first.
        weights: of their outputs, float32 [..., K].
        scores: of all experts, float32 [..., E].
        logits: float32 [..., E].
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices [..., count] of the largest of [..., E], the smaller index first where they are equal."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Router(nn.Module):
    """Softmax over the experts and its K largest, in float32 (arXiv:1701.06538, arXiv:2101.03961)."""

    def __init__(self, dim: int, experts: int, chosen: int, normalise: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.chosen, self.normalise = chosen, normalise
        self.use: Use = cast

    def forward(self, x: Tensor) -> Route:
        """Route tokens [..., D]."""
        logits = F.linear(x.float(), self.use(self.weight, torch.float32))
        scores = logits.softmax(-1)
        experts = largest(scores.detach(), self.chosen)
        weights = scores.gather(-1, experts)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Route(experts, weights, scores, logits)


class ExpertLinear(nn.Module):
    """A linear layer of each expert, with weights [E, out, in], computed in the input's type; no biases."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.use: Use = cast

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map rows [N, in], sorted by expert, to [N, out]; see `titan.model.grouped`."""
        return grouped_product(x, self.use(self.weight, x.dtype), ends)


class Experts(nn.Module):
    """SwiGLU networks, one for each expert."""

    def __init__(self, experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = ExpertLinear(experts, dim, width)
        self.w2 = ExpertLinear(experts, width, dim)
        self.w3 = ExpertLinear(experts, dim, width)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map rows [N, D], sorted by expert, to [N, D]."""
        out: Tensor = self.w2(F.silu(self.w1(x, ends)) * self.w3(x, ends), ends)
        return out


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of experts (arXiv:1701.06538)."""

    def __init__(self, dim: int, width: int, experts: int, chosen: int, normalise: bool) -> None:
        super().__init__()
        self.count = experts
        self.router = Router(dim, experts, chosen, normalise)
        self.experts = Experts(experts, dim, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Route]:
        """Map [B, T, D] to [B, T, D], and return where tokens went."""
        route = self.router(x)
        out = dispatch(x.flatten(0, -2), route.experts.flatten(0, -2), route.weights.flatten(0, -2), self)
        return out.view_as(x), route


def dispatch(x: Tensor, experts: Tensor, weights: Tensor, layer: MixtureOfExperts) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [N, D] in the type of `x`.

    The sum is in float32, in the order of the experts' ranks in the token's choice, so that it does not depend on which
    other tokens there are.

    Args:
        x: tokens [N, D].
        experts: int64 [N, K].
        weights: float32 [N, K].
        layer: has the experts.
    """
    chosen = experts.shape[-1]
    order = experts.flatten().argsort(stable=True)
    counts = torch.zeros(layer.count, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(experts.flatten()))
    rows: Tensor = layer.experts(x[order // chosen], counts.cumsum(0).to(torch.int32))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    each = rows[back].view(-1, chosen, x.shape[-1])
    out: Tensor = (each.float() * weights[..., None]).sum(-2).to(x.dtype)
    return out


class MoeBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    def __init__(self, config: Any, norm_heads: bool = False) -> None:
        """Create the modules of a schema with experts, such as `titan.model.schema_moe.Qwen3Moe`."""
        c = config
        super().__init__(c.dim, c.heads, c.kv_heads, c.head_size, 1, c.norm_eps, norm_heads)
        self.feed_forward = MixtureOfExperts(c.dim, c.expert_ffn, c.experts, c.chosen_experts, c.normalise_chosen)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Any = None) -> Tensor:
        """See `titan.model.layers.Block.forward`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, seen)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))[0]
        return out
