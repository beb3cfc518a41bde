"""The state of a sweep's trials, from its ledger, the jobs' exit records and Slurm; and their lanes. Free of torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from launchers.slurm import queue
from launchers.slurm.queue import SlurmJob
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepState, TrialState

ENDED_STATES = {
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
FORGOTTEN_REASON = "Slurm no longer knows its job, which left no exit record: its node was lost, or it was killed"


def read_state(directory: Path) -> SweepState | None:
    """Return the sweep in a directory, with the states of its jobs where Slurm is installed; None if there is none."""
    if not queue.is_available():
        return ledger.read(directory)
    jobs = queue.find_jobs(job for trial in ledger.read_trials(directory) for job in trial.jobs)
    with contextlib.suppress(OSError):
        os.listdir(directory / ledger.SLURM)  # so that a shared folder's client looks again
    sweep = ledger.read(directory)  # only now: jobs that ended before have left their exit records
    if sweep is None:
        return None
    trials = (reconcile_trial(sweep.directory, trial, jobs) if trial.jobs else trial for trial in sweep.trials)
    return replace(sweep, trials=tuple(trials))


def reconcile_trial(directory: Path, trial: TrialState, jobs: dict[str, SlurmJob]) -> TrialState:
    """Return a trial that was submitted to Slurm, with its state by Slurm."""
    if trial.state == "finished":
        return trial
    live_jobs = [jobs[job] for job in trial.jobs if job in jobs and jobs[job].is_alive]
    if running := next((job for job in live_jobs if job.is_running), None):
        return replace(trial, state="running", job=running.id, reason=None)
    if live_jobs:
        wait = "" if live_jobs[0].reason in ("", "None") else f"waits: {live_jobs[0].reason}"
        reason = "; ".join(filter(None, (trial.reason, wait))) or None
        return replace(trial, state="queued", job=live_jobs[0].id, reason=reason)
    if trial.state in ("failed", "stopped"):
        return trial
    last_job = jobs.get(trial.job or "")
    state, reason = ENDED_STATES.get(last_job.state, ("failed", None)) if last_job else ("failed", FORGOTTEN_REASON)
    attempt = job_exit.read_last_exit(directory / ledger.SLURM, str(trial.job))
    if attempt is not None and attempt.requeue:
        state, reason = "stopped", f"{attempt.reason}, and was not started again"
    if reason is None:
        folder = directory / ledger.SLURM
        reason = (
            job_exit.find_error(folder, job_exit.find_latest_attempt(folder, str(trial.job)))
            or "ended without reporting an error"
        )
    return replace(trial, state=state, reason=reason)  # type: ignore[arg-type]


def adopt_jobs(directory: Path) -> None:
    """Find the jobs of submissions that were interrupted before their numbers were recorded, and record them.

    Slurm may take a job without confirming it; a submission counts as failed once Slurm has not known it for a while.
    """
    sweep = ledger.read(directory)
    unconfirmed = {trial.token: trial.sent_at for trial in (sweep.trials if sweep else ()) if trial.token is not None}
    for token, sent_at in unconfirmed.items():
        trial_ids = ledger.list_submitted_trials(directory, token)
        job_ids = [job.id for job in queue.find_sent_jobs(token)]
        if job_ids:
            jobs = assign_jobs(trial_ids, _expand_array(job_ids, len(trial_ids)))
            ledger.add_events(directory, {"event": "sent", "token": token, "jobs": jobs})
        elif time.time() - sent_at > UNKNOWN_SECONDS:
            reason = "its submission was interrupted"
            ledger.add_events(directory, {"event": "unsent", "points": trial_ids, "reason": reason})


def _expand_array(job_ids: list[str], count: int) -> list[str]:
    """Return all elements of the array that some belong to: Slurm forgets those first that ended first."""
    first = job_ids[0].partition("_")[0]
    return [f"{first}_{index}" for index in range(count)] if count > 1 else job_ids


def assign_jobs(ids: list[str], jobs: list[str]) -> dict[str, list[str]]:
    """Return the jobs of each trial: one element of an array each, or for a single trial all jobs of its chain."""
    return {ids[0]: jobs} if len(ids) == 1 else {trial: [job] for trial, job in zip(ids, jobs, strict=True)}


ALIVE = ("queued", "running")


class Lanes:
    """The jobs of a sweep that have not ended, by lane; those in no lane precede all later ones.

    They limit a whole sweep to `hydra.launcher.at_once` jobs: so many lanes, in each of which jobs run one by one.
    Slurm itself limits how many elements of one job array run. Trials of several shapes are several arrays, and those
    that are submitted later are further ones: then each trial is a separate job in one of the lanes, and depends on all
    jobs before it in its lane. So the limit holds while no launcher waits, and when a job is requeued or cancelled.
    """

    def __init__(self, count: int, trials: Iterable[TrialState]) -> None:
        self.jobs: list[list[str]] = [[] for _ in range(count)]
        self.preceding_jobs: list[str] = []
        for trial in trials:
            if trial.state in ALIVE:
                self.add_jobs(trial.lane, trial.jobs)

    @property
    def busy(self) -> bool:
        """Whether any job has not ended."""
        return bool(self.preceding_jobs or any(self.jobs))

    def take_lane(self) -> tuple[int, str | None]:
        """Return the lane of the next job, which has the fewest, and the jobs that it depends on, in Slurm's syntax."""
        lane = min(range(len(self.jobs)), key=lambda number: len(self.jobs[number]))
        return lane, ":".join([*self.preceding_jobs, *self.jobs[lane]]) or None

    def add_jobs(self, lane: int | None, jobs: Sequence[str]) -> None:
        """Add a trial's jobs, which have been submitted."""
        if lane is not None:
            self.jobs[lane % len(self.jobs)] += jobs
            return
        arrays = (job.partition("_")[0] for job in jobs)
        self.preceding_jobs += [array for array in dict.fromkeys(arrays) if array not in self.preceding_jobs]
