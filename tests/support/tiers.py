"""Which tests `make test` runs, and marks by what a test uses.

The quick tier has every law and every mechanism once. Tests with the mark `full` are further cases of what it has;
only `make test-all` runs them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest

FULL = pytest.mark.full
USES = {
    "ranks": {"tests.support.ranks.run_ranks"},
    "compile": {"torch.compile", "titan.compile.backend.compile_stage"},
    "process": {"tests.support.processes.program", "subprocess.run", "subprocess.Popen"},
    "slurm": {"tests.support.slurm_cluster.Slurm"},
    "docs": {"tests.test_docs.train_small"},
}
"""Functions and classes by the mark of tests that reach one of them through the code of tests and fixtures."""


def sampled(cases: Iterable[Any], *quick: object) -> list[Any]:
    """Return parameters of which only those in `quick` run in the quick tier; the others get the mark `full`.

    Args:
        cases: values, tuples of values or `pytest.param`s.
        quick: ids of `pytest.param`s, or values.

    Raises:
        ValueError: if there is no such case, for example because it was renamed.
    """
    given = list(cases)
    names = [_name(case) for case in given]
    if unknown := [name for name in quick if name not in names]:
        raise ValueError(f"no such cases: {unknown}; there are {names}")
    return [case if name in quick else _full(case) for case, name in zip(given, names, strict=True)]


def _name(case: Any) -> object:
    return case.id or _value(case.values) if _is_param(case) else case


def _value(values: tuple[object, ...]) -> object:
    return values[0] if len(values) == 1 else values


def _is_param(case: Any) -> bool:
    return hasattr(case, "marks") and hasattr(case, "values")


def _full(case: Any) -> Any:
    if _is_param(case):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, FULL])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=FULL)


def marks_of_item(item: pytest.Item) -> set[str]:
    """Return the marks of a test by the helpers that it or one of its fixtures reaches."""
    if not isinstance(item, pytest.Function):
        return set()
    fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    functions = [f for f in (item.function, *fixtures) if f.__module__.startswith("tests.")]
    return set[str]().union(*map(marks_of, functions))


def marks_of(function: Callable[..., Any]) -> set[str]:
    """Return the marks of a test function by the helpers that it reaches."""
    reached = _reached(getattr(function, "__func__", function))
    return {mark for mark, names in USES.items() if names & reached}


@cache
def _reached(function: types.FunctionType) -> frozenset[str]:
    """Return the qualified names of what a function of tests/ uses, itself or through others of tests/."""
    found: set[str] = set()
    left, seen = [function], {function}
    while left:
        for used in _used(left.pop()):
            found.add(f"{getattr(used, '__module__', '')}.{getattr(used, '__qualname__', '')}")
            inner = [used, *vars(used).values()] if isinstance(used, type) else [used]
            more = {f for f in inner if isinstance(f, types.FunctionType) and f.__module__.startswith("tests.")}
            left += more - seen
            seen |= more
    return frozenset(found)


def _used(function: types.FunctionType) -> Iterator[Any]:
    """Yield the objects that a function's code names: globals, and attributes of modules."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    known = function.__globals__
    for code in _codes(function.__code__):
        modules = [known[n] for n in code.co_names if isinstance(known.get(n), types.ModuleType)]
        for name in code.co_names:
            if name in known:
                yield known[name]
            yield from (vars(module)[name] for module in modules if name in vars(module))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
