"""Steps of an optimizer on small tensors with made gradients, whole and in parts: what `classify` compares.

Weights and gradients have rows of very different sizes, and some steps have far larger gradients than others: a
statistic of the whole tensor then differs from that of any part, and limits (a clipped norm) apply in some steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan.optimizer.external.state import (
    Leaf,
    State,
    Updater,
    describe_state,
    flatten_state,
    nest_state,
)

STEPS = 24
"""Steps of a comparison."""
SPIKES = {4: 30.0, 11: 300.0, 17: 0.003}
"""Factors of the gradients of some steps."""
GRADIENT_SIZE, WEIGHT_SIZE, ROW_RANGE = 0.03, 0.3, 1.5
"""Typical sizes of gradients and weights; by how many powers of ten rows are larger or smaller."""
TOLERANCE = 2e-6
"""Of a weight and of the largest update: what an operation that differs in its last bits may change."""
STATE_TOLERANCE = 1e-5
"""Of the largest element of a tensor of the state, and of its numbers."""
WARMUP = 6
"""Steps until the learning rate of a comparison is at its peak; then it falls linearly."""


class Outcome(NamedTuple):
    """Weights and state after a comparison's steps.

    Attributes:
        weights: at the end.
        start: before the first step.
        state: the leaves at the end, by name.
        leaves: what they are, after each step.
    """

    weights: Tensor
    start: Tensor
    state: dict[str, object]
    leaves: list[dict[str, Leaf]]

    def equals(self, other: Outcome) -> bool:
        """Return whether weights and states agree but for rounding."""
        if self.state.keys() != other.state.keys() or not _agree(self.weights, other.weights, self.start):
            return False
        pairs = [(value, other.state[name]) for name, value in self.state.items()]
        return all(
            _agree(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)
        ) and self._has_same_numbers(other)

    def agrees(self, weights: Tensor) -> bool:
        """Return whether weights agree with others but for rounding."""
        return _agree(self.weights, weights, self.start)

    def _has_same_numbers(self, other: Outcome) -> bool:
        mine, others = self.list_scalars(), other.list_scalars()
        return mine.keys() == others.keys() and all(
            math.isclose(value, others[name], rel_tol=STATE_TOLERANCE) for name, value in mine.items()
        )

    def list_scalars(self) -> dict[str, float]:
        """Return the leaves without dimensions."""
        last = self.leaves[-1]
        return {n: float(v) for n, v in self.state.items() if last[n].kind in ("scalar", "number")}  # type: ignore[arg-type]


def _agree(a: Tensor, b: Tensor, start: Tensor | None = None) -> bool:
    """Return whether tensors agree but for rounding: weights that began at `start`, or tensors of a state."""
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    largest = (a.abs() if start is None else (a - start).abs()).max() if a.numel() else 0.0
    bound = TOLERANCE * (a.abs() + largest) if start is not None else STATE_TOLERANCE * largest
    return bool(((a - b).abs() <= bound).all())


class Problem(NamedTuple):
    """A parameter of an experiment: weights, and the gradients of all steps.

    Attributes:
        name: for messages, such as "matrices".
        weights: before the first step.
        gradients: one for each step.
    """

    name: str
    weights: Tensor
    gradients: Sequence[Tensor]

    def split(self, sizes: Sequence[int], dimension: int) -> list[Problem]:
        """Return the parts of the given sizes along a dimension."""
        weights = torch.split(self.weights, list(sizes), dimension)
        gradients = zip(*(torch.split(g, list(sizes), dimension) for g in self.gradients), strict=True)
        return [
            Problem(self.name, w.contiguous(), [g.contiguous() for g in gs])
            for w, gs in zip(weights, gradients, strict=True)
        ]

    def shorten(self, steps: int) -> Problem:
        """Return the same with its first steps only."""
        return self._replace(gradients=self.gradients[:steps])

    def unbind(self) -> list[Problem]:
        """Return the matrices of a stack."""
        parts = self.split([1] * len(self.weights), 0)
        return [Problem(p.name, p.weights[0], [g[0] for g in p.gradients]) for p in parts]


def create_problem(name: str, shape: Sequence[int], seed: int, steps: int = STEPS) -> Problem:
    """Return made weights and gradients of a shape."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: float) -> Tensor:
        rows = torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=generator)
        return size * 10 ** (ROW_RANGE * (2 * rows - 1)) * torch.randn(tuple(shape), generator=generator)

    weights = draw(WEIGHT_SIZE)
    return Problem(name, weights, [draw(GRADIENT_SIZE * SPIKES.get(step, 1.0)) for step in range(steps)])


def list_rates(updater: Updater, steps: int, factor: float = 1.0) -> list[dict[str, float]]:
    """Return the learning rate, from the second step on with a factor, and weight decay: a warm-up and a decay."""
    shares = [min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP)) for step in range(steps)]
    factors = [1.0] + [factor] * (steps - 1)
    return [
        {"lr": updater.lr * share * f, "weight_decay": updater.weight_decay}
        for share, f in zip(shares, factors, strict=True)
    ]


def run_rebuilt(updater: Updater, problem: Problem, dropped: Collection[tuple[str, str]] = ()) -> Outcome:
    """Run the steps as training does: each with a new optimizer, from copies of the state's leaves.

    Args:
        dropped: which numbers a new optimizer does not get, such as ("group", "k").
    """
    weights, state = problem.weights.clone(), None
    leaves: list[dict[str, Leaf]] = []
    for step, rates in enumerate(list_rates(updater, len(problem.gradients))):
        seeds = [f"{problem.name}/{step}"]
        (state,) = updater.update([weights], [problem.gradients[step].clone()], [state], rates, seeds)
        state = copy_state(state)
        leaves.append(dict(describe_state(state).leaves))
        outcome = Outcome(weights, problem.weights, flatten_state(state)[0], leaves)
        for kind, name in dropped:
            state[kind].pop(name, None)
    return outcome


def copy_state(state: State) -> State:
    """Return a state whose tensors are copies."""
    template = describe_state(state)
    values = flatten_state(state)[0]
    return nest_state(template, {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()})


def run_kept(updater: Updater, problems: Sequence[Problem], factor: float = 1.0) -> list[Outcome]:
    """Run the steps of several parameters by one optimizer, as on one device without titan."""
    parameters = [torch.nn.Parameter(problem.weights.clone()) for problem in problems]
    optimizer = updater.build(parameters, {})
    for step, rates in enumerate(list_rates(updater, len(problems[0].gradients), factor)):
        for parameter, problem in zip(parameters, problems, strict=True):
            parameter.grad = problem.gradients[step].clone()
        updater.set_rates(optimizer, rates)
        updater.step(optimizer, f"{problems[0].name}/{step}")
    states = [updater.read_state(optimizer, parameter) for parameter in parameters]
    return [
        Outcome(parameter.detach(), problem.weights, flatten_state(state)[0], [dict(describe_state(state).leaves)])
        for parameter, problem, state in zip(parameters, problems, states, strict=True)
    ]
