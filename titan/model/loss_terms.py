"""Loss terms next to cross-entropy, and soft-capped logits: one objective for whole, split and chunked logits.

A term maps what the loss knows of N tokens (`Tokens`) to a value for each. Values that depend on statistics of the
logits only (`logsumexp`, `target_logit`, `mean_logit`) need no memory beyond cross-entropy's: their gradient is
a softmax, a one-hot vector and a constant, which one backward pass computes from the logits. Autograd differentiates
the rest.

Shapes: N tokens, D hidden width, V vocabulary entries of the rank's weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from titan.errors import RunError
from titan.model import loss
from titan.model.custom_op import register
from titan.model.layers import IGNORED, Head, soft_cap
from titan.model.loss import Results, chunked_loss, linear_cross_entropy, shapes


class Vocabulary:
    """What ranks with parts of the vocabulary exchange; here one rank has all of it.

    Attributes:
        ranks: the number of parts, all of one size.
        rank: the index of this rank's part.
    """

    ranks, rank = 1, 0

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest of the ranks' values, without a gradient."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' values, from which all ranks compute the same."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """Return the ranks' parts [N, V] concatenated, from which all ranks compute the same."""
        return x

    def shared(self, x: Tensor) -> Tensor:
        """Return a replicated tensor whose gradients are summed over ranks, of which each then has its share."""
        return x


class _Sums(torch.autograd.Function):
    """Sums over this rank's part of the vocabulary: of exp(logits - largest), the target's logit, all logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, largest: Tensor, index: Tensor, here: Tensor) -> Tensor:
        ctx.save_for_backward(logits, largest, index, here)
        exponentials = (logits - largest[:, None]).exp_().sum(-1)
        return torch.stack([exponentials, logits.gather(-1, index)[:, 0].where(here, 0), logits.sum(-1)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits, largest, index, here), (exponentials, target, every) = ctx.saved_tensors, grads[0].unbind()
        out = (logits - largest[:, None]).exp_().mul_(exponentials[:, None])
        out.scatter_add_(-1, index, target.where(here, 0)[:, None])
        return out.add_(every[:, None]), None, None, None


class Tokens:
    """What a loss term sees of N tokens; where it is computed from it, gradients follow.

    Attributes:
        hidden: hidden states after the final norm, [N, D] in the compute type.
        targets: int64 [N]; -100 where a token does not count, whose value is ignored.
        logsumexp, target_logit, mean_logit: of each token's logits, float32 [N].
    """

    def __init__(self, hidden: Tensor, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> None:
        """Take the rank's part of the logits, float32 [N, V], as they count in the loss."""
        self.hidden, self.targets = vocabulary.shared(hidden), targets
        self._part, self._vocabulary, width = logits, vocabulary, logits.shape[-1]
        index = targets - vocabulary.rank * width
        here = (index >= 0) & (index < width)
        largest = vocabulary.largest(logits.detach().amax(-1))
        sums: Tensor = _Sums.apply(logits, largest, index.where(here, 0)[:, None], here)  # type: ignore[no-untyped-call]
        exponentials, self.target_logit, every = vocabulary.total(sums).unbind()
        self.logsumexp = exponentials.log() + largest
        self.mean_logit = every / (width * vocabulary.ranks)

    @property
    def logits(self) -> Tensor:
        """All logits, float32 [N, vocab]: needs as much memory again, and tensor ranks gather them."""
        return self._vocabulary.whole(self._part)


Values = Callable[[Tokens], Tensor]
"""Returns the value of each token, float32 [N]."""


def z_loss(tokens: Tokens) -> Tensor:
    """Return the squared logsumexp, which keeps logits from drifting (arXiv:2204.02311, 2202.08906)."""
    return tokens.logsumexp.square()


def label_smoothing(tokens: Tokens) -> Tensor:
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
        key: names the objective for the operation torch.ops.titan.chunked_objective.
    """

    terms: tuple[Term, ...] = ()
    cap: float | None = None
    chunk: int | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
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
            figures = linear_cross_entropy(hidden, weight, targets, self._operation)
            return figures if terms else figures[0]
        logits = product(hidden, weight).float().flatten(0, -2)
        figures = self.figures(hidden.flatten(0, -2), logits, targets.flatten(), terms)
        return carry(figures[:1], figures[1:], self.weigh(figures[1:], terms)) if terms else figures[0]

    def figures(self, hidden: Tensor, logits: Tensor, targets: Tensor, terms: Sequence[Term]) -> Tensor:
        """Return the summed cross-entropy and terms, float32 [1 + terms], each with its gradient."""
        tokens = Tokens(hidden, logits if self.cap is None else soft_cap(logits, self.cap), targets, self.vocabulary)
        values = [tokens.logsumexp - tokens.target_logit]
        for term in terms:
            values.append(term.values(tokens))
            if values[-1].shape != targets.shape:
                raise RunError(
                    f"training.loss_terms.{term.name}: returned the shape {list(values[-1].shape)} for "
                    f"{len(targets)} tokens; return one value for each token."
                )
        return torch.stack(values).where(targets != IGNORED, 0).sum(-1)

    def weigh(self, figures: Tensor, terms: Sequence[Term]) -> Tensor:
        """Return the sum of the terms' figures times their coefficients."""
        return weigh(figures, [term.coefficient for term in terms])

    def _operation(self, *args: Any) -> Results:
        results: Results = torch.ops.titan.chunked_objective(*args, self.key, len(self.terms))
        return results

    def measure(self, hidden: Tensor, logits: Tensor, targets: Tensor, graded: bool) -> tuple[Tensor, Tensor | None]:
        """Return the figures of a chunk and the gradient of its hidden states beside the logits'; see `Measure`."""
        if not graded:
            return self.figures(hidden, logits, targets, ()), None
        with _autograd(), torch.enable_grad():
            inputs = logits.detach().requires_grad_(), hidden.detach().requires_grad_()
            figures = self.figures(inputs[1], inputs[0], targets, self.terms)
            total = figures[0] + self.weigh(figures[1:], self.terms)
            into_logits, into_hidden = torch.autograd.grad(total, inputs, allow_unused=True)
        logits.copy_(into_logits)
        return figures.detach(), into_hidden


def weigh(figures: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the sum of figures [K] times their coefficients, a scalar."""
    return sum((figures[i] * c for i, c in enumerate(coefficients)), figures.new_zeros(()))


def carry(first: Tensor, others: Tensor, extra: Tensor) -> Tensor:
    """Return `first` [K] and `others` as one vector, with the gradients of `first` and, once, of the scalar `extra`."""
    return torch.cat([first[:1] + (extra - extra.detach()), first[1:], others.detach()])


def apply(head: Head | None, terms: Sequence[Term] = (), chunk: int | None = None, cap: float | None = None) -> None:
    """Set how a head, on the stage that has it, computes its loss; without terms, chunk and cap nothing changes."""
    if head is None:
        return
    if terms or cap is not None:
        head.fused = Objective(tuple(terms), cap, chunk)
    elif chunk is not None:
        head.fused = partial(loss.chunked, chunk=chunk)


def _autograd() -> AbstractContextManager[None]:
    """Enable autograd inside of an operation, whose compiled callers have disabled its dispatch."""
    core: Any = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(core.DispatchKey, name))
    guard: AbstractContextManager[None] = core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded)
    return guard


_AUTOGRAD = [
    name
    for name in ("AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "ADInplaceOrView")
    if hasattr(torch._C.DispatchKey, name)
]


def _chunked_objective(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, key: int, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    objective = _OBJECTIVES[key]
    return chunked_loss(
        hidden, weight, targets, objective.chunk or len(hidden), (wants_hidden, wants_weight), objective.measure
    )


def _shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool, key: int, terms: int
) -> Results:
    _, *gradients = shapes(hidden, weight, targets, wants_hidden, wants_weight)
    count = 1 + (terms if wants_hidden or wants_weight else 0)
    return hidden.new_empty(count, dtype=torch.float32), gradients[0], gradients[1]


register("titan::chunked_objective", _chunked_objective, _shapes)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, extra: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(extra)
        return hidden.clone()  # no view: a pipeline's stage detaches its output in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.full_like(ctx.saved_tensors[0], ctx.scale), None


def attach(hidden: Tensor, extra: Tensor, scale: float) -> Tensor:
    """Return hidden states whose backward pass gives the scalar `extra` the gradient `scale`."""
    out: Tensor = _Attach.apply(hidden, extra, scale)  # type: ignore[no-untyped-call]
    return out


def sum_values(values: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """Return a block's values as float32 [terms, B, t] in the order of `names`; zero where it returned none.

    Args:
        values: by name, [B, t]: one for each token of the block's input.
        names: of the model's terms.
        like: hidden states [B, t, D].
    """
    if unknown := set(values) - set(names):
        raise RunError(f"a block returned the loss term {min(unknown)}, which the model's losses lack; add it there.")
    for name, value in values.items():
        if value.shape != like.shape[:2]:
            raise RunError(
                f"the loss term {name} has the shape {list(value.shape)} for tokens {list(like.shape[:2])}; "
                "return one value for each token."
            )
    none = like.new_zeros(1, *like.shape[:2], dtype=torch.float32)
    return torch.cat([none[:0], *(values[name].float()[None] if name in values else none for name in names)])
