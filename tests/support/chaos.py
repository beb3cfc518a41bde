"""Kill runs again and again, at random and in the midst of saves: `python -m tests.support.chaos [--kills 100] [--seed
N]`.

Each is a real process (`python -m titan.train ...`) of a tiny model with `checkpoint=async`, killed by SIGKILL - one
rank, all ranks or their parent - and started again, on the same layout or on another one each time, until it ends.
Then it is compared with the same run left alone:

- on the same layout every loss and norm, also of steps that were done again, and the last weights and optimizer state
  are the same to the bit; where layouts change, the first step after each restart agrees to 1e-5, and all steps are
  reported;
- each step has read the rows that the plain definition of the data's order gives it: none is lost or read twice;
- after each kill every checkpoint that counts is whole (checksums), and the last is none before the last of the kill
  before; at the end nothing of half a checkpoint is left, here or in the copies elsewhere.

A start costs 3 to 4 seconds on two cores, and so does a kill: a hundred take about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.measure.checkpoint_layouts import silence_output
from tests.support.processes import is_alive, kill_process, list_descendants, read_command, run_program, wait_until
from tests.support.runs import (
    LAYOUTS,
    TINY,
    RankOutcome,
    Tensors,
    are_identical,
    compute_difference,
    read_checkpoint,
    read_step_records,
    train_run,
)
from tests.support.tiers import take_part
from tests.training.test_loader_setup import expected_rows
from titan.checkpoint import manifest
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.remote import Remote
from titan.run.compose import compose_run
from titan.run.directory import read_attempts
from titan.run.run import Run

EVERY = 4  # steps between checkpoints
LONG = 1800.0  # seconds after which a run that shows no sign of life is ended
MOST = 10  # runs that may end before they are killed
EXACT = 1e-5  # law 3's bound in fp32
PLAIN = ("dataset=synthetic", "dataset.tokens=20000", "dataset.vocab=64")
MIXED = (
    "dataset=mixture", "+dataset@dataset.sources.a=synthetic", "+dataset@dataset.sources.b=synthetic",
    "dataset.sources.a.tokens=30000", "dataset.sources.a.vocab=64", "dataset.sources.a.longest=20",
    "dataset.sources.b.tokens=20000", "dataset.sources.b.vocab=64", "dataset.sources.b.seed=1",
    "dataset.sources.a.epochs=1000", "dataset.sources.b.epochs=1000",
    "dataset.weights={a: 0.7, b: 0.3}", "dataset.stages={2048: {a: 1, b: 4}, 9000: {a: 2, b: 1}}",
    "dataset.skip=[[10,13],[40,47],[700,711]]",
)  # fmt: skip
SAME = ("optimizer=adamw",)
MOVING = ("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.02")
TENSOR, CONTEXT = ["parallelism=tp"], ["parallelism=cp"]
PIPELINE = ["parallelism=pp", "parallelism.microbatches=4"]


@dataclass(frozen=True)
class KillPlan:
    """A run that is to be killed."""

    settings: tuple[str, ...]  # the science, and what else stays the same in all attempts
    layouts: tuple[Sequence[str], ...]  # of the attempts, in turn
    copied: bool = False  # checkpoints are copied to a second folder
    restarts: bool = False  # the run is not started again by us, but by itself

    @property
    def changes_layout(self) -> bool:
        """Whether attempts have different layouts."""
        return len(self.layouts) > 1


SINGLE, DDP, FSDP = LAYOUTS["single"], LAYOUTS["ddp2"], LAYOUTS["fsdp2"]
PLANS = {
    "single, mixture": KillPlan((*MIXED, *SAME), (SINGLE,)),
    "ddp 2": KillPlan((*PLAIN, *SAME), (DDP,)),
    "fsdp 2, copied": KillPlan((*PLAIN, *SAME), (FSDP,), copied=True),
    "fsdp 2, restarts itself": KillPlan((*PLAIN, *SAME), (FSDP,), restarts=True),
    "another layout each attempt": KillPlan(
        (*MIXED, *MOVING), (SINGLE, LAYOUTS["fsdp3"], DDP, TENSOR, PIPELINE, CONTEXT)
    ),
}


@dataclass
class ChaosReport:
    """What came of a run.

    Attributes:
        kills, during: how many, and how many of them left half a checkpoint.
        attempts: of the run.
        resumed: how many of them began from a checkpoint.
        checkpoints: steps of which a checkpoint was complete.
        again: steps that were done again.
        loss: largest relative difference of a loss or norm in the first step after a restart; on one layout in any.
        later: the same in any step.
        wrong: what does not hold.
        seconds: it all took.
    """

    name: str
    kills: int = 0
    during: int = 0
    attempts: int = 0
    resumed: int = 0
    checkpoints: int = 0
    again: int = 0
    loss: float = 0.0
    later: float = 0.0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def format_row(self) -> str:
        """As a line of the table."""
        figures = f"{self.kills} ({self.during}) | {self.attempts} ({self.resumed}) | {self.checkpoints} | {self.again}"
        differences = f"{self.loss:.0e} | {self.later:.0e}"
        return f"| {self.name} | {figures} | {differences} | {'; '.join(self.wrong) or 'holds'} | {self.seconds:.0f} |"


HEADER = (
    "| run | kills (in a save) | attempts (resumed) | checkpoints | steps done again | first step of an attempt "
    "| any step | s |\n|" + " --- |" * 9
)


@dataclass
class Chaos:
    """One run, its killer and its witness."""

    name: str
    plan: KillPlan
    kills: int  # how often to kill it
    dice: random.Random  # draws moments and victims
    folder: Path  # new, for the run, the undisturbed one and the copies
    last: int = 0  # step of the last checkpoint that was seen
    halves: set[tuple[str, int]] = field(default_factory=set)  # half checkpoints that were seen

    def __post_init__(self) -> None:
        self.directory, self.steps = self.folder / "run", 40 + 12 * self.kills
        self.report = ChaosReport(self.name)

    def kill_and_compare(self) -> ChaosReport:
        """Kill the run until it has had enough, let it end, and compare."""
        start = time.monotonic()
        (self._run_one_process if self.plan.restarts else self._run_processes)()
        if not self.report.wrong:
            self._compare_runs()
        self.report.seconds = time.monotonic() - start
        return self.report

    def _run_processes(self) -> None:
        """Each attempt is a process that we start."""
        while not self.report.wrong:
            with self._start_attempt() as process:
                if not self._kill_at_moment(process):
                    return self._wait_for_end(process)
                wait_until(lambda process=process: process.poll() is not None, "the killed run to end", LONG)
                self._check_checkpoints(verify=True)

    def _run_one_process(self) -> None:
        """One process, which starts its ranks again."""
        with self._start_attempt(f"cluster.restarts={self.kills}") as process:
            while self._kill_at_moment(process):
                self._check_checkpoints(verify=False)
                attempts = self._count_attempts()
                wait_until(
                    lambda attempts=attempts: self._count_attempts() > attempts or process.poll() is not None,
                    "the restart",
                    LONG,
                )
            self._wait_for_end(process)

    def _start_attempt(self, *overrides: str) -> Any:
        layout = self.plan.layouts[self._count_attempts() % len(self.plan.layouts)]
        command = ["-m", "titan.train", *self._build_settings(self.directory), *layout, *overrides]
        self.folder.mkdir(exist_ok=True)
        return run_program(*command, output=(self.folder / "output").open("a"))

    def _build_settings(self, directory: Path) -> list[str]:
        common = [setting for setting in TINY if not setting.startswith("dataset")]
        saves = ["checkpoint=async", f"checkpoint.every={EVERY}", "checkpoint.keep=3", "checkpoint.grace=0"]
        copies = [f"checkpoint.path={self.folder}/copies"] if self.plan.copied and directory == self.directory else []
        shape = ["model.heads=4", "model.kv_heads=2", f"training.steps={self.steps}", "metrics.sample_tokens=0"]
        return [*common, *self.plan.settings, *shape, *saves, *copies, f"hydra.run.dir={directory}"]

    def _kill_at_moment(self, process: subprocess.Popen[str]) -> bool:
        """Wait for a moment and kill; False when the run is to end by itself, or has ended."""
        if self.report.kills >= self.kills:
            return False
        moment = self.dice.choices([None, self._wait_for_steps, self._wait_for_save], [1, 3, 6])[0]
        if not self._wait_for_start(process, moment is None):
            return False
        ranks = _list_rank_pids(process.pid)  # looked for now: it takes longer than a save
        victims = self._choose_victims(process.pid, ranks)
        if moment and not moment(process):
            return False
        for pid in victims:
            kill_process(pid)
        self.report.kills += 1
        wait_until(lambda: not any(map(is_alive, [*victims, *ranks])), "all ranks to die", LONG)
        return True

    def _choose_victims(self, parent: int, ranks: list[int]) -> list[int]:
        """One rank, all of them, or the parent; where there are no ranks, the parent."""
        if not ranks:
            return [parent]
        choices = [[self.dice.choice(ranks)], ranks, *([] if self.plan.restarts else [[parent]])]
        return self.dice.choice(choices)

    def _wait_for_start(self, process: subprocess.Popen[str], early: bool) -> bool:
        """Wait for the attempt's first steps, or for less; for ranks where only ranks are killed."""
        if early and not self.plan.restarts:
            return _sleep_while_running(process, self.dice.uniform(1.0, 5.0))
        if early:
            ready = _wait_while_running(process, lambda: _list_rank_pids(process.pid))
            return ready and _sleep_while_running(process, self.dice.uniform(0.0, 4.0))
        initial_count = self._count_lines()
        return _wait_while_running(process, lambda: self._count_lines() > initial_count)

    def _wait_for_steps(self, process: subprocess.Popen[str]) -> bool:
        """Some steps after the start."""
        enough = self._count_lines() + self.dice.randrange(1, 4 * EVERY)
        return _wait_while_running(process, lambda: self._count_lines() >= enough) and _sleep_while_running(
            process, self.dice.uniform(0, 0.05)
        )

    def _wait_for_save(self, process: subprocess.Popen[str]) -> bool:
        """When a checkpoint's folder has appeared, and its manifest has not; a little later.

        Not always in the attempt's first save: a run that never gets further would prove little.
        """
        enough = self._find_last_step() + EVERY * self.dice.randrange(4)
        has_begun = _wait_while_running(
            process, lambda: any(int(name[5:]) > enough for name, _ in self._list_half_saves())
        )
        return has_begun and _sleep_while_running(process, self.dice.uniform(0, 0.01))

    def _find_last_step(self) -> int:
        """The step of the last checkpoint."""
        return max((int(folder.name[5:]) for folder in manifest.list_complete(self.directory)), default=0)

    def _list_half_saves(self) -> set[tuple[str, int]]:
        """Folders of saves that have not ended, each with what tells it from one of the same name."""
        half_saves = set()
        for folder in manifest.list_folders(self.directory):
            names = (manifest.NAME, manifest.RETIRED, manifest.DAMAGED)
            try:
                if not any((folder / name).exists() for name in names):
                    half_saves.add((folder.name, folder.stat().st_ino))
            except FileNotFoundError:
                continue
        return half_saves

    def _count_lines(self) -> int:
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b'"loss"') if file.is_file() else 0

    def _count_attempts(self) -> int:
        file = self.directory / "run.yaml"
        return file.read_text().count("\nattempt: ") if file.is_file() else 0

    def _check_checkpoints(self, verify: bool) -> None:
        """Look at what a kill has left."""
        half = self._list_half_saves()
        self.report.during += bool(half - self.halves)
        self.halves = half
        complete, last = manifest.list_complete(self.directory), self._find_last_step()
        if last < self.last:
            self.report.wrong.append(f"kill {self.report.kills}: the last checkpoint was {self.last} and is {last}")
        self.last = last
        for folder in complete if verify else ():
            try:
                manifest.verify_checksums(folder, manifest.inspect(folder).files)  # type: ignore[union-attr]
                CheckpointReader(folder).read_metadata()
            except Exception as error:
                self.report.wrong.append(f"kill {self.report.kills}: {folder.name} is not whole: {error}")

    def _wait_for_end(self, process: subprocess.Popen[str]) -> None:
        """Wait for the end, which must be a good one."""
        wait_until(lambda: process.poll() is not None, "the end", seconds=10 * LONG)
        if process.returncode:
            tail = " ".join((self.folder / "output").read_text()[-600:].split())
            self.report.wrong.append(f"exit code {process.returncode} after {self.report.kills} kills: {tail}")

    def _compare_runs(self) -> None:
        """With the undisturbed run."""
        undisturbed = compose_run([*self._build_settings(self.folder / "alone"), *self.plan.layouts[0]])
        ranks, run = train_run(undisturbed, timeout=600), compose_run(self._build_settings(self.directory))
        self._compare_steps(undisturbed, run)
        self._compare_ends(ranks[0], read_checkpoint(run, self.steps))
        self._compare_folders(run)

    def _compare_steps(self, undisturbed: Run, run: Run) -> None:
        lines = [json.loads(text) for text in (self.directory / "metrics.jsonl").read_text().splitlines()]
        logged, expected = [line for line in lines if "loss" in line], read_step_records(undisturbed)
        report, last = self.report, read_step_records(run)
        report.attempts = self._count_attempts()
        report.resumed = sum(attempt["from_step"] > 0 for attempt in read_attempts(self.directory))
        report.checkpoints = len({line["checkpoint_step"] for line in lines if "checkpoint_step" in line})
        report.again = len(logged) - len(last)
        firsts = {line["attempt"]: line for line in reversed(logged)}.values()
        report.loss = max(
            _compute_deviation(line, expected) for line in (firsts if self.plan.changes_layout else logged)
        )
        report.later = max(_compute_deviation(line, expected) for line in logged)
        if report.loss > (EXACT if self.plan.changes_layout else 0):
            report.wrong.append("losses differ")
        if [(line["rows"], line["batch_hash"]) for line in last] != expected_rows(undisturbed):
            report.wrong.append("rows are not those of the data's order")
        if any(line["batch_hash"] != expected[line["step"] - 1]["batch_hash"] for line in logged):
            report.wrong.append("a step that was done again read other rows")

    def _compare_ends(self, alone: RankOutcome, state: Tensors) -> None:
        """The last checkpoint against the state of the undisturbed run."""
        if self.plan.changes_layout:
            if (
                compute_difference(state, alone.last) > 1e-3
            ):  # rounding of hundreds of steps; a lost momentum is far more
                self.report.wrong.append(f"the last states differ by {compute_difference(state, alone.last):.0e}")
        elif not are_identical(state, alone.last):
            self.report.wrong.append("the last states are not the same")

    def _compare_folders(self, run: Run) -> None:
        """Nothing of half a checkpoint is left, and the copies are as good as what is here."""
        if {f.name for f in (self.directory / "checkpoints").iterdir()} != {
            f.name for f in manifest.list_complete(self.directory)
        }:
            self.report.wrong.append("half a checkpoint is left")
        if not self.plan.copied:
            return
        copies = self.folder / "copies" / self.directory.name
        index = Remote(str(copies)).list_steps()
        folders = {f.name for f in copies.iterdir() if f.is_dir() and any(f.iterdir())}
        if max(index, default=0) != self.steps or folders != {f"step-{step}" for step in index}:
            self.report.wrong.append(f"copies of {sorted(index)} are counted, and there are {sorted(folders)}")
        for step in index:
            manifest.verify_checksums(copies / f"step-{step}", manifest.inspect(copies / f"step-{step}").files)  # type: ignore[union-attr]


def _compute_deviation(line: dict[str, Any], expected: list[dict[str, Any]]) -> float:
    """How far a step's loss and norm are from those of the undisturbed run, relatively."""
    expected_line = expected[line["step"] - 1]
    return max(abs(line[key] / expected_line[key] - 1) for key in ("loss", "grad_norm"))


def _list_rank_pids(parent: int) -> list[int]:
    return [pid for pid in list_descendants(parent) if "titan.training.rank" in read_command(pid)]


def _wait_while_running(process: subprocess.Popen[str], is_true: Callable[[], Any]) -> bool:
    """Wait until `is_true()` is; False when the process has ended before."""
    deadline = time.monotonic() + LONG
    while not is_true():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError("the run shows no sign of life")
        time.sleep(0.001)
    return process.poll() is None


def _sleep_while_running(process: subprocess.Popen[str], seconds: float) -> bool:
    """Let time pass; False when the process has ended by then."""
    time.sleep(seconds)
    return process.poll() is None


def kill_repeatedly(name: str, kills: int, dice: random.Random, folder: Path) -> list[ChaosReport]:
    """Kill a run so many times; a run that ends before that is followed by another one like it."""
    reports: list[ChaosReport] = []
    while (remaining_kills := kills - sum(report.kills for report in reports)) > 0 and len(reports) < kills + MOST:
        chaos = Chaos(name, PLANS[name], remaining_kills, dice, folder / str(len(reports)))
        reports.append(chaos.kill_and_compare())
        if reports[-1].wrong:
            break
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line; 1 when something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many in all (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims (default 0)")
    parser.add_argument("--runs", default="", help="only the runs whose name holds this text")
    parser.add_argument("--part", default="1/1", help="K/N: of these runs, one part in N")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    args = parser.parse_args(argv)
    names = [name for name in PLANS if args.runs in name]
    if not names or args.kills < 1:
        parser.error(f"--runs={args.runs} --kills={args.kills}: nothing to kill; runs are {'; '.join(PLANS)}")
    names = take_part(names, args.part)
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    reports: list[ChaosReport] = []
    for i, name in enumerate(names):
        share = args.kills * (i + 1) // len(names) - args.kills * i // len(names)
        with tempfile.TemporaryDirectory(prefix="titan-chaos-") as folder:
            os.environ["TITAN_CACHE"] = f"{folder}/cache"
            with silence_output():
                found = kill_repeatedly(name, share, random.Random(args.seed * 1000 + i), Path(folder))
            print("\n".join(report.format_row() for report in found), flush=True)
            reports += found
    counts = ("kills", "during", "attempts", "resumed", "checkpoints", "again")
    total = ChaosReport("all", *(sum(getattr(report, name) for report in reports) for name in counts))
    total.seconds, total.loss = sum(r.seconds for r in reports), max(r.loss for r in reports)
    total.later, total.wrong = max(r.later for r in reports), [f"{r.name}: {w}" for r in reports for w in r.wrong]
    print(total.format_row())
    if args.json:
        args.json.write_text(json.dumps([asdict(report) for report in (*reports, total)], indent=1))
    return bool(total.wrong)


if __name__ == "__main__":
    sys.exit(main())
