"""Which tests `make test` runs, and marks by what a test uses.

The quick tier has every law and every mechanism once. Tests with the mark `full`, which full.txt names, are further
cases of the same; only `make test-rest` and `make test-all` run them. Of large tables `make test-rest` has a sample;
the other cases have the mark `thorough`, and only `make test-all` runs them.
"""

from __future__ import annotations

import re
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NO_TEST = pytest.StashKey[list[str]]()
"""In a session's configuration: what `names_no_test` found."""
LEFT_OUT = Path(__file__).parents[1] / "full.txt"
USES = {
    "ranks": {"tests.support.ranks.run_ranks"},
    "compile": {"torch.compile", "titan.compile.backend.compile_stage"},
    "process": {"tests.support.processes.program", "subprocess.run", "subprocess.Popen"},
    "slurm": {"tests.support.slurm_cluster.Slurm"},
    "docs": {"tests.test_docs.train_small"},
}
"""Functions and classes by the mark of tests that reach one of them through the code of tests and fixtures."""


@dataclass(frozen=True)
class Rule:
    """A line of full.txt.

    Attributes:
        pattern: of tests, in which only * has a meaning.
        full: whether they are left out of the quick tier, or taken back.
        one_in: of the tests that the pattern matches, one in so many stays: in the quick tier, or in `make test-rest`.
        thorough: whether the others are left out of `make test-rest` too.
    """

    pattern: str
    full: bool
    one_in: int | None = None
    thorough: bool = False

    @property
    def file(self) -> str:
        """The file of the tests, below tests/."""
        return self.pattern.partition("::")[0]

    def matches(self, test: str) -> bool:
        """Return whether the pattern stands for a test."""
        return re.fullmatch(re.escape(self.pattern).replace(r"\*", ".*"), test, re.DOTALL) is not None

    def decide(self, test: str) -> bool:
        """Return whether a test that the pattern matches is left out; a sample is drawn by a hash of its name."""
        return self.full and (self.one_in is None or zlib.crc32(test.encode()) % self.one_in != 0)


@cache
def rules() -> dict[str, list[Rule]]:
    """Return the lines of full.txt by file, in their order."""
    found: dict[str, list[Rule]] = {}
    for line in LEFT_OUT.read_text().splitlines():
        if line and not line.startswith("#"):
            mark, pattern = line.split(" ", 1) if line[0] in "~+" else ("", line)
            one_in = int(mark[1:]) if mark else None
            rule = Rule(pattern.removeprefix("!"), not pattern.startswith("!"), one_in, mark.startswith("+"))
            found.setdefault(rule.file, []).append(rule)
    return found


def left_out(test: str) -> bool:
    """Return whether the last line of full.txt that matches FILE::TEST leaves it out of the quick tier."""
    full = False
    for rule in rules().get(test.partition("::")[0], ()):
        if not rule.thorough and rule.matches(test):
            full = rule.decide(test)
    return full


def thorough(test: str) -> bool:
    """Return whether a test that is left out of the quick tier is left out of `make test-rest` too."""
    lines = [rule for rule in rules().get(test.partition("::")[0], ()) if rule.thorough and rule.matches(test)]
    return left_out(test) and bool(lines) and lines[-1].decide(test)


def names_no_test(items: list[pytest.Item]) -> list[str]:
    """Return the patterns of full.txt that match no test of the collected files, and those of files that are gone."""
    by_file: dict[str, list[str]] = {}
    for name in map(name_of, items):
        by_file.setdefault(name.partition("::")[0], []).append(name)
    found = []
    for file, lines in rules().items():
        gone = not (LEFT_OUT.parent / file).is_file()
        names = by_file.get(file)
        found += [r.pattern for r in lines if gone or (names is not None and not any(map(r.matches, names)))]
    return found


def name_of(item: pytest.Item) -> str:
    """Return FILE::TEST of a test, with its file below tests/."""
    return item.nodeid.removeprefix("tests/")


def marks_of_item(item: pytest.Item) -> set[str]:
    """Return the marks of a test: by full.txt, and by the helpers that it or one of its fixtures reaches."""
    name = name_of(item)
    tier = {"full"} if left_out(name) else set[str]()
    tier |= {"thorough"} if thorough(name) else set()
    if not isinstance(item, pytest.Function):
        return tier
    fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    functions = [f for f in (item.function, *fixtures) if f.__module__.startswith("tests.")]
    return tier.union(*map(marks_of, functions))


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
