"""Mixture of experts: a router sends each token to some of many feed-forward networks, and adds up their outputs.

Ties between experts are broken by their number, on every device, so that the choice depends on its token only.

Shapes: B rows, T tokens of a row, N tokens, D hidden width, E experts, K experts of a token, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.model import balance
from titan.model.expert_ops import (
    GroupedProduct,
    expand_tokens,
    multiply_grouped,
    multiply_in_float32,
    select_weights,
    sort_choices,
    sum_rows,
)
from titan.model.layers import Block, FeedForward, GetWeight, cast_weight
from titan.model.steps import Exchange, Steps, run_steps

TINY = 1e-20
"""Added to a sum of scores by which they are divided: sigmoids may all be zero."""


class Route(NamedTuple):
    """Where tokens go: their experts, int64 [..., K], the largest score first, the weights of these experts' outputs,
    float32 [..., K], and scores and logits of all experts, float32 [..., E]."""

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
        logits = multiply_in_float32(x, self.get_weight(self.weight, x.dtype))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        experts = self.choose_experts(scores.detach())
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return Route(experts, weights * self.scale, scores, logits)

    def choose_experts(self, scores: Tensor) -> Tensor:
        """Return the experts [..., K] of tokens with scores [..., E]; a replay may have another choice here."""
        return select_top_k(self._compute_choice_scores(scores), self.top_k)

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

    def forward(self, x: Tensor, offsets: Tensor, exact: bool = False) -> Tensor:
        """Map rows [N, in], sorted by expert, to [N, out]; see `titan.model.expert_ops`."""
        return self.product(x, self.get_weight(self.weight, x.dtype), offsets, exact)


class Experts(nn.Module):
    """SwiGLU networks, one for each expert."""

    def __init__(self, experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = ExpertLinear(experts, dim, width)
        self.w2 = ExpertLinear(experts, width, dim)
        self.w3 = ExpertLinear(experts, dim, width)

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor | None = None, exact: bool = False) -> Tensor:
        """Map rows [N, D], sorted by expert, to [N, D]; each result times its row's weight, float32 [N]; None: one."""
        return self.complete(self.w1(x, offsets, exact), self.w3(x, offsets, exact), weights, offsets, exact)

    def complete(self, a: Tensor, b: Tensor, weights: Tensor | None, offsets: Tensor, exact: bool) -> Tensor:
        """Return w2 of the gated product; a method for itself, so that it can be recomputed (`memory=gate`)."""
        return self.w2(gate_rows(a, b, weights), offsets, exact)  # type: ignore[no-any-return]


class _GateRows(torch.autograd.Function):
    """Saves its arguments only, as compiled code does; each result is computed in place of the one before."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b, weights)
        return _scale_rows(F.silu(a).mul_(b), weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b, weights), (grad,) = ctx.saved_tensors, grads
        b_grad = F.silu(a).mul_(grad)
        weights_grad = None if weights is None else (b_grad * b).sum(-1, dtype=torch.float32)
        a_grad = torch.ops.aten.silu_backward(_scale_rows(grad * b, weights), a)
        return a_grad, _scale_rows(b_grad, weights), weights_grad


def _scale_rows(x: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply rows [N, F] with weights float32 [N] in place; None: they are one."""
    return x if weights is None else x.mul_(weights[:, None])


def gate_rows(a: Tensor, b: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(a) * b of [N, F], times a weight of each row, float32 [N]; None: one.

    A weight of the input of the last matmul weighs its output, and is cheaper: it is narrower, and nothing but the
    output's sum is left to be computed, which needs no tensor in the backward pass.
    """
    return _GateRows.apply(a, b, weights)  # type: ignore[no-untyped-call, no-any-return]


class Compute(Protocol):
    """The experts of a rank, as a dispatcher calls them."""

    def __call__(self, x: Tensor, weights: Tensor | None, offsets: Tensor, exact: bool = False) -> Tensor:
        """Return the experts' weighted results.

        Args:
            x: rows [R, D], sorted by expert.
            weights: of the results, float32 [R]; None: one.
            offsets: the ends of the experts' rows, int32 [experts].
            exact: whether the last expert's end is R in any case; else rows behind it are padding.

        Returns:
            [R, D], zero where a row is padding.
        """


Dispatcher = Callable[[Tensor, Tensor, Tensor | None, int, Compute], Tensor]
"""Brings tokens to their experts, and the sums of their results back: see `dispatch`, which does it on one rank.
Another exchange between ranks than titan's plugs in here."""


class SteppedDispatcher(Protocol):
    """A dispatcher that lets others compute while tokens travel."""

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute) -> Tensor:
        """See `dispatch`."""

    def iterate(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute
    ) -> Steps[Tensor]:
        """As `dispatch`, in steps: yields when the exchange of tokens, and of results, has started."""


def dispatch(
    x: Tensor, experts: Tensor, weights: Tensor | None, count: int, compute: Compute, rows: int | None = None
) -> Tensor:
    """Compute tokens by their experts, all on this rank.

    Args:
        x: tokens [N, D].
        experts: those of each token, int64 [N, K]; `count` where none computes it.
        weights: of the experts' results, float32 [N, K]; None: one.
        count: of experts.
        rows: how many choices have an expert; None: the host does not know, or all have.

    Returns:
        The sums of their weighted results [N, D], added in float32 in the order of K.
    """
    order = sort_choices(experts, rows)
    offsets = balance.count_experts(experts.flatten(), count).cumsum(0).to(torch.int32)  # the ends of experts' rows
    row_weights = None if weights is None else select_weights(weights, order)
    results = compute(expand_tokens(x, order), row_weights, offsets, exact=rows is not None)
    return sum_rows(results, order)


ExpertsOutput = tuple[Tensor, dict[str, Tensor], Tensor | None]
"""What a mixture of experts returns; see `MixtureOfExperts.forward`."""


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of experts (arXiv:1701.06538), and shared ones that compute every token (arXiv:2401.06066).

    The weighted outputs of a token's experts are added in float32 in the order of their scores, so that the sum does
    not depend on which other tokens there are.
    """

    def __init__(
        self, dim: int, width: int, router: Router, *, shared: int | None = None, scale_inputs: bool = False
    ) -> None:
        """Create the experts.

        Args:
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

    def forward(self, x: Tensor, valid: Tensor | None = None) -> ExpertsOutput:
        """Map tokens [B, T, D] to [B, T, D]; return with it the values of the balancing losses and the counts.

        These are of the tokens that count in the loss, bool [B, T]; None: none. See `titan.model.balance`.
        """
        if hasattr(self.dispatch, "iterate"):
            return self._run_steps(x, valid)  # type: ignore[no-any-return]
        route, kept_experts, inputs = self._route_inputs(x)
        out = self._sum_outputs(self.dispatch(*inputs, self._compute_rows), x)
        return self._complete(out if self.shared is None else out + self.shared(x), route, kept_experts, valid)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_steps(self, x: Tensor, valid: Tensor | None) -> ExpertsOutput:
        """Compute as `forward`, outside of graphs."""
        return run_steps(self.iterate(x, valid))

    def iterate(self, x: Tensor, valid: Tensor | None = None, beside: Exchange = "dispatch") -> Steps[ExpertsOutput]:
        """As `forward`, in steps; shared experts compute beside an exchange."""
        route, kept_experts, inputs = self._route_inputs(x)
        out, shared = yield from self._iterate_exchanges(inputs, x, beside)
        out = self._sum_outputs(out, x)
        return self._complete(out if shared is None else out + shared, route, kept_experts, valid)

    def _iterate_exchanges(
        self, inputs: tuple[Any, ...], x: Tensor, beside: Exchange
    ) -> Steps[tuple[Tensor, Tensor | None]]:
        """Dispatch inputs; return the sums, and of x what shared experts compute beside an exchange."""
        dispatch: Any = self.dispatch
        if not hasattr(dispatch, "iterate"):
            return dispatch(*inputs, self._compute_rows), None if self.shared is None else self.shared(x)
        steps: Steps[Tensor] = dispatch.iterate(*inputs, self._compute_rows)
        shared = None
        while True:
            try:
                started = next(steps)
            except StopIteration as end:
                return end.value, shared
            yield started
            if started == beside and self.shared is not None:
                shared = self.shared(x)

    def _route_inputs(self, x: Tensor) -> tuple[Route, Tensor, tuple[Tensor, Tensor, Tensor | None, int]]:
        """Return where tokens [B, T, D] go, their experts without those that a capacity drops, and what is dispatched.

        Where weights scale the inputs, each expert's input is a token by itself.
        """
        route, count = self.router(x), self.router.experts
        kept_experts = self.balance.apply_capacity(route.experts)
        x, experts, weights = (tensor.flatten(0, -2) for tensor in (x, kept_experts, route.weights))
        if not self.scale_inputs:
            return route, kept_experts, (x, experts, weights, count)
        x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        return route, kept_experts, (x, experts.reshape(-1, 1), None, count)

    def _sum_outputs(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the experts' results for tokens [B, T, D], of what was dispatched."""
        return out.view(*x.shape[:-1], -1, x.shape[-1]).sum(-2) if self.scale_inputs else out.view_as(x)

    def _complete(self, out: Tensor, route: Route, kept_experts: Tensor, valid: Tensor | None) -> ExpertsOutput:
        """Return the results with the values of the balancing losses and the counts."""
        if valid is None:
            return out, {}, None
        values = self.balance.compute_losses(route.experts, route.scores, route.logits, self.router.load, valid)
        return out, values, balance.count_choices(route.experts, kept_experts, self.router.experts, valid)

    def _compute_rows(self, x: Tensor, weights: Tensor | None, offsets: Tensor, exact: bool = False) -> Tensor:
        """Return the results of the experts on this rank; see `Compute`.

        Of titan's router only a capacity drops choices; another class may drop some by itself.
        """
        drops = self.balance.capacity is not None or type(self.router) is not Router
        return self.experts(x, offsets, weights, exact or not drops)  # type: ignore[no-any-return]


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
        return _add_output(x, self.feed_forward(normed, valid))

    def iterate(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, valid: Tensor | None = None) -> Steps[Any]:
        """As `forward`, in steps; the shared experts compute beside the exchange of results.

        So the last of several blocks' exchanges, beside which no other experts compute, has something beside it.
        """
        x, normed = self.attend(x, cos, sin, mask)
        feed_forward: Any = self.feed_forward
        return _add_output(x, (yield from feed_forward.iterate(normed, valid, "combine")))


def _add_output(x: Tensor, output: ExpertsOutput) -> Any:
    """Add what experts return to the residual stream [B, T, D]; see `MoeBlock.forward`."""
    out, values, counts = output
    return x + out if counts is None else (x + out, values, counts)
