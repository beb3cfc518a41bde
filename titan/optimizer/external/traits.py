"""Find what an optimizer keeps beside its state, whether it is random, and when its state is settled.

This is computed on a vector and a matrix of a few elements.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Sequence

import torch

from titan.optimizer.external.constructor import Constructor
from titan.optimizer.external.experiment import Outcome, Problem, create_problem, list_rates, run_kept, run_rebuilt
from titan.optimizer.external.state import Traits, Updater, read_counters, read_extras

STEPS = 9
"""Steps of a run."""
SHAPES = ((20,), (20, 14))
"""Shapes of the computed parameters; a class need not accept both."""


def find_traits(constructor: Constructor, lr: float, weight_decay: float, dimensions: Sequence[int]) -> Traits:
    """Return the traits of an optimizer.

    Args:
        lr: the peak learning rate.
        dimensions: of the parameters that it updates, such as (1, 2).
    """
    problems = [create_problem(f"{len(s)}", s, len(s), STEPS) for s in SHAPES if len(s) in dimensions] or [
        create_problem("2", SHAPES[-1], 2, STEPS)
    ]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        updater = Updater(constructor, Traits(), lr, weight_decay)
        found = [_find_of_problem(updater, problem) for problem in problems]
    return Traits(
        counters=tuple(sorted({key for traits in found for key in traits.counters})),
        extras=tuple(sorted({key for traits in found for key in traits.extras})),
        is_random=any(traits.is_random for traits in found),
        settled=max(traits.settled for traits in found),
        is_alone=any(traits.is_alone for traits in found),
    )


def _find_of_problem(updater: Updater, problem: Problem) -> Traits:
    is_random = _is_random(updater, problem)
    counters, extras = _list_changing(updater, problem)
    updater = updater._replace(traits=Traits(counters, extras, is_random))
    kept = run_kept(updater, [problem])[0]
    keys = {*(("group", key) for key in counters), *(("extra", key) for key in extras)}
    needed = keys if keys and not _continues(updater, problem, kept, keys) else set()
    for pair in sorted(needed):  # one after the other: some follow from others
        dropped = keys - needed | {pair}
        needed = needed - {pair} if _continues(updater, problem, kept, dropped) else needed
    counters, extras = (tuple(k for kind, k in sorted(needed) if kind == name) for name in ("group", "extra"))
    traits = Traits(counters, extras, is_random)
    updater = updater._replace(traits=traits)
    alone = run_rebuilt(updater, problem)
    both = run_kept(updater, [problem, problem._replace(name="another")])
    is_alone = any(outcome.leaves[-1] != alone.leaves[-1] for outcome in both)
    return traits._replace(settled=_find_settled(alone), is_alone=is_alone)


def _is_random(updater: Updater, problem: Problem) -> bool:
    outcomes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        outcomes.append(run_kept(updater, [problem])[0].weights)
    return not torch.equal(*outcomes) and not bool(outcomes[0].isnan().any())


def _list_changing(updater: Updater, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the numbers of the group, and of what `state_dict` has beside it, that steps change."""
    parameter = torch.nn.Parameter(problem.weights.clone())
    optimizer = updater.build([parameter], {})
    kinds = (read_counters, read_extras)
    before, changed = [dict(read(optimizer)) for read in kinds], (set[str](), set[str]())
    for step, rates in enumerate(list_rates(updater, len(problem.gradients))):
        parameter.grad = problem.gradients[step].clone()
        updater.set_rates(optimizer, rates)
        updater.step(optimizer, "")
        for read, old, names in zip(kinds, before, changed, strict=True):
            names |= {key for key, value in read(optimizer).items() if old.get(key) != value}
    return tuple(sorted(changed[0])), tuple(sorted(changed[1]))


def _continues(updater: Updater, problem: Problem, kept: Outcome, dropped: Collection[tuple[str, str]]) -> bool:
    """Return whether new optimizers, which do not get the dropped numbers, do and count what one that is kept does."""
    try:
        return kept.equals(run_rebuilt(updater, problem, dropped=dropped))
    except Exception:  # a number that it needs is missing
        return False


def _find_settled(outcome: Outcome) -> int:
    """Return the number of updates from which on the leaves stay the same."""
    last = outcome.leaves[-1]
    return 1 + max((i + 1 for i, leaves in enumerate(outcome.leaves) if leaves != last), default=0)
