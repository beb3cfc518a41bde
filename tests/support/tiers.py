"""Which tests run: the quick tier (`make test`), the rest (`make test-rest`) or all (`make test-all`).

The quick tier has every law, what finds the planted faults, and most mechanisms once, as far as three minutes go. Tests
and cases with the mark `full` are further ones. `make test-rest`, which CI runs too, runs one part in `ROTATION` of
them: that of the number `rotation` in pyproject.toml, which each change raises by one, so that `ROTATION` changes run
all of them. `PART=K/N` chooses a part by itself, of the rest or of all tests. Cases of large tables are generated only
for the tier that runs them (`select_cases`, `list_further`): pytest takes longer to collect a case than some take to
run.
"""

from __future__ import annotations

import os
import tomllib
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
VARIABLE = "TITAN_TESTS"
"""The environment variable that names the tier."""
PART = "TITAN_PART"
"""The environment variable that names the part, K/N."""
TIERS = ("quick", "rest", "all")
ROTATION = 12
"""Of the further cases, a change tests one in so many."""
CHOSEN = "in_part"
"""The mark of cases that were chosen when their table was generated."""


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


def format_rotation() -> str:
    """Return the part, K/N, of this change."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    return f"{settings['tool']['titan']['rotation'] % ROTATION + 1}/{ROTATION}"


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and of how many it is one.

    Raises:
        pytest.UsageError: for a text that is not K/N.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"{PART}={text}: no part; give K/N, as 1/{ROTATION}.")
    return int(number) - 1, int(count)


def choose_part() -> tuple[int, int]:
    """Return the part that this session runs: its number, from 0, and of how many it is one."""
    return parse_part(os.environ.get(PART) or (format_rotation() if choose_tier() == "rest" else "1/1"))


def take_part(cases: Sequence[T], text: str) -> list[T]:
    """Return a part, K/N, of the cases of a program, at least one."""
    number, count = parse_part(text)
    return list(cases[number::count] or cases[number % len(cases) :][:1])


def _is_in_part(name: str) -> bool:
    number, count = choose_part()
    return zlib.crc32(name.encode()) % count == number


def select_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that belong to the tier and part that this session runs, in their order."""
    tier, selected = choose_tier(), []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if (tier == "all" or ("full" in marks) == (tier == "rest")) and (CHOSEN in marks or _is_in_part(item.nodeid)):
            selected.append(item)
    return selected


def full(*values: Any, id: str | None = None, marks: Any = ()) -> Any:
    """Return a case that `make test` leaves out: `pytest.param` with the mark `full`."""
    other_marks = marks if isinstance(marks, list | tuple) else [marks]
    return pytest.param(*values, id=id, marks=[pytest.mark.full, *other_marks])


def list_further(generate: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return the cases of a large table that `make test` leaves out, generated only where they run.

    Args:
        generate: returns the cases, each a `pytest.param` with an id.
    """
    if choose_tier() == "quick":
        return []
    marks = [pytest.mark.full, getattr(pytest.mark, CHOSEN)]
    return [pytest.param(*c.values, id=c.id, marks=[*c.marks, *marks]) for c in generate() if _is_in_part(str(c.id))]


def select_cases(cases: Iterable[Any], quick: Sequence[str]) -> list[Any]:
    """Return the cases of a large table: those that `make test` runs, and in other tiers `list_further` ones.

    Args:
        cases: each a `pytest.param` with an id, or a text that is its own id.
        quick: the ids of those that `make test` runs.

    Raises:
        LookupError: where `quick` names no case, so that none is lost when cases are renamed.
    """
    named = [pytest.param(case, id=case) if isinstance(case, str) else case for case in cases]
    if unknown := set(quick) - {case.id for case in named}:
        raise LookupError(f"no such cases: {', '.join(sorted(unknown))}")
    return [
        *(case for case in named if case.id in quick),
        *list_further(lambda: [case for case in named if case.id not in quick]),
    ]


if __name__ == "__main__":
    print(format_rotation())
