"""A pytest plugin that measures the CPU time of tests and of shared fixtures, with that of all processes they start.

`--slowest N` prints the N that take most, and `--cpu-limit S` fails the session where a test or fixture takes more than
S seconds. CPU time, unlike time, hardly depends on what else the machine does; on a machine that is slower than the one
of docs/benchmarks.md, by a loop of Python, the limit is larger in proportion. A fixture that several tests share has a
line of its own and does not count for the test that happens to need it first; its end counts for the last.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
LOOP, LOOP_SECONDS = 400_000, 0.009
"""Rounds of a loop of Python, and the CPU time that they take on the machine of docs/benchmarks.md."""
KEY = "cpu_seconds"
"""In what a worker of pytest-xdist returns: pairs of a name and seconds, of all and of those above the limit."""


def list_descendants(pid: int) -> list[int]:
    """Return the processes below one, without those that its dead children left to others.

    A process that ends before its parent waits for it is still there; one whose parent never does is lost.
    """
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                pids += [child, *list_descendants(child)]
    return pids


def measure_cpu_seconds() -> float:
    """Return what this process, its ended children and its live descendants have taken."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for pid in list_descendants(os.getpid()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / TICKS
    return total


def measure_slowness() -> float:
    """Return how many times slower than the machine of docs/benchmarks.md this one is now; 1 where it is faster."""
    start, total = time.process_time(), 0
    for number in range(LOOP):
        total += number
    return max(1.0, (time.process_time() - start) / LOOP_SECONDS)


class CpuTime:
    """Measures in each worker, and reports in the process that has the terminal."""

    def __init__(self, slowest: int, limit: float | None) -> None:
        self.slowest = slowest
        self.limit = limit
        self.inner = [0.0]  # of what is being measured, from the outermost inwards: seconds of the fixtures in it
        self.measured: list[tuple[str, float]] = []
        self.above: list[tuple[str, float]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        """Measure fixtures that tests share."""
        if fixturedef.scope == "function":
            return (yield)
        name = f"{fixturedef.func.__module__.replace('.', '/')}.py::{fixturedef.argname} (fixture)"
        with self._measure(name):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure a test with its own fixtures."""
        with self._measure(item.nodeid):
            return (yield)

    @contextlib.contextmanager
    def _measure(self, name: str) -> Generator[None, None, None]:
        start_seconds = measure_cpu_seconds()
        self.inner.append(0.0)
        try:
            yield
        finally:
            within, seconds = self.inner.pop(), measure_cpu_seconds() - start_seconds
            self.inner[-1] += seconds
            own_seconds = max(seconds - within, 0.0)  # a process that was lost took its time along
            self.measured.append((name, own_seconds))
            if self.limit is not None and own_seconds > self.limit * measure_slowness():
                self.above.append((name, own_seconds))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the figures to the process that has the terminal; there, fail the session for those above the limit."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[KEY] = [self.measured, self.above]
        elif self.above and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the figures of a worker of pytest-xdist."""
        measured, above = getattr(node, "workeroutput", {}).get(KEY, ([], []))
        self.measured += measured
        self.above += above

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the tests and fixtures that take most, and those above the limit."""
        write = terminalreporter.write_line
        ordered = sorted(self.measured, key=lambda pair: -pair[1])
        total = sum(seconds for _, seconds in ordered)
        terminalreporter.section(f"CPU time: {total:.0f} s in {len(ordered):,} tests and shared fixtures")
        for name, seconds in ordered[: self.slowest]:
            write(f"{seconds:6.2f} s  {name}")
        for name, seconds in self.above:
            write(f"FAILED {name}: {seconds:.1f} s of CPU time, more than {self.limit:g} s")


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's command line."""
    parser.addoption("--slowest", type=int, default=0, help="print the N tests that take most CPU time")
    parser.addoption("--cpu-limit", type=float, help="fail where a test takes more than so many seconds of CPU time")


def register(config: pytest.Config) -> None:
    """Measure, where an option asks for it."""
    slowest, limit = config.getoption("--slowest"), config.getoption("--cpu-limit")
    if slowest or limit is not None:
        config.pluginmanager.register(CpuTime(slowest, limit), "cpu-time")
