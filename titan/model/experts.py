"""Mixture of experts: a router sends each token to some of many feed-forward networks, and adds up their outputs.

Ties between experts are broken by their number, on every device, so that the choice depends on its token only.

Shapes: B rows, T tokens of a row, N tokens, D hidden width, E experts, K experts of a token, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model import balance
from titan.model.grouped import GroupedProduct, grouped_product
from titan.model.layers import Block, FeedForward, Use, cast

TINY = 1e-20
"""Added to a sum of scores by which they are divided: sigmoids may all be zero."""


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
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()  # a view, which autograd saves, would keep the whole order


class Router(nn.Module):
    """Scores experts and chooses the K largest (arXiv:1701.06538, arXiv:2101.03961).

    Logits and scores are float32; the weight is rounded to the compute type, as FSDP gathers it.

    Attributes:
        bias: added to scores where experts are chosen, float32 [E] (arXiv:2408.15664); None: nothing is.
        load: shares of all choices that each expert had in the previous step, float32 [E]; see `titan.model.balance`.
    """

    load: Tensor
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        experts: int,
        chosen: int,
        *,
        normalise: bool = True,
        sigmoid: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        chosen_groups: int = 1,
        biased: bool = False,
    ) -> None:
        """Create a router.

        Args:
            dim, experts, chosen: D, E and K.
            normalise: scale the chosen experts' scores so that their sum is one.
            sigmoid: score each expert by itself; else scores are a softmax over the experts.
            scale: factor of the chosen experts' weights.
            groups: consecutive experts are divided into so many groups of one size; tokens go to experts of some.
            chosen_groups: the number of groups of a token: those whose two largest scores have the largest sum
                (arXiv:2412.19437, section 2.1.2).
            biased: whether a bias is added where experts are chosen.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.experts, self.chosen, self.normalise, self.sigmoid, self.scale = experts, chosen, normalise, sigmoid, scale
        self.groups, self.chosen_groups = groups, chosen_groups
        self.use: Use = cast
        self.register_buffer("load", torch.empty(experts), persistent=False)
        self.register_buffer("bias", torch.empty(experts) if biased else None)

    def init_buffers(self, device: torch.device | str) -> None:
        """Set the state before the first step: even load, no bias."""
        self.load = torch.full((self.experts,), 1 / self.experts, device=device)
        self.bias = None if self.bias is None else torch.zeros(self.experts, device=device)

    def forward(self, x: Tensor) -> Route:
        """Route tokens [..., D]."""
        logits = F.linear(x.float(), self.use(self.weight, x.dtype).float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        experts = largest(self._preferred(scores.detach()), self.chosen)
        weights = scores.gather(-1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return Route(experts, weights * self.scale, scores, logits)

    def _preferred(self, scores: Tensor) -> Tensor:
        """Return what experts are chosen by: scores with the bias, minus infinity in groups that are not chosen."""
        scores = scores if self.bias is None else scores + self.bias
        if self.groups == 1:
            return scores
        grouped = scores.view(*scores.shape[:-1], self.groups, -1)
        best = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, largest(best, self.chosen_groups), True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


class ExpertLinear(nn.Module):
    """A linear layer of each expert, with weights [E, out, in], computed in the input's type; no biases."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.use: Use = cast
        self.product: GroupedProduct = grouped_product

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map rows [N, in], sorted by expert, to [N, out]; see `titan.model.grouped`."""
        return self.product(x, self.use(self.weight, x.dtype), ends)


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


Compute = Callable[[Tensor, Tensor], Tensor]
"""Maps rows [N, D], sorted by expert, and the ends of the experts' rows, int32 [experts], to [N, D]."""

Dispatcher = Callable[[Tensor, Tensor, int, Compute], Tensor]
"""Brings tokens to their experts and the results back: see `dispatch`, which does it on one rank. Another exchange
between ranks than titan's plugs in here."""


def dispatch(x: Tensor, experts: Tensor, count: int, compute: Compute) -> Tensor:
    """Compute tokens by their experts, all on this rank.

    Args:
        x: tokens [N, D].
        experts: those of each token, int64 [N, K]; `count` where none computes it.
        count: of experts.
        compute: the experts.

    Returns:
        Their results [N * K, D], token by token; zero where no expert computes it.
    """
    order = experts.flatten().argsort(stable=True)
    return permute(compute(spread(x, order), ends_of(experts.flatten(), count)), inverse(order))


def ends_of(experts: Tensor, count: int) -> Tensor:
    """Return the ends of the experts' rows once they are sorted, int32 [count]."""
    return balance.tally(experts, count).cumsum(0).to(torch.int32)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [N]."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def with_zeros(x: Tensor, rows: int) -> Tensor:
    """Return rows [N, D] with zeros behind them, `rows` in all; without a copy where there are as many already."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


class _Spread(torch.autograd.Function):
    """Gradients are added token by token in one order; those of indexing are added wherever they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = order.shape[0] // x.shape[0]
        return x[order[:rows] // ctx.copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,), (grad,) = ctx.saved_tensors, grads
        each = with_zeros(grad, order.shape[0])[inverse(order)]
        return each.view(-1, ctx.copies, grad.shape[1]).sum(1), None, None


def spread(x: Tensor, order: Tensor, rows: int | None = None) -> Tensor:
    """Return a copy of its token for each choice, in some order.

    Args:
        x: tokens [N, D].
        order: the choices, token by token, as a permutation [N * K].
        rows: how many of them; None: all.
    """
    out: Tensor = _Spread.apply(x, order, order.shape[0] if rows is None else rows)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][inverse(ctx.saved_tensors[0])], None


def permute(x: Tensor, order: Tensor) -> Tensor:
    """Return rows [N, D] in the order of a permutation [N]."""
    out: Tensor = _Permute.apply(x, order)  # type: ignore[no-untyped-call]
    return out


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of experts (arXiv:1701.06538), and shared ones that compute every token (arXiv:2401.06066).

    The outputs of a token's experts are added in float32 in the order of their scores, so that the sum does not depend
    on which other tokens there are.
    """

    def __init__(
        self, dim: int, width: int, router: Router, *, shared: int | None = None, scale_inputs: bool = False
    ) -> None:
        """Create the experts.

        Args:
            dim: D.
            width: F.
            router: has the number of experts.
            shared: width of the shared experts together; None: there are none.
            scale_inputs: the weight of an expert scales its input, not its output.
        """
        super().__init__()
        self.router = router
        self.experts = Experts(router.experts, dim, width)
        self.shared = None if shared is None else FeedForward(dim, shared)
        self.scale_inputs = scale_inputs
        self.dispatch: Dispatcher = dispatch
        self.balance = balance.Balance(router.experts)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Compute tokens.

        Args:
            x: [B, T, D].
            valid: which tokens count in the loss, bool [B, T]; None: nothing is counted.

        Returns:
            [B, T, D], and of valid tokens the values of the balancing losses and the counts; see `titan.model.balance`.
        """
        route = self.router(x)
        kept = self.balance.keep(route.experts)
        out = self._routed(x.flatten(0, -2), kept.flatten(0, -2), route.weights.flatten(0, -2)).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        if valid is None:
            return out, {}, None
        values = self.balance.values(route.experts, route.scores, route.logits, self.router.load, valid)
        return out, values, balance.counts(route.experts, kept, self.router.experts, valid)

    def _routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the outputs of the experts int64 [N, K] of tokens [N, D] with weights float32 [N, K]."""
        shape = *weights.shape, x.shape[-1]
        if self.scale_inputs:
            x, experts = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1), experts.reshape(-1, 1)
        each = self.dispatch(x, experts, self.router.experts, self.experts).view(shape)
        if self.scale_inputs:
            return each.float().sum(-2).to(x.dtype)
        out: Tensor = _WeightedSum.apply(each, weights)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class _WeightedSum(torch.autograd.Function):
    """Sums [N, K, D] times weights float32 [N, K] in float32, and saves them as they are, not in float32."""

    @staticmethod
    def forward(ctx: Any, each: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(each, weights)
        return (each.float() * weights[..., None]).sum(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        each, weights = ctx.saved_tensors
        grad = grads[0][:, None]
        of_weights = (grad * each.float()).sum(-1)  # first, while its float32 copies are the only ones
        return (grad * weights[..., None]).to(each.dtype), of_weights


class MoeBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    routes = True
    """A block that takes which tokens count, and returns values of losses and counts for them."""

    def __init__(self, config: Any, norm_heads: bool = False) -> None:
        """Create the modules of a schema with experts, such as `titan.model.schema_moe.Qwen3Moe`."""
        c = config
        super().__init__(c.dim, c.heads, c.kv_heads, c.head_size, 1, c.norm_eps, norm_heads)
        router = Router(c.dim, c.experts, c.chosen_experts, **c.routing())
        how = {"shared": c.shared_ffn, "scale_inputs": c.scale_inputs}
        self.feed_forward = MixtureOfExperts(c.dim, c.expert_ffn, router, **how)
        self.feed_forward.balance = balance.Balance(c.experts, tuple(c.balance_losses()), c.capacity)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Any = None, valid: Tensor | None = None) -> Any:
        """See `titan.model.layers.Block.forward`; with `valid` also `MixtureOfExperts.forward`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, seen)
        out, values, counts = self.feed_forward(self.ffn_norm(x), valid)
        return x + out if counts is None else (x + out, values, counts)
