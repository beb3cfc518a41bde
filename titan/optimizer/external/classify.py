"""Which parts of a parameter an optimizer may update by themselves, found by computing whole tensors and parts of them.

Small parameters of each kind that the model has (a vector, a matrix, a stack of matrices) get made gradients:

1. the class steps once on each: what raises is rejected;
2. it steps with other seeds: what is not the same bits is random. Random numbers then follow from the name of a
   parameter and the number of its update, and what still differs is rejected;
3. it steps with a new optimizer for each step, from a copy of the state and of those numbers beside it that it needs
   (`titan.optimizer.external.state.Traits`): what differs keeps something elsewhere, is rejected;
4. with half the learning rate: what does not differ ignores a schedule, and is rejected;
5. all of them by one optimizer: what differs from each by itself needs parameters jointly, and is rejected;
6. rows, columns and uneven parts by themselves: where all agree with the whole, any shard is right (elements);
7. each matrix of a stack by itself: where this agrees, a matrix is enough (matrices); else a whole tensor is needed.

What is computed is a few thousand elements, on the CPU in float32. A rule that sets in later or at larger sizes is not
seen. Weights and gradients have rows of very different sizes, and some steps have far larger gradients than others: a
statistic of the whole tensor then differs from that of any part, and limits (a clipped norm) apply in some steps.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.optimizer.external.state import (
    Constructor,
    Leaf,
    Traits,
    UnsupportedStateError,
    Updater,
    describe_error,
    describe_state,
    flatten_state,
    nest_state,
    probe_templates,
    read_counters,
    read_extras,
)
from titan.optimizer.schema import is_block_matrix

KINDS = ("", "vectors", "matrices", "stacks of matrices")
"""Names of parameters by their number of dimensions."""
LARGEST_SIDE = 136
"""Rows or columns of a computed matrix: more than 128, from which on some optimizers factor a second moment."""
LARGEST_ELEMENTWISE_SIDE, LARGE_STEPS = 1024, 3
"""Rows or columns with which an elementwise rule is computed once more, and the steps of that."""
STACK_SIDE, STACK_SIZE = 24, 3
"""Rows of the matrices of a computed stack, and their number."""
TRAITS_SIDE, TRAITS_STEPS = 20, 9
"""Rows and steps with which the numbers beside a state are found."""
LATEST_SETTLED = 8
"""The largest number of updates after which the leaves of a state may be settled."""
NOISE = 3.0
"""How many times the difference between other random numbers one between other parameters may be."""
FP32_BYTES = 4
"""Bytes of a moment of AdamW."""
RATE, DECAY = 0.01, 0.1
"""Peak learning rate and weight decay of a comparison, whatever the run's are: updates are far larger than rounding."""
STEPS, WARMUP = 24, 6
"""Steps of a comparison; those until its learning rate is at its peak, after which it falls linearly."""
SPIKES = {4: 30.0, 11: 300.0, 17: 0.003}
"""Factors of the gradients of some steps."""
GRADIENT_SIZE, WEIGHT_SIZE, ROW_RANGE = 0.03, 0.3, 1.5
"""Typical sizes of gradients and weights; by how many powers of ten rows are larger or smaller."""
TOLERANCE = 2e-6
"""Of a weight and of the largest update: what an operation that differs in its last bits may change."""
STATE_TOLERANCE = 1e-5
"""Of the largest element of a tensor of the state, and of its numbers."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters, by name."""


class Verdict(NamedTuple):
    """What is known of an optimizer.

    Attributes:
        split: what it updates by itself, elements, matrices or whole.
        reason: what was compared, in one sentence.
        traits: what it keeps beside its state.
        matrix_bytes: bytes of state per element of the blocks' matrices.
        other_bytes: of all other parameters.
        largest: elements of the largest parameter that is gathered; 0: none is.
        largest_bytes: of its state.
        seconds: of one core that this took.
        package: the package of the class, with its version.
    """

    split: str
    reason: str
    traits: Traits = Traits()
    matrix_bytes: float = 0.0
    other_bytes: float = 0.0
    largest: int = 0
    largest_bytes: float = 0.0
    seconds: float = 0.0
    package: str = ""

    def to_document(self) -> dict[str, Any]:
        """Return the verdict as plain containers."""
        traits = {key: list(v) if isinstance(v, tuple) else v for key, v in self.traits._asdict().items()}
        return {**self._asdict(), "traits": traits}


class RejectedError(Exception):
    """Why an optimizer can't be used, without its name; and what to change, empty: another optimizer."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


def classify(constructor: Constructor, shapes: Shapes, is_stacked: bool) -> Verdict:
    """Return what an optimizer updates by itself, and the bytes of its state.

    Args:
        shapes: of the parameters that it updates.
        is_stacked: whether it gets the matrices of three-dimensional parameters one by one.

    Raises:
        RejectedError: where no layout would learn the same with it.
    """
    start = time.process_time()
    _check_step(constructor)
    kinds = sorted({2 if is_stacked and len(shape) == 3 else len(shape) for shape in shapes.values()})
    with torch.random.fork_rng(devices=()), warnings.catch_warnings(), _reject_errors():
        warnings.simplefilter("ignore")
        problems = [_create_kind(shapes, dimensions, LARGEST_SIDE) for dimensions in kinds]
        _check_arguments(constructor, problems)
        updater, outcomes = Updater(constructor, Traits(), RATE, DECAY), []
        for problem in problems:
            with _reject_errors(problem.name):
                run_kept(updater, [problem._replace(gradients=problem.gradients[:1])])
        updater = _find_numbers(updater, [_create_kind(shapes, d, TRAITS_SIDE, TRAITS_STEPS) for d in kinds])
        for problem in problems:
            with _reject_errors(problem.name):
                outcomes.append(run_rebuilt(updater, problem))
            _check_outcome(updater, problem, outcomes[-1])
        is_alone = _check_joint(updater, problems, outcomes)
        settled = max(_find_settled(outcome) for outcome in outcomes)
        updater = updater._replace(traits=updater.traits._replace(settled=settled, is_alone=is_alone))
        split, reason = _find_split(updater, problems, outcomes, shapes, is_stacked)
        verdict = _measure_bytes(updater, Verdict(split, reason, updater.traits), shapes, is_stacked)
    return verdict._replace(seconds=round(time.process_time() - start, 1))


@contextlib.contextmanager
def _reject_errors(name: str = "") -> Iterator[None]:
    """Make a rejection of what a step raises, on parameters of that name."""
    try:
        yield
    except RejectedError:
        raise
    except UnsupportedStateError as error:
        raise RejectedError(str(error)) from error
    except Exception as error:
        where = f" on {name}" if name else ""
        raise RejectedError(f"its step raises {type(error).__name__}{where}: {describe_error(error)}") from error


def _check_step(constructor: Constructor) -> None:
    """Reject a class whose step needs to compute the loss again."""
    parameters = list(inspect.signature(constructor.cls.step).parameters.values())[1:]
    if any(p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise RejectedError("its step needs a closure that computes the loss again, and a step of titan has one pass")
    if "lr" not in constructor.takes:
        raise RejectedError("it has no argument lr, so that titan can't set the learning rate")


def _check_arguments(constructor: Constructor, problems: Sequence[Problem]) -> None:
    """Reject a class that can't be built for any parameter: its arguments are wrong, or one is missing."""
    for problem in problems:
        try:
            constructor.build([torch.nn.Parameter(problem.weights.clone())], RATE, DECAY)
        except Exception as error:
            failure = error
        else:
            return
    reason = f"building it raises {type(failure).__name__}: {describe_error(failure)}"
    raise RejectedError(reason, "correct optimizer.args") from failure


# --- made parameters, and steps on them


class Problem(NamedTuple):
    """A made parameter: its name for messages, its weights, and the gradients of all steps."""

    name: str
    weights: Tensor
    gradients: Sequence[Tensor]

    def split(self, sizes: Sequence[int], dimension: int) -> list[Problem]:
        """Return the parts of the given sizes along a dimension."""
        parts = zip(*(torch.split(x, list(sizes), dimension) for x in (self.weights, *self.gradients)), strict=True)
        return [Problem(self.name, w.contiguous(), [g.contiguous() for g in gs]) for w, *gs in parts]

    def unbind(self) -> list[Problem]:
        """Return the matrices of a stack."""
        return [Problem(self.name, w, gs) for w, *gs in zip(self.weights, *self.gradients, strict=True)]


def create_problem(name: str, shape: Sequence[int], seed: int, steps: int = STEPS) -> Problem:
    """Return made weights and gradients of a shape."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: float) -> Tensor:
        rows = torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=generator)
        return size * 10 ** (ROW_RANGE * (2 * rows - 1)) * torch.randn(tuple(shape), generator=generator)

    weights = draw(WEIGHT_SIZE)
    return Problem(name, weights, [draw(GRADIENT_SIZE * SPIKES.get(step, 1.0)) for step in range(steps)])


def _create_kind(shapes: Shapes, dimensions: int, side: int, steps: int = STEPS) -> Problem:
    """Return a problem with the shape of a model's largest vector, matrix or stack, made small."""
    sizes = [s for s in shapes.values() if len(s) == dimensions] or [
        s[1:] for s in shapes.values() if len(s) == dimensions + 1
    ]
    return create_problem(KINDS[min(dimensions, 3)], _shrink(max(sizes, key=lambda s: s[0]), side), dimensions, steps)


def _shrink(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Return a shape with shorter sides, which differ where those of the shape do."""
    if len(shape) == 3:
        return min(shape[0], STACK_SIZE), *(min(size, STACK_SIDE + i) for i, size in enumerate(shape[1:]))
    return tuple(min(size, side + 2 * i) for i, size in enumerate(shape))


class Outcome(NamedTuple):
    """Weights after a problem's steps and before them, the leaves of the state by name, and what these are after each
    step."""

    weights: Tensor
    start: Tensor
    state: dict[str, Any]
    leaves: list[dict[str, Leaf]]

    def equals(self, other: Outcome) -> bool:
        """Return whether weights and states agree but for rounding."""
        return (
            self.state.keys() == other.state.keys()
            and self.agrees(other.weights)
            and all(_agree(t, other.state[name]) for name, t in self.state.items() if isinstance(t, Tensor))
            and self.has_numbers_of(other)
        )

    def agrees(self, weights: Tensor) -> bool:
        """Return whether weights agree with others but for rounding."""
        return _agree(self.weights, weights, self.start)

    def has_numbers_of(self, other: Outcome) -> bool:
        """Return whether the leaves without dimensions agree but for rounding."""
        mine, others = self.list_scalars(), other.list_scalars()
        return mine.keys() == others.keys() and all(
            math.isclose(value, others[name], rel_tol=STATE_TOLERANCE) for name, value in mine.items()
        )

    def list_scalars(self) -> dict[str, float]:
        """Return the leaves without dimensions."""
        last = self.leaves[-1]
        return {n: float(v) for n, v in self.state.items() if last[n].kind in ("scalar", "number")}


def _agree(a: Tensor, b: Any, start: Tensor | None = None) -> bool:
    """Return whether tensors agree but for rounding: weights that began at `start`, or tensors of a state."""
    if not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    largest = (a.abs() if start is None else (a - start).abs()).max() if a.numel() else 0.0
    bound = TOLERANCE * (a.abs() + largest) if start is not None else STATE_TOLERANCE * largest
    return bool(((a - b).abs() <= bound).all())


def _list_rates(updater: Updater, steps: int, factor: float = 1.0) -> list[dict[str, float]]:
    """Return the rates of steps: a warm-up and a decay; from the second step on with a factor."""
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
    for step, rates in enumerate(_list_rates(updater, len(problem.gradients))):
        seeds = [f"{problem.name}/{step}"]
        (state,) = updater.update([weights], [problem.gradients[step].clone()], [state], rates, seeds)
        values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in flatten_state(state)[0].items()}
        template = describe_state(state)
        leaves.append(dict(template.leaves))
        state = nest_state(template, values)
        for kind, name in dropped:
            state[kind].pop(name, None)
    return Outcome(weights, problem.weights, values, leaves)


def _step_kept(
    updater: Updater, problems: Sequence[Problem], factor: float = 1.0
) -> Iterator[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
    """Yield one optimizer of several parameters and these, before the first step and after each."""
    parameters = [torch.nn.Parameter(problem.weights.clone()) for problem in problems]
    optimizer = updater.build(parameters, {})
    yield optimizer, parameters
    for step, rates in enumerate(_list_rates(updater, len(problems[0].gradients), factor)):
        for parameter, problem in zip(parameters, problems, strict=True):
            parameter.grad = problem.gradients[step].clone()
        updater.set_rates(optimizer, rates)
        updater.step(optimizer, f"{problems[0].name}/{step}")
        yield optimizer, parameters


def run_kept(
    updater: Updater, problems: Sequence[Problem], factor: float = 1.0, seed: int | None = None
) -> list[Outcome]:
    """Run the steps of several parameters by one optimizer, as on one device without titan; with a seed, from it on."""
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
    *_, (optimizer, parameters) = _step_kept(updater, problems, factor)
    states = [updater.read_state(optimizer, parameter) for parameter in parameters]
    return [
        Outcome(parameter.detach(), problem.weights, flatten_state(state)[0], [dict(describe_state(state).leaves)])
        for parameter, problem, state in zip(parameters, problems, states, strict=True)
    ]


# --- what an optimizer keeps, and what is rejected


def _find_numbers(updater: Updater, problems: Sequence[Problem]) -> Updater:
    """Return the updater that knows whether the class is random, and which numbers beside its state it needs."""
    found = [_find_problem_numbers(updater, problem) for problem in problems]
    return updater._replace(
        traits=Traits(
            counters=tuple(sorted({key for traits in found for key in traits.counters})),
            extras=tuple(sorted({key for traits in found for key in traits.extras})),
            is_random=any(traits.is_random for traits in found),
        )
    )


def _find_problem_numbers(updater: Updater, problem: Problem) -> Traits:
    """Return what is random, and which numbers steps change without which a new optimizer goes on differently."""
    is_random = _differs_in_bits(updater, problem)
    first, *later = [
        {("group", key): v for key, v in read_counters(optimizer).items()}
        | {("extra", key): v for key, v in read_extras(optimizer).items()}
        for optimizer, _ in _step_kept(updater, [problem])
    ]
    keys = {key for numbers in later for key, value in numbers.items() if first.get(key) != value}

    def build_traits(chosen: Collection[tuple[str, str]]) -> Traits:
        counters, extras = (tuple(k for kind, k in sorted(chosen) if kind == name) for name in ("group", "extra"))
        return Traits(counters, extras, is_random)

    updater = updater._replace(traits=build_traits(keys))
    (kept,) = run_kept(updater, [problem])

    def continues_without(dropped: Collection[tuple[str, str]]) -> bool:
        try:
            return kept.equals(run_rebuilt(updater, problem, dropped=dropped))
        except Exception:  # a number that it needs is missing
            return False

    needed = keys if keys and not continues_without(keys) else set()
    for pair in sorted(needed):  # one after the other: some follow from others
        needed = needed - {pair} if continues_without(keys - needed | {pair}) else needed
    return build_traits(needed)


def _differs_in_bits(updater: Updater, problem: Problem) -> bool:
    """Return whether weights that are numbers depend on the seed."""
    first, second = (run_kept(updater, [problem], seed=seed)[0].weights for seed in (1, 2))
    return not torch.equal(first, second) and not bool(first.isnan().any())


def _find_settled(outcome: Outcome) -> int:
    """Return the number of updates from which on the leaves stay the same."""
    last = outcome.leaves[-1]
    return 1 + max((i + 1 for i, leaves in enumerate(outcome.leaves) if leaves != last), default=0)


def _check_outcome(updater: Updater, problem: Problem, outcome: Outcome) -> None:
    """Reject what is random, kept elsewhere or not scheduled; steps 2 to 4 of the module."""
    if _find_settled(outcome) > LATEST_SETTLED:
        last = outcome.leaves[-1]
        step, leaves = next((i, leaves) for i, leaves in enumerate(outcome.leaves, 1) if leaves != last)
        name = min(n for n in leaves.keys() | last.keys() if leaves.get(n) != last.get(n))
        raise RejectedError(f"its state of {problem.name} has no fixed structure: {name} differs after step {step}")
    if _differs_in_bits(updater, problem):
        raise RejectedError("it draws random numbers that the generators of torch and Python do not decide")
    (kept,) = run_kept(updater, [problem], seed=1)
    if not bool(kept.weights.isfinite().all()):
        raise RejectedError(f"{problem.name} are not finite after {len(problem.gradients)} steps")
    if not outcome.equals(kept):
        raise RejectedError(
            "it keeps something between steps outside of its state, which no checkpoint holds: a new optimizer "
            "with a copy of the state goes on differently"
        )
    if torch.equal(kept.weights, run_kept(updater, [problem], 0.5)[0].weights):
        raise RejectedError("it ignores the learning rate in param_groups, so that no schedule has an effect")


def _check_joint(updater: Updater, problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> bool:
    """Reject an optimizer whose updates depend on its other parameters; return whether the leaves of its state do."""
    shape = problems[-1].weights.shape
    (*first, other), second = (run_kept(updater, [*problems, create_problem("another", shape, s)]) for s in (7, 8))
    for problem, alone, one, two in zip(problems, outcomes, first, second[:-1], strict=True):
        same = one.equals(two) and one.agrees(alone.weights)
        if not same and updater.traits.is_random:  # as other random numbers do?
            renamed = run_rebuilt(updater, problem._replace(name="renamed"))
            noise = (alone.weights - renamed.weights).abs().max()
            same = bool((one.weights - two.weights).abs().max() <= NOISE * noise)
        if not same:
            raise RejectedError(
                "it needs several parameters jointly (a norm of all of them, for example), which ranks and stages of a "
                "pipeline do not have"
            )
    pairs = zip((*first, other), (*outcomes, outcomes[-1]), strict=True)
    return any(together.leaves[-1] != alone.leaves[-1] for together, alone in pairs)


# --- what it updates by itself


def _find_split(
    updater: Updater, problems: Sequence[Problem], outcomes: Sequence[Outcome], shapes: Shapes, is_stacked: bool
) -> tuple[str, str]:
    """Return what the optimizer updates by itself, and what shows it; steps 6 and 7 of the module."""
    broken = next(_find_broken_parts(updater, problems, outcomes), None)
    if broken is None:
        large = [_enlarge(shapes, problem) for problem in problems]
        broken = next(_find_broken_parts(updater, large, [run_rebuilt(updater, p) for p in large]), None)
        if broken is None:
            return "elements", "rows, columns and uneven parts by themselves become what the whole becomes"
        return ("matrices" if is_stacked else "whole"), broken
    if is_stacked:
        if any(len(shape) == 3 for shape in shapes.values()):
            _check_scalars(updater, problems)
        return "matrices", broken
    stack = next((p for p in problems if p.weights.dim() == 3), None)
    stack = stack or create_problem("stacks", (STACK_SIZE, STACK_SIDE, STACK_SIDE + 1), 3)
    large_stack = create_problem("stacks", (2, LARGEST_SIDE, LARGEST_SIDE + 2), 3, LARGE_STEPS)
    is_split = all(_is_stack_of_matrices(updater, problem) for problem in (stack, large_stack))
    return ("matrices" if is_split else "whole"), broken


def _enlarge(shapes: Shapes, problem: Problem) -> Problem:
    dimensions = problem.weights.dim()
    if dimensions == 3:
        return problem
    sizes = [s[-dimensions:] for s in shapes.values() if len(s) >= dimensions]
    shape = _shrink(max(sizes, key=lambda s: s[0]), LARGEST_ELEMENTWISE_SIDE)
    return create_problem(problem.name, shape, dimensions, LARGE_STEPS)


def _find_broken_parts(updater: Updater, problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield which parts by themselves differ from the whole: halves of a dimension, and one and the rest."""
    for problem, outcome in zip(problems, outcomes, strict=True):
        for dimension, length in enumerate(problem.weights.shape):
            for first in (length // 2, 1) if length > 1 else ():
                parts = [run_rebuilt(updater, part) for part in problem.split([first, length - first], dimension)]
                if (difference := _find_difference(outcome, parts, dimension)) is not None:
                    place = ("rows", "columns", "last columns")[min(dimension, 2)]
                    yield f"{first} of {length} {place} of {problem.name} {difference}"


def _find_difference(whole: Outcome, parts: Sequence[Outcome], dimension: int) -> str | None:
    """Return how parts along a dimension differ from the whole; None: they are the same."""
    if any(leaf.shape != part.weights.shape for part in parts for leaf in part.leaves[-1].values() if leaf.shape):
        return "have a state of another shape than theirs"
    names = [name for name, leaf in parts[0].leaves[-1].items() if leaf.kind == "tensor"]
    joined = {name: torch.cat([part.state[name] for part in parts], dimension) for name in names}
    same = (
        all(part.state.keys() == whole.state.keys() and whole.has_numbers_of(part) for part in parts)
        and whole.agrees(torch.cat([part.weights for part in parts], dimension))
        and all(_agree(tensor, joined.get(n)) for n, tensor in whole.state.items() if whole.leaves[-1][n].shape)
    )
    return None if same else "by themselves become something else than in the whole"


def _is_stack_of_matrices(updater: Updater, stack: Problem) -> bool:
    """Return whether a stack becomes what its matrices become, each by itself, with equal scalars."""
    try:
        whole, parts = run_rebuilt(updater, stack), [run_rebuilt(updater, part) for part in stack.unbind()]
    except Exception:  # the class does not take stacks, and this model has none
        return False
    same = all(part.list_scalars() == parts[0].list_scalars() for part in parts)
    return same and whole.agrees(torch.stack([part.weights for part in parts]))


def _check_scalars(updater: Updater, matrices: Sequence[Problem]) -> None:
    """Reject scalars of a state that differ between the matrices of a stack."""
    for problem in matrices:
        other = create_problem(problem.name, problem.weights.shape, 11)
        first, second = (run_rebuilt(updater, p).list_scalars() for p in (problem, other))
        if differing := [name for name in first if first[name] != second.get(name)]:
            raise RejectedError(f"its scalar {differing[0]} differs between matrices, such as those of experts")


def _measure_bytes(updater: Updater, verdict: Verdict, shapes: Shapes, is_stacked: bool) -> Verdict:
    """Return the verdict with the bytes of state of a model's parameters."""
    state_bytes = {shape: _count_state_bytes(updater, shape, is_stacked) for shape in dict.fromkeys(shapes.values())}

    def average(is_matrix: bool) -> float:
        chosen = [s for name, s in shapes.items() if is_block_matrix(name, len(s)) == is_matrix]
        return sum(state_bytes[s] for s in chosen) / sum(map(math.prod, chosen)) if chosen else 0.0

    largest = max((math.prod(shape), size) for shape, size in state_bytes.items())
    gathered = largest if verdict.split != "elements" else (0, 0.0)
    other_bytes = 2.0 * FP32_BYTES if is_stacked else average(False)  # those of AdamW, which updates the others
    return verdict._replace(
        matrix_bytes=average(True), other_bytes=other_bytes, largest=gathered[0], largest_bytes=gathered[1]
    )


def _count_state_bytes(updater: Updater, shape: tuple[int, ...], is_stacked: bool) -> float:
    """Return the bytes of a parameter's state, without computing it where the optimizer allows that."""
    if is_stacked and len(shape) == 3:
        return shape[0] * _count_state_bytes(updater, shape[1:], is_stacked)
    try:
        return probe_templates(updater, shape, torch.device("cpu"), is_fake_only=True)[-1].count_bytes()
    except Exception:  # as many per element as a small one has
        small = _shrink(shape, LARGEST_SIDE)
        share = math.prod(shape) / math.prod(small)
        return share * probe_templates(updater, small, torch.device("cpu"))[-1].count_bytes()
