"""titan's CUDA path on a machine without a GPU: `python -m tests.rehearsal.rehearse [NAME...]` (make rehearse).

Runs the commands of `tests.rehearsal.table` on the rehearsal's device, and prints a table: seconds, the largest
difference of the losses from a CPU's, how often the host waits within a step, races between streams, exit codes. Then
it prints the lines that only CUDA executes and that did not run. The exit code is 1 where anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rehearsal import build, surface, table, watch
from tests.rehearsal.table import TABLE, Rehearsed
from tests.support.tiers import take_part
from titan.metrics.reader import read_records

TOLERANCE = 1e-5
LANES = 2
References = dict[str, "Future[dict[int, float]]"]


@dataclass
class CommandResult:
    """What came of a command.

    Attributes:
        rehearsed: the command.
        code: its exit code.
        seconds: how long it took.
        output: the end of what it printed.
        losses: of its steps, by their numbers.
        waits: the host's waits within steps, by place and operation.
        races: accesses of streams that are not ordered, with how often they came.
        lines: executed lines, by file.
        operations: how often each operation ran on the device.
        problems: what does not hold.
    """

    rehearsed: Rehearsed
    code: int
    seconds: float
    output: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    races: Counter[str] = field(default_factory=Counter)
    lines: dict[str, set[int]] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    difference: float | None = None


class ServerClient:
    """A process that forks commands (`tests.rehearsal.server`), for any number of threads."""

    def __init__(self, root: Path, log: Path, environment: Mapping[str, str], paths: Sequence[str] = ()) -> None:
        """Start it; it ends with this process. `paths` are further folders of modules."""
        python_path = os.pathsep.join([str(root / "tests/rehearsal/site"), str(root), *paths])
        env = {
            **_clean_environment(),
            "PYTHONPATH": python_path,
            "REHEARSAL_PARENT": str(os.getpid()),
            "OMP_NUM_THREADS": "1",
        }
        self.log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.rehearsal.server"],
            cwd=root, env={**env, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.waiting: dict[int, Future[int]] = {}
        self.lock, self.number = threading.Lock(), 0
        self.reader = threading.Thread(target=self._read_replies, daemon=True)
        self.reader.start()

    def run(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
    ) -> int:
        """Carry out a command, and return its exit code: negative where a signal ended it."""
        future: Future[int] = Future()
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        with self.lock:
            self.number += 1
            self.waiting[self.number] = future
            text = json.dumps(request | {"number": self.number, "seconds": seconds}) + "\n"
            assert self.process.stdin is not None
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()
        return future.result()

    def _read_replies(self) -> None:
        for line in self.process.stdout or ():
            reply = json.loads(line)
            if "number" in reply:
                self.waiting.pop(reply["number"]).set_result(reply["code"])
        for future in self.waiting.values():
            future.set_exception(RuntimeError(f"the server ended: {Path(self.log.name).read_text()[-2000:]}"))

    def close(self) -> None:
        """End it, and all that it runs."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.wait()
        self.reader.join()
        self.log.close()


def _find_free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _clean_environment() -> dict[str, str]:
    """Return this process's variables without those of a launcher, of visible GPUs and of other rehearsals."""
    prefixes = ("SLURM_", "TORCHELASTIC_", "REHEARSAL_", "CUDA_VISIBLE", "TITAN_CONF")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


class Rehearsal:
    """Runs commands in a folder, each once, with the CPU's runs that they are compared with."""

    def __init__(
        self,
        folder: Path,
        root: Path = watch.ROOT,
        references: References | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        """Start the servers.

        Args:
            folder: gets the runs' directories, logs and reports.
            root: of the repository whose titan runs.
            references: the losses of CPUs if they are known, so that none trains here.
            paths: further folders of modules.
        """
        self.folder, self.root = folder, root
        self.runs = folder / "runs"
        self.runs.mkdir()
        lines = folder / "lines.json"
        lines.write_text(json.dumps(surface.list_cuda_lines(root)))
        common = {"TITAN_CACHE": str(folder / "cache")}
        devices = {"REHEARSAL_DEVICES": "8", watch.LINES: str(lines)}
        self.cpu = None if references is not None else ServerClient(root, folder / "cpu.log", common)
        self.cuda = ServerClient(root, folder / "cuda.log", {**common, **devices}, paths)
        self.references = {} if references is None else references
        self.lock = threading.Lock()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        for server in filter(None, (self.cpu, self.cuda)):
            server.close()

    def run(self, rehearsed: Rehearsed) -> CommandResult:
        """Carry out a command, and judge what came of it."""
        log, reports = self.folder / f"{rehearsed.folder}.log", self.folder / f"{rehearsed.folder}.reports"
        reports.mkdir()
        environment = {watch.REPORT: str(reports), "REHEARSAL_DEVICES": str(rehearsed.devices)}
        environment |= {
            name: value.replace("{port}", _find_free_port()) for name, value in rehearsed.environment.items()
        }
        start = time.monotonic()
        code = self.cuda.run(rehearsed.module, rehearsed.build_command(self.runs), environment, log, rehearsed.seconds)
        result = CommandResult(rehearsed, code, time.monotonic() - start, log.read_text(errors="replace")[-4000:])
        result.losses = read_losses(self.runs / rehearsed.folder)
        for report in sorted(reports.iterdir()):
            _add_report(result, json.loads(report.read_text()))
        _judge_result(result, self.runs)
        if rehearsed.like:
            _compare_losses(result, self.find_reference(rehearsed.like))
        return result

    def find_reference(self, name: str) -> dict[int, float]:
        """Return the losses of a CPU, which trains once for all that ask."""
        with self.lock:
            future = self.references.get(name)
            first = future is None
            if future is None:
                future = self.references[name] = Future()
        if first:
            try:
                future.set_result(self._train_reference(name))
            except Exception as error:
                future.set_exception(error)
        return future.result()

    def _train_reference(self, name: str) -> dict[int, float]:
        folder, log = self.runs / f"cpu-{name}", self.folder / f"cpu-{name}.log"
        arguments = [*table.SMALL, *table.REFERENCES[name], "cluster.device=cpu", f"hydra.run.dir={folder}"]
        if self.cpu is None:
            raise LookupError(f"no reference {name}")
        code = self.cpu.run("titan.train", arguments, {}, log, Rehearsed.seconds)
        if code:
            raise RuntimeError(f"the CPU's run {name} ended with {code}:\n{log.read_text()[-2000:]}")
        return read_losses(folder)


def read_losses(directory: Path) -> dict[int, float]:
    """Return the loss of each step of a run; none where it wrote no metrics."""
    file = directory / "metrics.jsonl"
    lines: list[dict[str, Any]] = read_records(file) if file.exists() else []
    return {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}


def _add_report(result: CommandResult, report: Mapping[str, Any]) -> None:
    result.waits.update(report["waits"])
    result.races.update(report["races"])
    result.operations.update(report["operations"])
    if len(report["devices"]) > 1:
        result.problems.append(f"a process uses several GPUs: {report['devices']}")
    for file, lines in report["lines"].items():
        result.lines.setdefault(file, set()).update(lines)


def _judge_result(result: CommandResult, runs: Path) -> None:
    """Add what does not hold, but for losses."""
    rehearsed, problems = result.rehearsed, result.problems
    if result.code != rehearsed.code:
        problems.append(f"exit code {result.code}, not {rehearsed.code}: {result.output[-1500:]}")
    undocumented = [location for location in result.waits if not location.startswith(rehearsed.waits or "\0")]
    problems += [
        f"the host waits within steps, {result.waits[location]} times: {location}" for location in undocumented
    ]
    problems += [f"{count} x {race}" for race, count in result.races.most_common()]
    problems += [f"no file {pattern}" for pattern in rehearsed.leaves if not any(runs.glob(pattern))]
    if rehearsed.says not in result.output:
        problems.append(f"does not print {rehearsed.says!r}: {result.output[-1500:]}")


def _compare_losses(result: CommandResult, reference: Mapping[int, float]) -> None:
    """Add the largest difference of losses from those of the same steps on a CPU, relative to these."""
    if not result.losses:
        result.problems.append("no step wrote a loss")
        return
    differences = [abs(loss - reference[step]) / abs(reference[step]) for step, loss in result.losses.items()]
    result.difference = float("nan") if any(d != d for d in differences) else max(differences)
    if not result.difference <= TOLERANCE:
        result.problems.append(f"losses {result.losses} differ from the CPU's, {dict(reference)}")


def rehearse_commands(
    rehearsal: Rehearsal, commands: Sequence[Rehearsed], lanes: int = LANES
) -> Iterator[CommandResult]:
    """Carry out commands, several at a time, and yield what came of each in their order."""
    futures: dict[str, Future[CommandResult]] = {}

    def run_in_order(rehearsed: Rehearsed) -> CommandResult:
        if rehearsed.needs in futures:
            futures[rehearsed.needs].result()
        return rehearsal.run(rehearsed)

    with ThreadPoolExecutor(lanes) as pool:
        for rehearsed in commands:
            futures[rehearsed.name] = pool.submit(run_in_order, rehearsed)
        for rehearsed in commands:
            yield futures[rehearsed.name].result()


def select_commands(names: Sequence[str], part: str = "1/1") -> list[Rehearsed]:
    """Return a part of the commands whose names hold one of the texts, or of all, with those that they need before."""
    named = [r for r in TABLE if not names or any(name in r.name for name in names)]
    selection = take_part(named, part) if named else []
    needed = {r.needs for r in selection}
    return [r for r in TABLE if r in selection or r.name in needed]


HEADER = "| run | devices | s | loss against CPU | waits in steps | races | exit code |\n| --- |" + " --- |" * 6


def format_row(result: CommandResult) -> str:
    """Return a line of the table."""
    rehearsed = result.rehearsed
    difference = "-" if result.difference is None else f"{result.difference:.0e}"
    cells = [rehearsed.name, rehearsed.devices, f"{result.seconds:.0f}", difference]
    cells += [sum(result.waits.values()), sum(result.races.values()), result.code]
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts, one of which a command's name holds; none: all commands")
    parser.add_argument("--part", default="1/1", help="K/N: of these commands, one part in N")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, which must not exist")
    args = parser.parse_args(arguments)
    if obstacle := build.find_obstacle():
        print(f"nothing is rehearsed: {obstacle}")
        return 1
    if not (commands := select_commands(args.names, args.part)):
        parser.error(f"no command's name holds one of {args.names}")
    start, file = time.monotonic(), build.build_extension()
    print(f"{file}: built in, or found after, {time.monotonic() - start:.0f} s", flush=True)
    results = []
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        folder.mkdir(exist_ok=args.keep is None)
        rehearsal = stack.enter_context(Rehearsal(folder))
        print(HEADER, flush=True)
        for result in rehearse_commands(rehearsal, commands):
            results.append(result)
            print(format_row(result), flush=True)
    return print_report(results, time.monotonic() - start, bool(args.names) or args.part != "1/1")


def print_report(results: Sequence[CommandResult], seconds: float, partial: bool) -> int:
    """Print waits, lines and problems; return 1 where something does not hold."""
    for result in results:
        for location, count in result.waits.most_common():
            print(f"waits in {result.rehearsed.name}: {count} x {location}")
    print(surface.format_report(watch.ROOT, [result.lines for result in results], full=not partial))
    failed = [result for result in results if result.problems]
    for result in failed:
        print(f"\n{result.rehearsed.name}:", *result.problems, sep="\n  ")
    print(f"\n{len(results) - len(failed)} of {len(results)} hold, in {seconds:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
