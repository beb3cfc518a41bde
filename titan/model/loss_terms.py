"""The loss from hidden states: cross-entropy in chunks, loss terms, and soft-capped logits.

With a large vocabulary the logits of a batch need more memory than any other tensor. They are needed only once: the
gradient of the loss follows from them directly, and from it the gradients of hidden states and weight, up to the
upstream gradient factor. So the forward pass may compute those gradients too and free the logits of each chunk (Liger
Kernel, arXiv:2410.10989, section 3.2; Cut Cross-Entropy, arXiv:2411.09009, avoids whole logits too). For the compiler
all chunks are one operation, torch.ops.titan.chunked_loss: a traced graph could save logits that are freed here, or
recompute them, and would grow with the number of chunks.

A term maps what the loss knows of N tokens (`LossInputs`) to a value for each. Values that depend on statistics of the
logits only (`logsumexp`, `target_logit`, `mean_logit`) need no memory beyond cross-entropy's: their gradient is
a softmax, a one-hot vector and a constant, which one backward pass computes from the logits. Autograd differentiates
the rest. One objective serves whole, split and chunked logits.

Shapes: N tokens, D hidden width, V vocabulary entries of the rank's weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.errors import RunError
from titan.model.custom_op import register_operation
from titan.model.layers import IGNORED, Head, soft_cap

Results = tuple[Tensor, Tensor, Tensor]
"""The summed loss in nats (fp32 scalar) and the gradients of hidden states and weight, each in its tensor's type; a
gradient that was not requested is empty."""
Measure = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Returns the loss of hidden states, their logits and targets, overwriting the logits by the gradient if requested; and
the gradient of the hidden states that does not come from the logits, if there is one."""


class Vocabulary:
    """What the `ranks` with equal parts of the vocabulary exchange; here one rank, number `rank`, has all of it."""

    ranks, rank = 1, 0

    def reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of the ranks' values, without a gradient."""
        return x

    def reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' values, from which all ranks compute the same."""
        return x

    def gather_logits(self, x: Tensor) -> Tensor:
        """Return the ranks' parts [N, V] concatenated, from which all ranks compute the same."""
        return x

    def share_gradient(self, x: Tensor) -> Tensor:
        """Return a replicated tensor whose gradients are summed over ranks, of which each then has its share."""
        return x


WHOLE = Vocabulary()
"""That of one rank."""


def measure_logits(
    hidden: Tensor, logits: Tensor, targets: Tensor, needs_grad: bool, vocabulary: Vocabulary = WHOLE
) -> tuple[Tensor, None]:
    """Return the summed cross-entropy in nats, overwriting the logits, as a `Measure`.

    Args:
        hidden: not needed.
        logits: float32 [N, V]; overwritten, with `needs_grad` by the gradient of the loss: softmax minus one-hot
            targets.
        targets: int64 [N], -100 where ignored.
        needs_grad: whether the gradient is needed.
        vocabulary: the rank's part.
    """
    index, valid = targets - vocabulary.rank * logits.shape[-1], targets != IGNORED
    is_local = (index >= 0) & (index < logits.shape[-1])
    index = index.where(is_local, 0)[:, None]
    logits.sub_(vocabulary.reduce_max(logits.amax(-1))[:, None])
    target_logits = logits.gather(-1, index)[:, 0].where(is_local, 0)
    sums, target_logits = vocabulary.reduce_sum(torch.stack([logits.exp_().sum(-1), target_logits])).unbind()
    if needs_grad:
        logits.mul_((valid / sums)[:, None])
        logits.scatter_add_(-1, index, -(is_local & valid).to(logits.dtype)[:, None])
    return (sums.log() - target_logits).where(valid, 0).sum(), None


def compute_loss_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    needs_grads: tuple[bool, bool],
    measure: Measure = measure_logits,
) -> Results:
    """Return the loss and the requested gradients, computing the logits of `chunk` tokens at a time."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden) if needs_grads[0] else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grads[1] else None
    for start in range(0, len(hidden), chunk):
        tokens = slice(start, start + chunk)
        chunk_grad = None if hidden_grad is None else hidden_grad[tokens]
        loss = loss + _compute_chunk_loss(hidden[tokens], weight, targets[tokens], measure, chunk_grad, weight_grad)
    empty = hidden.new_empty(0), weight.new_empty(0)
    return (
        loss,
        empty[0] if hidden_grad is None else hidden_grad,
        empty[1] if weight_grad is None else weight_grad.to(weight.dtype),
    )


def _compute_chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    measure: Measure,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> Tensor:
    """Return the loss of one chunk; write its gradient to `hidden_grad` and add its gradient to `weight_grad`."""
    logits = F.linear(hidden, weight).float()
    loss, direct = measure(hidden, logits, targets, hidden_grad is not None or weight_grad is not None)
    logits = logits.to(hidden.dtype)  # as autograd rounds the gradient in the backward of `float`
    if hidden_grad is not None:
        torch.mm(logits, weight, out=hidden_grad)
        if direct is not None:
            hidden_grad += direct
    if weight_grad is not None and hidden.dtype == weight_grad.dtype:
        weight_grad.addmm_(logits.T, hidden)
    elif weight_grad is not None:
        weight_grad += logits.T @ hidden
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of an objective, with gradients computed in forward; backward does not modify them, so it may run
    twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, key: int, terms: int, needs_grad: bool
    ) -> Tensor:
        needs_grads = needs_grad and ctx.needs_input_grad[0], needs_grad and ctx.needs_input_grad[1]
        arguments = hidden.flatten(0, -2), weight, targets.flatten(), *needs_grads
        loss, hidden_grad, weight_grad = torch.ops.titan.chunked_loss(*arguments, key, terms)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.shape = hidden.shape
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden_grad, weight_grad), needs_grads = ctx.saved_tensors, ctx.needs_input_grad
        upstream = grads[0].flatten()[0]  # with loss terms the first element has the gradient of all
        hidden_upstream = (hidden_grad * upstream).view(ctx.shape) if needs_grads[0] else None
        return hidden_upstream, weight_grad * upstream if needs_grads[1] else None, None, None, None, None


# --- terms


class _Sums(torch.autograd.Function):
    """Sums over this rank's part of the vocabulary: of exp(logits - largest), the target's logit, all logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, largest: Tensor, index: Tensor, is_local: Tensor) -> Tensor:
        ctx.save_for_backward(logits, largest, index, is_local)
        exponentials = (logits - largest[:, None]).exp_().sum(-1)
        return torch.stack([exponentials, logits.gather(-1, index)[:, 0].where(is_local, 0), logits.sum(-1)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits, largest, index, is_local) = ctx.saved_tensors
        (exponential_grad, target_grad, sum_grad) = grads[0].unbind()
        target_grad = target_grad.where(is_local, 0)[:, None]
        out = (logits - largest[:, None]).exp_().mul_(exponential_grad[:, None])
        if torch.compiler.is_compiling():  # it fuses no scatter, and would keep logits in float32
            out = out + target_grad.where(torch.arange(logits.shape[-1], device=logits.device) == index, 0)
        else:
            out.scatter_add_(-1, index, target_grad)
        return out.add_(sum_grad[:, None]), None, None, None


class LossInputs:
    """What a loss term sees of N tokens; where it is computed from it, gradients follow.

    Attributes:
        hidden: hidden states after the final norm, [N, D] in the compute type.
        targets: int64 [N]; -100 where a token does not count, whose value is ignored.
        logsumexp: of each token's logits, float32 [N].
        target_logit: of each token, float32 [N].
        mean_logit: of each token's logits, float32 [N].
    """

    def __init__(self, hidden: Tensor, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> None:
        """Take the rank's part of the logits, float32 [N, V], as they count in the loss."""
        self.hidden, self.targets = vocabulary.share_gradient(hidden), targets
        self._local_logits, self._vocabulary, width = logits, vocabulary, logits.shape[-1]
        index = targets - vocabulary.rank * width
        is_local = (index >= 0) & (index < width)
        largest = vocabulary.reduce_max(logits.detach().amax(-1))
        sums: Tensor = _Sums.apply(logits, largest, index.where(is_local, 0)[:, None], is_local)  # type: ignore[no-untyped-call]
        exponentials, self.target_logit, logit_sum = vocabulary.reduce_sum(sums).unbind()
        self.logsumexp = exponentials.log() + largest
        self.mean_logit = logit_sum / (width * vocabulary.ranks)

    @property
    def logits(self) -> Tensor:
        """All logits, float32 [N, vocab]: needs as much memory again, and tensor ranks gather them."""
        return self._vocabulary.gather_logits(self._local_logits)


Values = Callable[[LossInputs], Tensor]
"""Returns the value of each token, float32 [N]."""


def z_loss(tokens: LossInputs) -> Tensor:
    """Return the squared logsumexp, which keeps logits from drifting (arXiv:2204.02311, 2202.08906)."""
    return tokens.logsumexp.square()


def label_smoothing(tokens: LossInputs) -> Tensor:
    """Return the cross-entropy to equally likely targets less that to the target (arXiv:1512.00567)."""
    return tokens.target_logit - tokens.mean_logit


class Term(NamedTuple):
    """A term: its name, its factor in what is minimised, and its values."""

    name: str
    coefficient: float
    values: Values


_OBJECTIVES: WeakValueDictionary[int, Objective] = WeakValueDictionary()
_KEYS = itertools.count()


@dataclass(frozen=True)
class Objective:
    """The loss from hidden states: cross-entropy and terms, in place of `titan.model.layers.Head`'s.

    Called where gradients are computed, it returns the summed cross-entropy and the sum of each term's values,
    float32 [1 + terms]. The gradient of the first element is that of the objective: cross-entropy and the terms times
    their coefficients. The others have none. Without terms, or without gradients, it returns the cross-entropy alone, a
    scalar.

    Attributes:
        terms: the terms.
        cap: of the logits; None: they are not capped.
        chunk: tokens whose logits exist at a time; None: all.
        vocabulary: this rank's part.
        key: names the objective for the operation torch.ops.titan.chunked_loss.
    """

    terms: tuple[Term, ...] = ()
    cap: float | None = None
    chunk: int | None = None
    vocabulary: Vocabulary = WHOLE
    key: int = field(init=False, default_factory=_KEYS.__next__)

    def __post_init__(self) -> None:
        """Make the objective known under its key."""
        _OBJECTIVES[self.key] = self

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the loss of hidden states [..., D] and targets [...] with the head's weight [V, D] and matmul."""
        terms = self.terms if torch.is_grad_enabled() else ()
        if self.chunk is not None:
            options = self.key, len(self.terms), torch.is_grad_enabled()  # grad mode is off inside forward
            figures: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, *options)  # type: ignore[no-untyped-call]
            return figures if terms else figures[0].clone()  # FSDP's hook on the head's output may be no view's
        logits = product(hidden, weight).float().flatten(0, -2)
        figures = self.compute_figures(hidden.flatten(0, -2), logits, targets.flatten(), terms)
        if not terms:
            return figures[0].clone()
        return join_with_gradient(
            figures[:1], figures[1:], weigh_figures(figures[1:], [term.coefficient for term in terms])
        )

    def compute_figures(self, hidden: Tensor, logits: Tensor, targets: Tensor, terms: Sequence[Term]) -> Tensor:
        """Return the summed cross-entropy and terms, float32 [1 + terms], each with its gradient."""
        tokens = LossInputs(
            hidden, logits if self.cap is None else soft_cap(logits, self.cap), targets, self.vocabulary
        )
        values = [tokens.logsumexp - tokens.target_logit]
        for term in terms:
            values.append(term.values(tokens))
            if values[-1].shape != targets.shape:
                raise RunError(
                    f"training.loss_terms.{term.name}: returned the shape {list(values[-1].shape)} for "
                    f"{len(targets)} tokens; return one value for each token."
                )
        return torch.stack(values).where(targets != IGNORED, 0).sum(-1)

    def measure_chunk(
        self, hidden: Tensor, logits: Tensor, targets: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the figures of a chunk, and the gradient of its hidden states beside the logits'; see `Measure`."""
        if not self.terms and self.cap is None:
            return measure_logits(hidden, logits, targets, needs_grad, self.vocabulary)
        if not needs_grad:
            return self.compute_figures(hidden, logits, targets, ()), None
        with _enable_autograd(), torch.enable_grad():
            inputs = logits.detach().requires_grad_(), hidden.detach().requires_grad_()
            figures = self.compute_figures(inputs[1], inputs[0], targets, self.terms)
            total = figures[0] + weigh_figures(figures[1:], [term.coefficient for term in self.terms])
            logits_grad, hidden_grad = torch.autograd.grad(total, inputs, allow_unused=True)
        logits.copy_(logits_grad)
        return figures.detach(), hidden_grad


def weigh_figures(figures: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the sum of figures [K] times their coefficients, a scalar."""
    return sum((figures[i] * c for i, c in enumerate(coefficients)), figures.new_zeros(()))


def join_with_gradient(first: Tensor, rest: Tensor, extra: Tensor) -> Tensor:
    """Return `first` [K] and `rest` as one vector, with the gradients of `first` and, once, of the scalar `extra`."""
    return torch.cat([first[:1] + (extra - extra.detach()), first[1:], rest.detach()])


def set_head_loss(
    head: Head | None, terms: Sequence[Term] = (), chunk: int | None = None, cap: float | None = None
) -> None:
    """Set how a head, on the stage that has it, computes its loss; without terms, chunk and cap nothing changes.

    A head of another class computes another loss (`titan.run.model_limits` rejects these settings).
    """
    if not isinstance(head, Head):
        return
    if terms or cap is not None or chunk is not None:
        head.fused = Objective(tuple(terms), cap, chunk)


def _enable_autograd() -> AbstractContextManager[None]:
    """Enable autograd inside of an operation, whose compiled callers have disabled its dispatch."""
    core: Any = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(core.DispatchKey, name))
    return core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded)  # type: ignore[no-any-return]


_AUTOGRAD_KEYS = [
    name
    for name in ("AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "ADInplaceOrView")
    if hasattr(torch._C.DispatchKey, name)
]


def _run_chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    needs_hidden_grad: bool,
    needs_weight_grad: bool,
    key: int,
    terms: int,
) -> tuple[Tensor, Tensor, Tensor]:
    objective, needs_grads = _OBJECTIVES[key], (needs_hidden_grad, needs_weight_grad)
    chunk = objective.chunk or len(hidden)
    measure = objective.measure_chunk
    loss, hidden_grad, weight_grad = compute_loss_in_chunks(hidden, weight, targets, chunk, needs_grads, measure)
    return loss.view(-1), hidden_grad, weight_grad


def _make_fake_results(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    needs_hidden_grad: bool,
    needs_weight_grad: bool,
    key: int,
    terms: int,
) -> Results:
    """Return empty results of the operation: its fake implementation."""
    count = 1 + (terms if needs_hidden_grad or needs_weight_grad else 0)
    return (
        hidden.new_empty(count, dtype=torch.float32),
        hidden.new_empty(hidden.shape if needs_hidden_grad else 0),
        weight.new_empty(weight.shape if needs_weight_grad else 0),
    )


register_operation("titan::chunked_loss", _run_chunked_loss, _make_fake_results)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, extra: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(extra)
        return hidden.clone()  # no view: a pipeline's stage detaches its output in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.full_like(ctx.saved_tensors[0], ctx.scale), None


def attach_loss(hidden: Tensor, extra: Tensor, scale: float) -> Tensor:
    """Return hidden states whose backward pass gives the scalar `extra` the gradient `scale`."""
    return _AttachLoss.apply(hidden, extra, scale)  # type: ignore[no-untyped-call, no-any-return]


def sum_values(values: Mapping[str, Tensor], names: Sequence[str], hidden: Tensor) -> Tensor:
    """Return a block's values [B, t], one for each token of `hidden` [B, t, D], as float32 [terms, B, t].

    They have the order of `names`, those of the model's terms; zero where the block returned none.
    """
    if unknown := set(values) - set(names):
        raise RunError(f"a block returned the loss term {min(unknown)}, which the model's losses lack; add it there.")
    for name, value in values.items():
        if value.shape != hidden.shape[:2]:
            raise RunError(
                f"the loss term {name} has the shape {list(value.shape)} for tokens {list(hidden.shape[:2])}; "
                "return one value for each token."
            )
    zeros = hidden.new_zeros(1, *hidden.shape[:2], dtype=torch.float32)
    return torch.cat([zeros[:0], *(values[name].float()[None] if name in values else zeros for name in names)])
