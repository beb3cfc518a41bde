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
from titan.model.grouped import GroupedProduct, multiply_grouped
from titan.model.layers import Block, FeedForward, GetWeight, cast_weight

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


def select_top_k(scores: Tensor, count: int) -> Tensor:
    """Return the indices [..., count] of the largest of [..., E], the smaller index first where they are equal."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()  # a view, which autograd saves, would keep the whole order


class Router(nn.Module):
    """Scores experts and chooses the K largest (arXiv:1701.06538, arXiv:2101.03961).

    Logits and scores are float32; the weight is rounded to the compute type, as FSDP gathers it.

    Attributes:
        load: shares of all choices that each expert had in the previous step, float32 [E]; see `titan.model.balance`.
        bias: added to scores where experts are chosen, float32 [E] (arXiv:2408.15664); None: nothing is.
    """

    load: Tensor
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        sigmoid: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        topk_groups: int = 1,
        has_bias: bool = False,
    ) -> None:
        """Create a router.

        Args:
            dim: D.
            experts: E.
            top_k: K.
            norm_topk_prob: scale the chosen experts' scores so that their sum is one.
            sigmoid: score each expert by itself; else scores are a softmax over the experts.
            scale: factor of the chosen experts' weights.
            groups: consecutive experts are divided into so many groups of one size; tokens go to experts of some.
            topk_groups: the number of groups of a token: those whose two largest scores have the largest sum
                (arXiv:2412.19437, section 2.1.2).
            has_bias: whether a bias is added where experts are chosen.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.experts, self.top_k, self.norm_topk_prob = experts, top_k, norm_topk_prob
        self.sigmoid, self.scale = sigmoid, scale
        self.groups, self.topk_groups = groups, topk_groups
        self.get_weight: GetWeight = cast_weight
        self.register_buffer("load", torch.empty(experts), persistent=False)
        self.register_buffer("bias", torch.empty(experts) if has_bias else None)

    def init_buffers(self, device: torch.device | str) -> None:
        """Set the state before the first step: even load, no bias."""
        self.load = torch.full((self.experts,), 1 / self.experts, device=device)
        self.bias = None if self.bias is None else torch.zeros(self.experts, device=device)

    def forward(self, x: Tensor) -> Route:
        """Route tokens [..., D]."""
        logits = F.linear(x.float(), self.get_weight(self.weight, x.dtype).float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        experts = select_top_k(self._compute_choice_scores(scores.detach()), self.top_k)
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return Route(experts, weights * self.scale, scores, logits)

    def _compute_choice_scores(self, scores: Tensor) -> Tensor:
        """Return what experts are chosen by: scores with the bias, minus infinity in groups that are not chosen."""
        scores = scores if self.bias is None else scores + self.bias
        if self.groups == 1:
            return scores
        grouped = scores.view(*scores.shape[:-1], self.groups, -1)
        group_scores = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
            -1, select_top_k(group_scores, self.topk_groups), True
        )
        return grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)


class ExpertLinear(nn.Module):
    """A linear layer of each expert, with weights [E, out, in], computed in the input's type; no biases."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.get_weight: GetWeight = cast_weight
        self.product: GroupedProduct = multiply_grouped

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Map rows [N, in], sorted by expert, to [N, out]; see `titan.model.grouped`."""
        return self.product(x, self.get_weight(self.weight, x.dtype), offsets)


class Experts(nn.Module):
    """SwiGLU networks, one for each expert."""

    def __init__(self, experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = ExpertLinear(experts, dim, width)
        self.w2 = ExpertLinear(experts, width, dim)
        self.w3 = ExpertLinear(experts, dim, width)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Map rows [N, D], sorted by expert, to [N, D]."""
        out: Tensor = self.w2(F.silu(self.w1(x, offsets)) * self.w3(x, offsets), offsets)
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
    return permute_rows(
        compute(expand_tokens(x, order), compute_offsets(experts.flatten(), count)), invert_permutation(order)
    )


def compute_offsets(experts: Tensor, count: int) -> Tensor:
    """Return the ends of the experts' rows once they are sorted, int32 [count]."""
    return balance.count_experts(experts, count).cumsum(0).to(torch.int32)


def invert_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [N]."""
    positions = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Return rows [N, D] with zeros behind them, `rows` in all; without a copy where there are as many already."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


class _ExpandTokens(torch.autograd.Function):
    """Gradients are added token by token in one order; those of indexing are added wherever they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = order.shape[0] // x.shape[0]
        return x[order[:rows] // ctx.copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,), (grad,) = ctx.saved_tensors, grads
        row_grads = pad_rows(grad, order.shape[0])[invert_permutation(order)]
        return row_grads.view(-1, ctx.copies, grad.shape[1]).sum(1), None, None


def expand_tokens(x: Tensor, order: Tensor, rows: int | None = None) -> Tensor:
    """Return a copy of its token for each choice, in some order.

    Args:
        x: tokens [N, D].
        order: the choices, token by token, as a permutation [N * K].
        rows: how many of them; None: all.
    """
    out: Tensor = _ExpandTokens.apply(x, order, order.shape[0] if rows is None else rows)  # type: ignore[no-untyped-call]
    return out


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][invert_permutation(ctx.saved_tensors[0])], None


def permute_rows(x: Tensor, order: Tensor) -> Tensor:
    """Return rows [N, D] in the order of a permutation [N]."""
    out: Tensor = _PermuteRows.apply(x, order)  # type: ignore[no-untyped-call]
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
        kept_experts = self.balance.apply_capacity(route.experts)
        out = self._compute_experts(
            x.flatten(0, -2), kept_experts.flatten(0, -2), route.weights.flatten(0, -2)
        ).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        if valid is None:
            return out, {}, None
        values = self.balance.compute_losses(route.experts, route.scores, route.logits, self.router.load, valid)
        return out, values, balance.count_choices(route.experts, kept_experts, self.router.experts, valid)

    def _compute_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the outputs of the experts int64 [N, K] of tokens [N, D] with weights float32 [N, K]."""
        shape = *weights.shape, x.shape[-1]
        if self.scale_inputs:
            x, experts = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1), experts.reshape(-1, 1)
        expert_outputs = self.dispatch(x, experts, self.router.experts, self.experts).view(shape)
        if self.scale_inputs:
            return expert_outputs.float().sum(-2).to(x.dtype)
        out: Tensor = _WeightedSum.apply(expert_outputs, weights)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class _WeightedSum(torch.autograd.Function):
    """Sums [N, K, D] times weights float32 [N, K] in float32, and saves them as they are, not in float32."""

    @staticmethod
    def forward(ctx: Any, expert_outputs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(expert_outputs, weights)
        return (expert_outputs.float() * weights[..., None]).sum(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        expert_outputs, weights = ctx.saved_tensors
        grad = grads[0][:, None]
        weights_grad = (grad * expert_outputs.float()).sum(-1)  # first, while its float32 copies are the only ones
        return (grad * weights[..., None]).to(expert_outputs.dtype), weights_grad


class MoeBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    routes = True
    """A block that takes which tokens count, and returns values of losses and counts for them."""

    def __init__(self, config: Any, norm_heads: bool = False) -> None:
        """Create the modules of a schema with experts, such as `titan.model.schema_moe.Qwen3Moe`."""
        c = config
        super().__init__(c.dim, c.heads, c.kv_heads, c.head_size, 1, c.norm_eps, norm_heads)
        router = Router(c.dim, c.experts, c.top_k, **c.build_router_options())
        options = {"shared": c.shared_ffn, "scale_inputs": c.scale_inputs}
        self.feed_forward = MixtureOfExperts(c.dim, c.expert_ffn, router, **options)
        self.feed_forward.balance = balance.Balance(c.experts, tuple(c.balance_losses()), c.capacity)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None, valid: Tensor | None = None) -> Any:
        """See `titan.model.layers.Block.forward`; with `valid` also `MixtureOfExperts.forward`."""
        x, normed = self.attend(x, cos, sin, mask)
        out, values, counts = self.feed_forward(normed, valid)
        return x + out if counts is None else (x + out, values, counts)
