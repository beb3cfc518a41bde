"""Which parts of a parameter an optimizer may update by themselves, found by computing whole tensors and parts of them.

1. the class steps on a vector, a matrix and a stack of matrices, as the model has them: what raises is rejected;
2. a second time with other seeds: what is not the same bits is random. Random numbers then follow from the name of a
   parameter and the number of its update, and what still differs is rejected;
3. all of them by one optimizer: what differs from each by itself needs parameters jointly, and is rejected;
4. with a new optimizer for each step, from a copy of the state: what differs keeps something elsewhere, is rejected;
5. with half the learning rate: what does not differ ignores a schedule, and is rejected;
6. rows, columns and uneven parts by themselves: where all agree with the whole, any shard is right (elements);
7. each matrix of a stack by itself: where this agrees, a matrix is enough (matrices); else a whole tensor is needed.

What is computed is a few thousand elements, on the CPU in float32. A rule that sets in later or at larger sizes is not
seen.
"""

from __future__ import annotations

import inspect
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from titan.optimizer.external.constructor import Constructor, describe_error
from titan.optimizer.external.experiment import Outcome, Problem, create_problem, run_kept, run_rebuilt
from titan.optimizer.external.state import Traits, UnsupportedStateError, Updater, probe_templates
from titan.optimizer.external.traits import find_traits
from titan.optimizer.schema import is_block_matrix

LARGEST_SIDE = 136
"""Rows or columns of a computed matrix: more than 128, from which on some optimizers factor a second moment."""
LATEST_SETTLED = 8
"""The largest number of updates after which the leaves of a state may be settled."""
NOISE = 3.0
"""How many times the difference between other random numbers one between other parameters may be."""
STACK_SIDE, STACK_SIZE = 24, 3
"""Rows of the matrices of a computed stack, and their number."""
LARGEST_ELEMENTWISE_SIDE = 1024
"""Rows or columns with which an elementwise rule is computed once more, in few steps."""
FP32_BYTES = 4
"""Bytes of a moment of AdamW."""
RATE, DECAY = 0.01, 0.1
"""Peak learning rate and weight decay of a comparison, whatever the run's are: updates are far larger than rounding."""
LARGE_STEPS = 3
"""These steps."""


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
    """Why an optimizer can't be used; without its name.

    Attributes:
        advice: what to change; empty: another optimizer.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


def classify(constructor: Constructor, shapes: Mapping[str, tuple[int, ...]], is_stacked: bool) -> Verdict:
    """Return what an optimizer updates by itself, and the bytes of its state.

    Args:
        shapes: of the parameters that it updates, by name.
        is_stacked: whether it gets the matrices of three-dimensional parameters one by one.

    Raises:
        RejectedError: where no layout would learn the same with it.
    """
    start = time.process_time()
    _check_step(constructor)
    kinds = sorted({2 if is_stacked and len(shape) == 3 else len(shape) for shape in shapes.values()})
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = [_create_kind(shapes, dimensions) for dimensions in kinds]
        _check_arguments(constructor, problems)
        for problem in problems:
            _run(run_kept, Updater(constructor, Traits(), RATE, DECAY), [problem.shorten(1)], name=problem.name)
        traits = _run(find_traits, constructor, RATE, DECAY, kinds)
        updater = Updater(constructor, traits, RATE, DECAY)
        outcomes = [_run(run_rebuilt, updater, problem, name=problem.name) for problem in problems]
        _check_outcomes(updater, problems, outcomes)
        split, reason = _find_split(updater, problems, outcomes, shapes, is_stacked)
        verdict = _measure_bytes(updater, Verdict(split, reason, traits), shapes, is_stacked)
    return verdict._replace(seconds=round(time.process_time() - start, 1))


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


def _run(function: Any, *arguments: Any, name: str = "") -> Any:
    """Call a function that steps the optimizer; what it raises is a rejection."""
    try:
        return function(*arguments)
    except UnsupportedStateError as error:
        raise RejectedError(str(error)) from error
    except Exception as error:
        where = f" on {name}" if name else ""
        raise RejectedError(f"its step raises {type(error).__name__}{where}: {describe_error(error)}") from error


def _create_kind(shapes: Mapping[str, tuple[int, ...]], dimensions: int) -> Problem:
    """Return a problem with the shape of a model's largest vector, matrix or stack, made small."""
    sizes = [shape for shape in shapes.values() if len(shape) == dimensions] or [
        shape[1:] for shape in shapes.values() if len(shape) == dimensions + 1
    ]
    return create_problem(_name_kind(dimensions), _shrink(max(sizes, key=lambda s: s[0]), LARGEST_SIDE), dimensions)


def _shrink(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Return a shape with shorter sides, which differ where those of the shape do."""
    if len(shape) == 3:
        return min(shape[0], STACK_SIZE), *(min(size, STACK_SIDE + i) for i, size in enumerate(shape[1:]))
    return tuple(min(size, side + 2 * i) for i, size in enumerate(shape))


def _name_kind(dimensions: int) -> str:
    return {1: "vectors", 2: "matrices"}.get(dimensions, "stacks of matrices")


def _check_outcomes(updater: Updater, problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> None:
    """Reject what is random, joint, kept elsewhere or not scheduled; steps 2 to 5 of the module."""
    for problem, outcome in zip(problems, outcomes, strict=True):
        _check_leaves(problem, outcome, updater.traits.settled)
        first, second = (_run_seeded(updater, problem, seed) for seed in (1, 2))
        if not _is_identical(first, second):
            raise RejectedError("it draws random numbers that the generators of torch and Python do not decide")
        if not bool(first.weights.isfinite().all()):
            raise RejectedError(f"{problem.name} are not finite after {len(problem.gradients)} steps")
        if not outcome.equals(first):
            raise RejectedError(
                "it keeps something between steps outside of its state, which no checkpoint holds: a new optimizer "
                "with a copy of the state goes on differently"
            )
        if torch.equal(first.weights, _run(run_kept, updater, [problem], 0.5)[0].weights):
            raise RejectedError("it ignores the learning rate in param_groups, so that no schedule has an effect")
    _check_joint(updater, problems)


def _check_joint(updater: Updater, problems: Sequence[Problem]) -> None:
    """Reject an optimizer for which it matters which other parameters it has."""
    shape = problems[-1].weights.shape
    first, second = (
        _run(run_kept, updater, [*problems, create_problem("another", shape, seed)])[:-1] for seed in (7, 8)
    )
    for problem, one, other in zip(problems, first, second, strict=True):
        alone = _run(run_rebuilt, updater, problem)
        same = one.equals(other) and one.agrees(alone.weights)
        if not (same or (updater.traits.is_random and _is_within_noise(updater, problem, one, other))):
            raise RejectedError(
                "it needs several parameters jointly (a norm of all of them, for example), which ranks and stages of a "
                "pipeline do not have"
            )


def _is_within_noise(updater: Updater, problem: Problem, one: Outcome, other: Outcome) -> bool:
    """Return whether two outcomes of a random optimizer differ as those of different random numbers do."""
    renamed = _run(run_rebuilt, updater, problem._replace(name="renamed"))
    noise = (_run(run_rebuilt, updater, problem).weights - renamed.weights).abs().max()
    return bool((one.weights - other.weights).abs().max() <= NOISE * noise)


def _check_leaves(problem: Problem, outcome: Outcome, settled: int) -> None:
    """Reject a state whose leaves still change late, or after other numbers of updates than those of small tensors."""
    last = outcome.leaves[-1]
    for step, leaves in enumerate(outcome.leaves[settled - 1 :], start=settled):
        if leaves != last or settled > LATEST_SETTLED:
            changed = sorted(n for n in leaves.keys() | last.keys() if leaves.get(n) != last.get(n))
            name = changed[0] if changed else "a leaf"
            raise RejectedError(f"its state of {problem.name} has no fixed structure: {name} differs after step {step}")


def _run_seeded(updater: Updater, problem: Problem, seed: int) -> Outcome:
    torch.manual_seed(seed)
    random.seed(seed)
    outcome: Outcome = _run(run_kept, updater, [problem])[0]
    return outcome


def _is_identical(first: Outcome, second: Outcome) -> bool:
    """Return whether weights have the same bits."""
    return torch.equal(first.weights, second.weights) or bool(first.weights.isnan().any())


def _find_split(
    updater: Updater,
    problems: Sequence[Problem],
    outcomes: Sequence[Outcome],
    shapes: Mapping[str, tuple[int, ...]],
    is_stacked: bool,
) -> tuple[str, str]:
    """Return what the optimizer updates by itself, and what shows it; steps 6 and 7 of the module."""
    broken = next(_find_broken_parts(updater, problems, outcomes), None)
    if broken is None:
        large = [_enlarge(shapes, problem) for problem in problems]
        broken = next(_find_broken_parts(updater, large, [_run(run_rebuilt, updater, p) for p in large]), None)
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


def _enlarge(shapes: Mapping[str, tuple[int, ...]], problem: Problem) -> Problem:
    dimensions = problem.weights.dim()
    if dimensions == 3:
        return problem
    sizes = [s[-dimensions:] for s in shapes.values() if len(s) >= dimensions]
    shape = _shrink(max(sizes, key=lambda s: s[0]), LARGEST_ELEMENTWISE_SIDE)
    return create_problem(problem.name, shape, dimensions, LARGE_STEPS)


def _find_broken_parts(updater: Updater, problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield which parts by themselves differ from the whole."""
    for problem, outcome in zip(problems, outcomes, strict=True):
        for dimension, length in enumerate(problem.weights.shape):
            for sizes in _list_sizes(length):
                parts = [_run(run_rebuilt, updater, part) for part in problem.split(sizes, dimension)]
                what = f"{sizes[0]} of {length} {('rows', 'columns', 'last columns')[dimension]} of {problem.name}"
                if (difference := _find_difference(outcome, parts, dimension)) is not None:
                    yield f"{what} {difference}"


def _list_sizes(length: int) -> list[list[int]]:
    """Return how a dimension is split: into halves, and into one and the rest."""
    return [] if length < 2 else [[length // 2, length - length // 2], [1, length - 1]]


def _find_difference(whole: Outcome, parts: Sequence[Outcome], dimension: int) -> str | None:
    """Return how parts along a dimension differ from the whole; None: they are the same."""
    if any(leaf.shape != part.weights.shape for part in parts for leaf in part.leaves[-1].values() if leaf.shape):
        return "have a state of another shape than theirs"
    first = parts[0]
    joined = {
        name: torch.cat([part.state[name] for part in parts], dimension)  # type: ignore[misc]
        if first.leaves[-1][name].kind == "tensor"
        else value
        for name, value in first.state.items()
    }
    weights = torch.cat([part.weights for part in parts], dimension)
    same = all(whole.equals(Outcome(weights, whole.start, joined | _pick_scalars(p), p.leaves)) for p in parts)
    return None if same else "by themselves become something else than in the whole"


def _pick_scalars(part: Outcome) -> dict[str, Any]:
    return {name: part.state[name] for name in part.list_scalars()}


def _is_stack_of_matrices(updater: Updater, stack: Problem) -> bool:
    """Return whether a stack becomes what its matrices become, each by itself, with equal scalars."""
    try:
        whole, parts = run_rebuilt(updater, stack), [run_rebuilt(updater, part) for part in stack.unbind()]
    except Exception:  # the class does not take stacks, and this model has none
        return False
    same = all(part.list_scalars() == parts[0].list_scalars() for part in parts)
    stacked = torch.stack([part.weights for part in parts])
    return same and whole.agrees(stacked)


def _check_scalars(updater: Updater, matrices: Sequence[Problem]) -> None:
    """Reject scalars of a state that differ between the matrices of a stack."""
    for problem in matrices:
        other = create_problem(problem.name, problem.weights.shape, 11)
        first, second = (_run(run_rebuilt, updater, p).list_scalars() for p in (problem, other))
        if differing := [name for name in first if first[name] != second.get(name)]:
            raise RejectedError(f"its scalar {differing[0]} differs between matrices, such as those of experts")


def _measure_bytes(
    updater: Updater, verdict: Verdict, shapes: Mapping[str, tuple[int, ...]], is_stacked: bool
) -> Verdict:
    """Return the verdict with the bytes of state of a model's parameters.

    Args:
        shapes: of the parameters that it updates, by name.
        is_stacked: see `classify`.
    """
    known: dict[tuple[int, ...], float] = {}
    totals = {True: [0.0, 0], False: [0.0, 0]}
    largest = (0, 0.0)
    for name, shape in shapes.items():
        elements = int(torch.Size(shape).numel())
        if shape not in known:
            known[shape] = _count_state_bytes(updater, shape, is_stacked)
        total = totals[is_block_matrix(name, len(shape))]
        total[0] += known[shape]
        total[1] += elements
        largest = max(largest, (elements, known[shape]))
    if is_stacked:  # the others have AdamW's
        totals[False] = [2 * FP32_BYTES, 1]
    per_element = {key: total / count if count else 0.0 for key, (total, count) in totals.items()}
    gathered = largest if verdict.split != "elements" else (0, 0.0)
    return verdict._replace(
        matrix_bytes=per_element[True], other_bytes=per_element[False], largest=gathered[0], largest_bytes=gathered[1]
    )


def _count_state_bytes(updater: Updater, shape: tuple[int, ...], is_stacked: bool) -> float:
    """Return the bytes of a parameter's state, without computing it where the optimizer allows that."""
    if is_stacked and len(shape) == 3:
        return shape[0] * _count_state_bytes(updater, shape[1:], is_stacked)
    try:
        return probe_templates(updater, shape, torch.device("cpu"), is_fake_only=True)[-1].count_bytes()
    except Exception:  # as many per element as a small one has
        small = _shrink(shape, LARGEST_SIDE)
        share = torch.Size(shape).numel() / torch.Size(small).numel()
        return share * probe_templates(updater, small, torch.device("cpu"))[-1].count_bytes()
