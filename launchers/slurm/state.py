"""The state of a sweep's trials, from its ledger, the jobs' exit records and Slurm. Free of torch."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from launchers.slurm import queue
from launchers.slurm.queue import Job
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepState, TrialState

OVER = {
    "CANCELLED": ("stopped", "cancelled"),
    "TIMEOUT": (
        "stopped",
        "it reached its time limit before it had saved; raise cluster.time or cluster.signal_seconds",
    ),
    "PREEMPTED": ("stopped", "preempted"),
    "NODE_FAIL": ("stopped", "its node failed"),
    "BOOT_FAIL": ("failed", "its node did not boot"),
    "DEADLINE": ("failed", "its deadline had passed"),
    "OUT_OF_MEMORY": ("failed", "out of memory on its node"),
}
"""State and reason of a trial by Slurm's state of its job, which has ended."""
UNKNOWN_SECONDS = 120.0
"""How long Slurm may not know the jobs of a submission until it counts as failed."""
FORGOTTEN = "Slurm no longer knows its job, which left no exit record: its node was lost, or it was killed"


def read_state(directory: Path) -> SweepState | None:
    """Return the sweep in a directory, with the states of its jobs where Slurm is installed; None if there is none.

    Raises:
        RunError: when Slurm does not answer.
    """
    if not queue.available():
        return ledger.read(directory)
    known = queue.jobs(job for trial in ledger.trials_by_ledger(directory) for job in trial.jobs)
    with contextlib.suppress(OSError):
        os.listdir(directory / ledger.SLURM)  # so that a shared folder's client looks again
    sweep = ledger.read(directory)  # only now: jobs that ended before have left their exit records
    if sweep is None:
        return None
    trials = (reconciled(sweep.directory, trial, known) if trial.jobs else trial for trial in sweep.trials)
    return replace(sweep, trials=tuple(trials))


def reconciled(directory: Path, trial: TrialState, known: dict[str, Job]) -> TrialState:
    """Return a trial that was submitted to Slurm, with its state by Slurm."""
    if trial.state == "finished":
        return trial
    alive = [known[job] for job in trial.jobs if job in known and known[job].alive]
    if running := next((job for job in alive if job.running), None):
        return replace(trial, state="running", job=running.id, reason=None)
    if alive:
        reason = "; ".join(filter(None, (trial.reason, _waits(alive[0])))) or None
        return replace(trial, state="queued", job=alive[0].id, reason=reason)
    if trial.state in ("failed", "stopped"):
        return trial
    last = known.get(trial.job or "")
    state, reason = OVER.get(last.state, ("failed", None)) if last else ("failed", FORGOTTEN)
    attempt = job_exit.last_exit(directory / ledger.SLURM, str(trial.job))
    if attempt is not None and attempt.requeue:
        state, reason = "stopped", f"{attempt.reason}, and was not started again"
    if reason is None:
        folder = directory / ledger.SLURM
        reason = (
            job_exit.error(folder, job_exit.latest_attempt(folder, str(trial.job)))
            or "ended without reporting an error"
        )
    return replace(trial, state=state, reason=reason)  # type: ignore[arg-type]


def _waits(job: Job) -> str | None:
    """Return why a job waits, where Slurm gives a reason."""
    return None if job.reason in ("", "None") else f"waits: {job.reason}"


def adopt(directory: Path) -> None:
    """Find the jobs of submissions that were interrupted before their numbers were recorded, and record them.

    Slurm may take a job without confirming it; a submission counts as failed once Slurm has not known it for a while.

    Raises:
        RunError: when Slurm does not answer.
    """
    sweep = ledger.read(directory)
    lost = {trial.token: trial.sent_at for trial in (sweep.trials if sweep else ()) if trial.token is not None}
    for token, sent_at in lost.items():
        listed, found = ledger.submitted_trials(directory, token), [job.id for job in queue.sent(token)]
        if found:
            jobs = numbered(listed, _siblings(found, len(listed)))
            ledger.add(directory, {"event": "sent", "token": token, "jobs": jobs})
        elif time.time() - sent_at > UNKNOWN_SECONDS:
            reason = "its submission was interrupted"
            ledger.add(directory, {"event": "unsent", "points": listed, "reason": reason})


def _siblings(found: list[str], count: int) -> list[str]:
    """Return all elements of the array that some belong to: Slurm forgets those first that ended first."""
    first = found[0].partition("_")[0]
    return [f"{first}_{index}" for index in range(count)] if count > 1 else found


def numbered(ids: list[str], jobs: list[str]) -> dict[str, list[str]]:
    """Return the jobs of each trial: one element of an array each, or for a single trial all jobs of its chain."""
    return {ids[0]: jobs} if len(ids) == 1 else {trial: [job] for trial, job in zip(ids, jobs, strict=True)}
