"""From a checked Run to training ranks: prepare the data, decide what the directory means, start or join the ranks.

Nothing here imports torch: what does is loaded by name, once this process is to train itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from launchers.supervisor import log_line, run_ranks
from titan.checkpoint import manifest
from titan.cluster.rank_info import RankInfo
from titan.console.progress import progress_line
from titan.debug.verdict import HangError
from titan.errors import ConfigError, ReasonReceiver, RunError, describe_machine_error, ignore_reason
from titan.files.environment import set_variables
from titan.metrics.reader import METRICS, read_last_steps
from titan.run import attempts, summary
from titan.run.attempts import check_same_without_data
from titan.run.directory import list_hydra_folders, lock_directory, read_attempts
from titan.run.lineage import check_start, prepare_data
from titan.run.run import Run

Report = Callable[[Exception], object]


RENDEZVOUS, WORKER = "launchers.rendezvous", "titan.training.worker"  # the modules that import torch
PREPARE = "titan.dataset.corpora"
LOST_SECONDS = 180.0  # how long a file system may take to notice that a node was lost, and to free the node's locks


def run_local(run: Run, apart: bool = False, report: ReasonReceiver = ignore_reason) -> int:
    """Run on this machine, in this process where one rank is enough.

    Args:
        apart: start a process even for one rank, so that nothing of it stays in this one.
        report: called with the error of the rank that failed first, where ranks are processes; see `ReasonReceiver`.

    Returns:
        The exit code; what this process itself rejects, and a rank in it, is raised.
    """
    with (
        set_variables(run.cluster.environment),
        lock_directory(Path(run.directory), more_names=list_hydra_folders(run)),
    ):
        failures = Failures(run, report)
        for restart in range(run.cluster.restarts + 1):
            failures.report("")  # what an earlier attempt reported is no reason for the end of this one
            attempt = _begin_attempt(run)
            if attempt is None:
                summary.show_finished(run)
                return 0
            train = partial(_start_ranks, run, attempt, apart or run.cluster.restarts > 0, failures.report)
            code = _run_attempt(run, attempt, train)
            if code != 1 or restart == run.cluster.restarts:
                return code
            if failures.is_repeated():
                log_line(Path(run.directory), "not restarted: the restart ended as the attempt before it")
                return code
            log_line(Path(run.directory), f"restart {restart + 1} of {run.cluster.restarts}")
    return 1


class Failures:
    """The ends of the attempts of a run: a restart that ends as the attempt before it is the last one."""

    def __init__(self, run: Run, report: ReasonReceiver) -> None:
        """Take the run, and what else is called with each reason."""
        self.run, self.pass_on = run, report
        self.reason, self.previous = "", ("", -1, -1)

    def report(self, reason: str) -> None:
        """Take the reason of an end, and pass it on; see `ReasonReceiver`."""
        self.reason = reason
        self.pass_on(reason)

    def is_repeated(self) -> bool:
        """Return whether this attempt ended as the last one: the same reason, step and latest checkpoint."""
        saved = max((int(f.name[5:]) for f in manifest.list_complete(Path(self.run.directory))), default=0)
        step = next(read_last_steps(Path(self.run.directory) / METRICS), {"step": 0})["step"]
        earlier, self.previous = self.previous, (self.reason, step, saved)
        return bool(self.reason) and earlier == self.previous


def _begin_attempt(run: Run) -> attempts.Attempt | None:
    """Prepare the data, then decide what the directory means.

    Preparing may take hours: what can be rejected without them is rejected before it.
    """
    if earlier := read_attempts(Path(run.directory)):
        check_same_without_data(run, earlier[-1])
    elif run.checkpoint.path is None:  # copies there may be of this run, whose parent may be gone
        check_start(run)
    with progress_line() as show:
        mix = prepare_data(run, show)
    return attempts.begin_attempt(run, mix)


def _run_attempt(run: Run, attempt: attempts.Attempt, train: Callable[[], int]) -> int:
    """Train while the data are prepared, where they are streamed; a ConfigError before the first step withdraws the
    attempt."""
    try:
        with contextlib.ExitStack() as meanwhile:
            if run.dataset.stream:
                log = Path(run.directory) / "log" / "prepare.log"
                prepared = import_module(PREPARE).prepared_meanwhile(run.dataset, attempt.corpora, log)
                meanwhile.enter_context(prepared)
            code = train()
    except ConfigError:
        attempts.withdraw_attempt(run, attempt)
        raise
    if code == 2:
        attempts.withdraw_attempt(run, attempt)
    return code


def _start_ranks(run: Run, attempt: attempts.Attempt, apart: bool, report: ReasonReceiver) -> int:
    if run.layout.devices > 1 or apart:
        return run_ranks((run, attempt), run.layout.devices, Path(run.directory), report=report)
    return int(import_module(WORKER).work(run, attempt, RankInfo()))


def run_rank0(run: Run, rank_info: RankInfo, report: Report = lambda error: None) -> int:
    """Be rank 0 under torchrun or srun: decide what to run, send it to the other ranks, train.

    Args:
        report: called with the error of a hang, after which this process ends at once; the rank that reports the
            hang has printed it.
    """
    rendezvous, worker = import_module(RENDEZVOUS), import_module(WORKER)
    store = rendezvous.join(rank_info)
    try:
        patience = LOST_SECONDS if rank_info.scheduled else 2.0
        with (
            set_variables(run.cluster.environment),
            lock_directory(Path(run.directory), patience, list_hydra_folders(run)),
        ):
            attempt = _begin_attempt(run)
            if attempt is None:
                summary.show_finished(run)
                rendezvous.send(store, rank_info, 0)
                return 0
            rendezvous.send(store, rank_info, (run, attempt))
            return _run_attempt(run, attempt, partial(_train_rank, store, rank_info, run, attempt, worker, report))
    except BaseException as error:
        rendezvous.send(store, rank_info, 2 if isinstance(error, ConfigError) else 1)
        raise


def dismiss_workers(rank_info: RankInfo, code: int) -> None:
    """Let the other ranks under torchrun or srun exit with `code`: rank 0 has nothing to run."""
    rendezvous = import_module(RENDEZVOUS)
    rendezvous.send(rendezvous.join(rank_info), rank_info, code)


def run_worker(rank_info: RankInfo, report: Report = lambda error: None, trusted: Sequence[str] = ()) -> int:
    """Be any other rank under torchrun or srun: wait for rank 0's message, then train or exit; see `run_rank0`.

    Args:
        trusted: packages of one's own whose classes the message may name.
    """
    rendezvous, worker = import_module(RENDEZVOUS), import_module(WORKER)
    store = rendezvous.join(rank_info)
    message = rendezvous.receive(store, trusted)
    if isinstance(message, int):
        return message
    run, attempt = message
    with set_variables(run.cluster.environment):
        return _train_rank(store, rank_info, run, attempt, worker, report)


def _train_rank(
    store: Any, rank_info: RankInfo, run: Run, attempt: attempts.Attempt, worker: Any, report: Report
) -> int:
    """Train; of an error that several ranks see, only the first to fail reports it."""
    failed_first: list[bool] = []
    fails_first = partial(import_module(RENDEZVOUS).fails_first, store)

    def record_failure(error: Exception) -> None:
        if isinstance(error, HangError):  # all ranks have the same; the store may be in a rank that is stopped
            report(error)
        else:
            failed_first.append(fails_first())

    try:
        return int(worker.work(run, attempt, rank_info, store, record_failure))
    except Exception as error:
        if not (failed_first[0] if failed_first else fails_first()):
            return 2 if isinstance(error, ConfigError) else 1
        if not isinstance(error, (ConfigError, RunError)) and not describe_machine_error(error):
            print(f"titan: rank {rank_info.rank} failed:", file=sys.stderr)
        raise
