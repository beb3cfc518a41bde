"""Faults planted in a copy of the repository, each of which tests of the quick tier must find.

`python -m tests.support.planted [NAME...]` plants those whose names hold one of the texts, or all, runs the tests that
each names, and prints a table: the fault, the test that found it, and seconds. It fails where a fault was not found,
where its text or tests are no longer there, and where a named test fails without any fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.support import tiers

ROOT = Path(__file__).resolve().parents[2]


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


FAULTS = tuple(
    Fault(**{**fault, "tests": tuple(fault["tests"])})
    for fault in tomllib.loads((ROOT / "tests/support/faults.toml").read_text(encoding="utf-8"))["fault"]
)
LIMIT = 1800.0
"""Seconds after which tests that have not ended count as failed: a fault may make them wait for each other."""
WAIT = 60.0
"""Seconds after which such a test gives up waiting; five times those of the slowest test without a fault, where these
are more."""
PASSED, FAILED = 0, 1
"""pytest's exit codes; any other means that it ran none of the tests."""


@dataclass(frozen=True)
class FaultOutcome:
    """What came of a fault.

    Attributes:
        fault: the fault.
        caught: whether a test failed.
        by: the first test that failed, or why none could.
        seconds: how long the tests ran.
    """

    fault: Fault
    caught: bool
    by: str
    seconds: float = 0.0

    def format_row(self) -> str:
        """The outcome as a line of the table."""
        return f"| {self.fault.name} | {self.by if self.caught else f'NOT CAUGHT: {self.by}'} | {self.seconds:.0f} |"


def copy_repository(folder: Path) -> Path:
    """Copy the files of the repository that git knows or does not ignore, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def find_file(fault: Fault, root: Path) -> Path:
    """Find the file of a fault.

    Raises:
        LookupError: when the text does not occur exactly once in the files of the pattern.
    """
    files = [file for file in root.glob(fault.file) if file.is_file()]
    counts = {file: file.read_text().count(fault.old) for file in files}
    if sum(counts.values()) != 1:
        raise LookupError(f"the text occurs {sum(counts.values())} times in {fault.file}")
    return next(file for file, count in counts.items() if count)


@contextmanager
def plant_fault(fault: Fault, root: Path) -> Iterator[None]:
    """Have a fault in a copy of the repository."""
    file = find_file(fault, root)
    original = file.read_text()
    file.write_text(original.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(original)


def run_tests(tests: Sequence[str], root: Path, *options: str, wait: float = LIMIT) -> tuple[int, str]:
    """Run tests of the quick tier in a copy; the exit code and the output. Those that do not end count as failed.

    Args:
        tests: their names.
        root: the copy.
        options: of pytest.
        wait: seconds after which a test gives up waiting.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "-rf", *options, *tests]
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "TITAN_EXAMPLES": "quick"}
    env["TITAN_TESTS_LIMIT"] = str(wait)
    env[tiers.VARIABLE] = "quick"
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output = process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return FAILED, f"FAILED {tests[0]} - no end after {LIMIT:.0f} seconds"
    return process.returncode, output


def parse_failures(output: str) -> list[str]:
    """The tests that failed, or could not be set up, by pytest's summary."""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?:(?: -|:) .*)?$", output, flags=re.MULTILINE)
    return list(dict.fromkeys(found))


def judge_fault(fault: Fault, root: Path, wait: float = WAIT) -> FaultOutcome:
    """Plant a fault and run its tests."""
    start = time.monotonic()
    try:
        with plant_fault(fault, root):
            code, output = run_tests(fault.tests, root, "-x", wait=wait)
    except LookupError as error:
        return FaultOutcome(fault, False, str(error))
    seconds = time.monotonic() - start
    failed = parse_failures(output)
    if code == FAILED and failed:
        return FaultOutcome(fault, True, failed[0], seconds)
    reason = "its tests passed" if code == PASSED else " ".join(output.split())[-200:]
    return FaultOutcome(fault, False, reason, seconds)


def list_broken(faults: Sequence[Fault], root: Path) -> tuple[list[str], float]:
    """Run the tests of all faults with none planted; those that fail, and the seconds of the slowest."""
    tests = sorted({test for fault in faults for test in fault.tests})
    code, output = run_tests(tests, root, "--durations=1", "--durations-min=0")
    broken = parse_failures(output) if code == FAILED else [] if code == PASSED else [output[-2000:]]
    return broken, max((float(s) for s in re.findall(r"^([\d.]+)s call ", output, flags=re.MULTILINE)), default=0.0)


def judge_faults(faults: Sequence[Fault], roots: Sequence[Path], wait: float = WAIT) -> Iterator[FaultOutcome]:
    """Judge faults, as many at a time as there are copies, in their order."""
    free: SimpleQueue[Path] = SimpleQueue()
    for root in roots:
        free.put(root)

    def judge_in_copy(fault: Fault) -> FaultOutcome:
        root = free.get()
        try:
            return judge_fault(fault, root, wait)
        finally:
            free.put(root)

    with ThreadPoolExecutor(len(roots)) as pool:
        yield from pool.map(judge_in_copy, faults)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults that are asked for; 1 where one was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts, one of which a fault's name holds; none: all faults")
    parser.add_argument("--part", default="1/1", help="K/N: of these faults, one part in N")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time, each in a copy of its own")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    args = parser.parse_args(arguments)
    faults = [f for f in FAULTS if not args.names or any(name in f.name for name in args.names)]
    if not faults:
        parser.error(f"no fault's name holds one of {args.names}")
    faults = tiers.take_part(faults, args.part)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        roots = [copy_repository(Path(folder) / str(i)) for i in range(min(args.jobs, len(faults)))]
        broken, slowest = ([], LIMIT) if args.trust else list_broken(faults, roots[0])
        for test in broken:
            print(f"fails without a fault: {test}", flush=True)
        print("| fault | caught by | seconds |\n| --- | --- | --- |", flush=True)
        missed = 0
        for outcome in judge_faults(faults, roots, max(WAIT, 5 * slowest)):
            missed += not outcome.caught
            print(outcome.format_row(), flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were caught", flush=True)
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
