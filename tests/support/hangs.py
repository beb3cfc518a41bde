"""Let one rank of a run hang in sixty ways, and report what was said, when, and the exit code: `python -m
tests.support.hangs [NAME ...]`.

Each is a real run (`python -m titan.train ...`) of a tiny model with timeouts of seconds. A rank stops (SIGSTOP), is
killed, or sleeps in its loader, in a save or in the compiler, or enters a collective that the others do not. The right
rank has to be named, and no run may last longer than `cluster.timeout` and 30 seconds, or five times what its start
took, on a slow machine. Each of the thirty is run twice: with gloo's Flight Recorder, and with its content as NCCL's
has it. It takes about twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from tests.support.hanging_rank import PLAN
from tests.support.processes import kill_process, list_descendants, run_program
from tests.support.runs import TINY
from tests.support.tiers import take_part

STEP_TIMEOUT, TIMEOUT, PATIENCE = 12.0, 16.0, 4.0
GRACE = 30.0  # seconds after the timeout by which a run has ended; five times those of its start, where these are more
LONG = 1800.0  # seconds after which a run that is not ended by titan is killed
STEP = 6  # the step in which the rank hangs
LAYOUTS = {
    "fsdp": ("parallelism=fsdp", "cluster.devices=3"),
    "tp": ("parallelism=tp",),
    "pp": ("parallelism=pp", "parallelism.microbatches=4"),
    "3d": ("parallelism=3d", "parallelism.microbatches=2"),
}
RANK = {"fsdp": 1, "tp": 1, "pp": 1, "3d": 5}
READS = {"fsdp": 1, "tp": 0, "pp": 0, "3d": 2}  # a rank that reads data
SAVES = {"off": ("checkpoint=off",), "sync": ("checkpoint=sync",), "async": ("checkpoint=async",)}


@dataclass(frozen=True)
class HangCase:
    """A hang: what happens, in which layout and rank, how it saves, and the form of the recorder."""

    event: str
    layout: str
    save: str
    rank: int
    recorder: str = "gloo"

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.event}, {self.layout}, {self.save}, {self.recorder}"


@dataclass(frozen=True)
class HangResult:
    """What became of it: lines about the hang with the seconds since it began, the exit code, the seconds to the end,
    and those from the program's start to the hang."""

    messages: tuple[tuple[float, str], ...]
    code: int
    seconds: float
    start: float = 0.0

    def holds(self, rank: int) -> bool:
        """Whether the right rank was named, and the run failed in time."""
        in_time = self.seconds < TIMEOUT + max(GRACE, 5 * self.start)
        return self.names_only(rank) and self.code == 1 and in_time

    def names_only(self, rank: int) -> bool:
        """Whether the last line names this rank, and no other."""
        line = self.messages[-1][1] if self.messages else ""
        match = re.search(r"waiting for ranks? (\d+(?:, \d+)*)", line) or re.search(r"rank (\d+) was killed", line)
        return match is not None and match[1] == str(rank)


def list_cases() -> list[HangCase]:
    """Return the thirty hangs, with each form of the recorder."""
    hangs = []
    for layout in LAYOUTS:
        rank = RANK[layout]
        hangs += [HangCase(event, layout, "off", rank) for event in ("stop", "kill", "collective")]
        hangs += [HangCase("stop", layout, "async", rank), HangCase("stop in save", layout, "async", rank)]
        hangs += [HangCase("loader", layout, "off", READS[layout])]
        hangs += [HangCase("save", layout, "sync" if layout in ("fsdp", "pp") else "async", rank)]
    hangs += [HangCase("compile", "fsdp", "off", 1), HangCase("compile", "tp", "off", 1)]
    return [replace(case, recorder=recorder) for recorder in ("gloo", "nccl") for case in hangs]


def build_settings(case: HangCase, directory: Path) -> list[str]:
    """Return the command line of a run."""
    every = f"checkpoint.every={STEP if case.event in ('save', 'stop in save') else 2}"
    compiles = ("compile=block", "compile.backend=eager") if case.event == "compile" else ()
    return [
        *(setting for setting in TINY if not setting.startswith(("training.steps", "model.heads", "model.kv_heads"))),
        "model.heads=4", "model.kv_heads=2", "training.steps=1000000", "metrics.sample_tokens=0",
        f"cluster.step_timeout={STEP_TIMEOUT:g}", f"cluster.timeout={TIMEOUT:g}", f"debug.hang_seconds={PATIENCE:g}",
        f"hydra.run.dir={directory}", *LAYOUTS[case.layout], *SAVES[case.save], *compiles,
        *([every] if case.save != "off" else []),
    ]  # fmt: skip


def run_hang(case: HangCase, directory: Path, overrides: Sequence[str] = ()) -> HangResult:
    """Run one and return what became of it; the hang begins when its metrics stop."""
    plan = {"what": case.event, "rank": case.rank, "step": STEP, "recorder": case.recorder}
    arguments = ["-m", "tests.support.hanging_rank", "train", *build_settings(case, directory), *overrides]
    messages: list[tuple[float, str]] = []
    with run_program(*arguments, env={PLAN: json.dumps(plan)}) as process:
        reader = Thread(target=partial(_collect_messages, process.stderr, messages))
        reader.start()
        began, deadline = time.time(), time.monotonic() + LONG
        start = _find_start(process, directory, messages, deadline)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code, end = process.poll(), time.time()
        for pid in [process.pid, *list_descendants(process.pid)] if code is None else []:
            kill_process(pid)
        reader.join()
    seconds = tuple((moment - start, line) for moment, line in messages)
    return HangResult(seconds, -signal.SIGKILL if code is None else code, end - start, start - began)


def _find_start(process: Any, directory: Path, messages: list[tuple[float, str]], deadline: float) -> float:
    """Return when the last step before the hang was written, or where there was none, when the attempt began."""
    files = (directory / "metrics.jsonl", directory / "run.yaml")
    while process.poll() is None and not messages and time.monotonic() < deadline:
        time.sleep(0.05)
    return next((file.stat().st_mtime for file in files if file.exists()), time.time())


def _collect_messages(stream: Any, messages: list[tuple[float, str]]) -> None:
    for line in stream:
        if line.startswith("titan: "):
            messages.append((time.time(), line.removeprefix("titan: ").strip()))


def format_row(case: HangCase, result: HangResult) -> str:
    """Return a line of the table."""
    first, last = (result.messages[0], result.messages[-1]) if result.messages else ((0.0, "NOTHING"), (0.0, "NOTHING"))
    words = re.sub(r"; ended after .*", "", last[1])
    named = "yes" if result.names_only(case.rank) else "NO"
    return f"| {case.name} | {case.rank} | {named} | {first[0]:.0f} | {result.seconds:.0f} | {result.code} | {words} |"


HEADER = "| hang | rank | named | first said after s | ended after s | exit code | said |\n|" + " --- |" * 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all hangs, or those named; return 1 when one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts, one of which a hang's name holds; none: all hangs")
    parser.add_argument("--part", default="1/1", help="K/N: of these hangs, one part in N")
    args = parser.parse_args(arguments)
    cases = [case for case in list_cases() if not args.names or any(name in case.name for name in args.names)]
    if not cases:
        parser.error(f"no hang's name holds one of {args.names}")
    print(HEADER, flush=True)
    failures = 0
    for case in take_part(cases, args.part):
        with tempfile.TemporaryDirectory() as folder:
            result = run_hang(case, Path(folder) / "run")
        print(format_row(case, result), flush=True)
        failures += not result.holds(case.rank)
    print(f"{failures} do not hold")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
