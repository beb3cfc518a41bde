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
import functools
import inspect
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.optimizer.external.state import (
    Leaf,
    Traits,
    UnsupportedStateError,
    Updater,
    describe_error,
    describe_state,
    flatten_state,
    nest_state,
    probe_templates,
    read_numbers,
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


def classify(updater: Updater, shapes: Shapes, is_stacked: bool) -> Verdict:
    """Return what an optimizer updates by itself, and the bytes of its state.

    Args:
        updater: runs the class.
        shapes: of the parameters that it updates.
        is_stacked: whether it gets the matrices of three-dimensional parameters one by one.

    Raises:
        RejectedError: where no layout would learn the same with it.
    """
    start = time.process_time()
    _check_step(updater)
    kinds = sorted({2 if is_stacked and len(shape) == 3 else len(shape) for shape in shapes.values()})
    with torch.random.fork_rng(devices=()), warnings.catch_warnings(), _reject_errors():
        warnings.simplefilter("ignore")
        problems = [_create_kind(shapes, dimensions, LARGEST_SIDE) for dimensions in kinds]
        updater, outcomes = updater._replace(lr=RATE, weight_decay=DECAY), list[Outcome]()
        _check_arguments(updater, problems)
        for problem in problems:
            with _reject_errors(problem.name):
                run_kept(updater, [problem._replace(gradients=problem.gradients[:1])])
        found = [_find_traits(updater, _create_kind(shapes, d, TRAITS_SIDE, TRAITS_STEPS)) for d in kinds]
        updater = updater._replace(
            traits=_build_traits({k for keys, _ in found for k in keys}, any(r for _, r in found))
        )
        for problem in problems:
            with _reject_errors(problem.name):
                outcomes.append(run_rebuilt(updater, problem))
            _check_outcome(updater, problem, outcomes[-1])
        is_alone = _check_joint(updater, problems, outcomes)
        settled = max(outcome.settled for outcome in outcomes)
        updater = updater._replace(traits=updater.traits._replace(settled=settled, is_alone=is_alone))
        large = [_create_kind(shapes, dimensions, LARGEST_ELEMENTWISE_SIDE, LARGE_STEPS) for dimensions in kinds]
        split, reason = _find_split(updater, problems, outcomes, large, is_stacked)
        if is_stacked and split == "matrices" and any(len(shape) == 3 for shape in shapes.values()):
            _check_scalars(updater, problems)
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


def _check_step(updater: Updater) -> None:
    """Reject a class whose step needs to compute the loss again, or takes no learning rate."""
    parameters = list(inspect.signature(updater.cls.step).parameters.values())[1:]
    if any(p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise RejectedError("its step needs a closure that computes the loss again, and a step of titan has one pass")
    if "lr" not in updater.takes:
        raise RejectedError("it has no argument lr, so that titan can't set the learning rate")


def _check_arguments(updater: Updater, problems: Sequence[Problem]) -> None:
    """Reject a class that can't be built for any parameter: its arguments are wrong, or one is missing."""
    for problem in problems:
        try:
            updater.build([torch.nn.Parameter(problem.weights.clone())])
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

    def cut(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[Problem]:
        """Return the parts that a function returns of each tensor."""
        parts = zip(*map(cut, (self.weights, *self.gradients)), strict=True)
        return [Problem(self.name, weights, gradients) for weights, *gradients in parts]


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
    sizes = [s for s in shapes.values() if len(s) == dimensions]
    sizes = sizes or [s[1:] for s in shapes.values() if len(s) == dimensions + 1]
    shape = _shrink(max(sizes, key=lambda s: s[0]), side)
    return create_problem(KINDS[min(dimensions, 3)], shape, dimensions, steps)


def _shrink(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Return a shape with shorter sides, which differ where those of the shape do."""
    if len(shape) == 3:
        return min(shape[0], STACK_SIZE), *(min(size, STACK_SIDE + i) for i, size in enumerate(shape[1:]))
    return tuple(min(size, side + 2 * i) for i, size in enumerate(shape))


class Outcome(NamedTuple):
    """What steps make of a problem.

    Attributes:
        weights: after the steps.
        start: before them.
        state: the leaves of the state by name.
        leaves: what these are after each step, or after the last one.
        numbers: those beside the state, before the steps and after each, where one optimizer did them all.
    """

    weights: Tensor
    start: Tensor
    state: dict[str, Any]
    leaves: list[dict[str, Leaf]]
    numbers: Sequence[Mapping[tuple[str, str], float]] = ()

    @property
    def settled(self) -> int:
        """The number of updates from which on the leaves stay the same."""
        return 1 + max((i + 1 for i, leaves in enumerate(self.leaves) if leaves != self.leaves[-1]), default=0)

    def equals(self, *parts: Outcome, join: Callable[[list[Tensor]], Tensor] = lambda tensors: tensors[0]) -> bool:
        """Return whether weights and state are those of parts, joined, but for rounding; each has the numbers."""
        tensors, scalars = self.list_tensors(), self.list_scalars()
        return (
            all(part.state.keys() == self.state.keys() and part.list_tensors() == tensors for part in parts)
            and self.agrees(join([part.weights for part in parts]))
            and all(_agree(self.state[name], join([part.state[name] for part in parts])) for name in tensors)
            and all(
                math.isclose(value, part.list_scalars()[name], rel_tol=STATE_TOLERANCE)
                for part in parts
                for name, value in scalars.items()
            )
        )

    def list_tensors(self) -> set[str]:
        """Return the names of the leaves with dimensions."""
        return {name for name, leaf in self.leaves[-1].items() if leaf.kind == "tensor"}

    def agrees(self, weights: Tensor) -> bool:
        """Return whether weights agree with others but for rounding."""
        return _agree(self.weights, weights, self.start)

    def list_scalars(self) -> dict[str, float]:
        """Return the leaves without dimensions."""
        last = self.leaves[-1]
        return {n: float(v) for n, v in self.state.items() if last[n].kind in ("scalar", "number")}


def _agree(a: Tensor, b: Tensor, start: Tensor | None = None) -> bool:
    """Return whether tensors agree but for rounding: weights that began at `start`, or tensors of a state."""
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    largest = (a.abs() if start is None else (a - start).abs()).max() if a.numel() else 0.0
    bound = TOLERANCE * (a.abs() + largest) if start is not None else STATE_TOLERANCE * largest
    return bool(((a - b).abs() <= bound).all())


def _list_rates(steps: int, factor: float = 1.0) -> list[dict[str, float]]:
    """Return the rates of steps: a warm-up and a decay; from the second step on with a factor."""
    shares = [min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP)) for step in range(steps)]
    factors = [1.0] + [factor] * (steps - 1)
    return [{"lr": RATE * s * f, "weight_decay": DECAY} for s, f in zip(shares, factors, strict=True)]


def run_rebuilt(updater: Updater, problem: Problem, dropped: Iterable[tuple[str, str]] = ()) -> Outcome:
    """Run the steps as training does: each with a new optimizer, from copies of the state's leaves.

    Args:
        dropped: which numbers a new optimizer does not get, such as ("group", "k").
    """
    weights, state = problem.weights.clone(), None
    leaves: list[dict[str, Leaf]] = []
    for step, rates in enumerate(_list_rates(len(problem.gradients))):
        gradient, seed = problem.gradients[step].clone(), f"{problem.name}/{step}"
        (state,) = updater.update([weights], [gradient], [state], rates, [seed])
        values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in flatten_state(state)[0].items()}
        template = describe_state(state)
        leaves.append(dict(template.leaves))
        state = nest_state(template, values)
        for kind, name in dropped:
            state[kind].pop(name, None)
    return Outcome(weights, problem.weights, values, leaves)


def run_kept(updater: Updater, problems: Sequence[Problem], factor: float = 1.0, seed: int = 1) -> list[Outcome]:
    """Run the steps of several parameters by one optimizer, as on one device without titan, from a seed on."""
    torch.manual_seed(seed)
    random.seed(seed)
    parameters = [torch.nn.Parameter(problem.weights.clone()) for problem in problems]
    optimizer = updater.build(parameters)

    def copy_numbers() -> dict[tuple[str, str], float]:
        return {key: float(value) for key, value in read_numbers(optimizer).items()}

    numbers = [copy_numbers()]
    for step, rates in enumerate(_list_rates(len(problems[0].gradients), factor)):
        for parameter, problem in zip(parameters, problems, strict=True):
            parameter.grad = problem.gradients[step].clone()
        updater.step(optimizer, rates, f"{problems[0].name}/{step}")
        numbers.append(copy_numbers())
    states = [updater.read_state(optimizer, parameter) for parameter in parameters]
    leaves = [[dict(describe_state(state).leaves)] for state in states]
    return [
        Outcome(parameter.detach(), problem.weights, flatten_state(state)[0], last, numbers)
        for parameter, problem, state, last in zip(parameters, problems, states, leaves, strict=True)
    ]


# --- what an optimizer keeps, and what is rejected


def _build_traits(numbers: Iterable[tuple[str, str]], is_random: bool) -> Traits:
    counters, extras = (tuple(sorted(n for k, n in numbers if k == kind)) for kind in ("group", "extra"))
    return Traits(counters, extras, is_random)


def _find_traits(updater: Updater, problem: Problem) -> tuple[set[tuple[str, str]], bool]:
    """Return which numbers steps change without which a new optimizer goes on differently, and what is random."""
    kept, other = (run_kept(updater, [problem], seed=seed)[0] for seed in (1, 2))
    is_random = _differs_in_bits(kept, other)
    first, *later = kept.numbers
    needed = keys = {key for numbers in later for key, value in numbers.items() if first.get(key) != value}
    updater = updater._replace(traits=_build_traits(keys, is_random))
    (kept,) = run_kept(updater, [problem])

    def continues_without(dropped: set[tuple[str, str]]) -> bool:
        try:
            return kept.equals(run_rebuilt(updater, problem, dropped))
        except Exception:  # a number that it needs is missing
            return False

    for drop in (keys, *({key} for key in sorted(keys))):  # one after the other: some follow from others
        needed = needed - drop if needed and continues_without(keys - needed | drop) else needed
    return needed, is_random


def _differs_in_bits(first: Outcome, second: Outcome) -> bool:
    """Return whether weights that are numbers differ, after steps from two seeds."""
    return not torch.equal(first.weights, second.weights) and not bool(first.weights.isnan().any())


def _check_outcome(updater: Updater, problem: Problem, outcome: Outcome) -> None:
    """Reject what is random, kept elsewhere or not scheduled; steps 2 to 4 of the module."""
    if outcome.settled > LATEST_SETTLED:
        last = outcome.leaves[-1]
        step, leaves = next((i, leaves) for i, leaves in enumerate(outcome.leaves, 1) if leaves != last)
        name = min(n for n in leaves.keys() | last.keys() if leaves.get(n) != last.get(n))
        raise RejectedError(f"its state of {problem.name} has no fixed structure: {name} differs after step {step}")
    kept, other = (run_kept(updater, [problem], seed=seed)[0] for seed in (1, 2))
    if _differs_in_bits(kept, other):
        raise RejectedError("it draws random numbers that the generators of torch and Python do not decide")
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
    updater: Updater,
    problems: Sequence[Problem],
    outcomes: Sequence[Outcome],
    large: Sequence[Problem],
    is_stacked: bool,
) -> tuple[str, str]:
    """Return what the optimizer updates by itself, and what shows it; steps 6 and 7 of the module."""
    broken = next(_find_broken_parts(updater, zip(problems, outcomes, strict=True)), None)
    if broken is None:
        broken = next(_find_broken_parts(updater, ((p, run_rebuilt(updater, p)) for p in large)), None)
        if broken is None:
            return "elements", "rows, columns and uneven parts by themselves become what the whole becomes"
        return ("matrices" if is_stacked else "whole"), broken
    if is_stacked:
        return "matrices", broken
    stack = next((p for p in problems if p.weights.dim() == 3), None)
    stack = stack or create_problem("stacks", (STACK_SIZE, STACK_SIDE, STACK_SIDE + 1), 3)
    large_stack = create_problem("stacks", (2, LARGEST_SIDE, LARGEST_SIDE + 2), 3, LARGE_STEPS)
    is_split = all(_is_stack_of_matrices(updater, problem) for problem in (stack, large_stack))
    return ("matrices" if is_split else "whole"), broken


def _find_broken_parts(updater: Updater, wholes: Iterable[tuple[Problem, Outcome]]) -> Iterator[str]:
    """Yield which parts by themselves differ from the whole: halves of a dimension, and one and the rest."""
    for problem, outcome in wholes:
        for dimension, length in enumerate(problem.weights.shape):
            for first in (length // 2, 1) if length > 1 else ():
                cut = functools.partial(torch.split, split_size_or_sections=[first, length - first], dim=dimension)
                parts = [run_rebuilt(updater, part) for part in problem.cut(cut)]
                difference = None
                if any(
                    leaf.shape not in ((), part.weights.shape) for part in parts for leaf in part.leaves[-1].values()
                ):
                    difference = "have a state of another shape than theirs"
                elif not outcome.equals(*parts, join=functools.partial(torch.cat, dim=dimension)):
                    difference = "by themselves become something else than in the whole"
                if difference:
                    place = ("rows", "columns", "last columns")[min(dimension, 2)]
                    yield f"{first} of {length} {place} of {problem.name} {difference}"


def _is_stack_of_matrices(updater: Updater, stack: Problem) -> bool:
    """Return whether a stack becomes what its matrices become, each by itself, with equal scalars."""
    try:
        whole, *parts = [run_rebuilt(updater, problem) for problem in (stack, *stack.cut(torch.unbind))]
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
