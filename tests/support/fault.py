"""What a planted fault is: where, what instead of what, and the tests that must find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: what is wrong.
        file: a pattern of files below the repository's root.
        old, new: the text, and what stands in its place.
        tests: those that must find it, as pytest takes them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def define_fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(
        name, file, old, new, tuple(test if test.startswith("experiments/") else f"tests/{test}" for test in tests)
    )
