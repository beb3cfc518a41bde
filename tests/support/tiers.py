"""Which tests run: the quick tier (`make test`), the rest (`make test-rest`) or all (`make test-all`).

The quick tier has every law, what finds the planted faults, and most mechanisms once, as far as four minutes go. Tests
and cases with the mark `full` are further ones: `make test-rest`, which CI runs too, runs one in `ONE_IN` of the cases
of each test. Those with the mark `thorough` are beyond these, and only `make test-all` runs them. Cases of large tables
are generated only for the tier that runs them (`select_cases`, `list_further`): pytest takes longer to collect a case
than some take to run.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

VARIABLE = "TITAN_TESTS"
"""The environment variable that names the tier."""
TIERS = ("quick", "rest", "all")
ONE_IN = 6
"""Of the further cases of a test, `make test-rest` runs one in so many, and at least one."""
EVERY = "every_case"
"""The mark of tests of which it runs all."""


def choose_tier() -> str:
    """Return the tier that this session runs.

    Raises:
        pytest.UsageError: for an unknown name.
    """
    tier = os.environ.get(VARIABLE, "quick")
    if tier not in TIERS:
        raise pytest.UsageError(f"{VARIABLE}={tier}: no such tier; choose one of {', '.join(TIERS)}.")
    return tier


def choose_by_arguments(arguments: Sequence[str]) -> None:
    """Choose all tiers where the command line names a case, as in `FILE::TEST[CASE]`, and the environment no tier."""
    if VARIABLE not in os.environ and any(argument.endswith("]") for argument in arguments):
        os.environ[VARIABLE] = "all"


def select_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that belong to the tier that this session runs, in their order."""
    tier, marks_of = choose_tier(), {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    if tier == "all":
        return list(items)
    in_tier = [
        i for i in items if "thorough" not in marks_of[i.nodeid] and ("full" in marks_of[i.nodeid]) == (tier == "rest")
    ]
    if tier == "quick":
        return in_tier
    sample = _sample_cases([item.nodeid for item in in_tier if EVERY not in marks_of[item.nodeid]])
    return [item for item in in_tier if EVERY in marks_of[item.nodeid] or item.nodeid in sample]


def _sample_cases(names: Iterable[str]) -> set[str]:
    """Return one in `ONE_IN` of the cases of each test, and at least one, chosen by a hash of their names."""
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    return {
        name
        for of_test in cases.values()
        for name in sorted(of_test, key=_hash_name)[: math.ceil(len(of_test) / ONE_IN)]
    }


def _hash_name(name: str) -> int:
    return zlib.crc32(name.encode())


def full(*values: Any, id: str | None = None, marks: Any = ()) -> Any:
    """Return a case that `make test` leaves out: `pytest.param` with the mark `full`."""
    other_marks = marks if isinstance(marks, list | tuple) else [marks]
    return pytest.param(*values, id=id, marks=[pytest.mark.full, *other_marks])


def thorough(*values: Any, id: str | None = None) -> Any:
    """Return a case that only `make test-all` runs: one more of a mechanism that takes long."""
    return pytest.param(*values, id=id, marks=pytest.mark.thorough)


def list_further(generate: Callable[[], Iterable[Any]], one_in: int = 1, rest: Sequence[str] = ()) -> list[Any]:
    """Return the cases of a large table that `make test` leaves out, generated only where they run.

    Args:
        generate: returns the cases, each a `pytest.param` with an id.
        one_in: `make test-rest` runs one in so many, chosen by a hash of their ids; 1: as of any test (`ONE_IN`).
        rest: the ids of those that `make test-rest` runs in any case.
    """
    if choose_tier() == "quick":
        return []
    marked = [
        _mark_further(c, c.id in rest or _hash_name(str(c.id)) % one_in == 0, one_in > 1 or c.id in rest)
        for c in generate()
    ]
    return [case for case, in_sample in marked if in_sample or choose_tier() == "all"]


def _mark_further(case: Any, in_sample: bool, is_chosen: bool) -> tuple[Any, bool]:
    """Mark a case; one that `is_chosen` by its table is not sampled again."""
    marks = [pytest.mark.full if in_sample else pytest.mark.thorough]
    every = [getattr(pytest.mark, EVERY)] if is_chosen else []
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, *marks, *every]), in_sample


def select_cases(cases: Iterable[Any], quick: Sequence[str], one_in: int = 1, rest: Sequence[str] = ()) -> list[Any]:
    """Return the cases of a large table: those that `make test` runs, and in other tiers `list_further` ones.

    Args:
        cases: each a `pytest.param` with an id, or a text that is its own id.
        quick: the ids of those that `make test` runs.
        one_in: of the others, `make test-rest` runs one in so many; 1: as of any test (`ONE_IN`).
        rest: the ids of others that `make test-rest` runs in any case.

    Raises:
        LookupError: where `quick` or `rest` names no case, so that none is lost when cases are renamed.
    """
    named = [pytest.param(case, id=case) if isinstance(case, str) else case for case in cases]
    if unknown := {*quick, *rest} - {case.id for case in named}:
        raise LookupError(f"no such cases: {', '.join(sorted(unknown))}")
    chosen_ones = [case for case in named if case.id in quick]
    return [*chosen_ones, *list_further(lambda: [case for case in named if case.id not in quick], one_in, rest)]
