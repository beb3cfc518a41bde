"""The state of a sweep's trials and of their jobs, and the jobs' lanes. Free of torch.

It follows from the ledger, the jobs' exit records and Slurm: by squeue, and by sacct where the site keeps accounts.
What asks Slurm raises RunError when that does not answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan.console.numbers import format_plural
from titan.errors import RunError
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepState, TrialState

QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "SUSPENDED", "STOPPED"}
DEFAULT_ARRAY = 1001  # Slurm's MaxArraySize where a site has not set another (slurm.conf's manual)
SECONDS = 60  # how long one of Slurm's commands may take
JOBS_PER_CALL = 200  # the most jobs in one call of squeue


class UnknownJobError(RunError):
    """Slurm does not know the job any more."""


@dataclass(frozen=True)
class SlurmJob:
    """A job in Slurm: its number ("123" or "123_4"), state, reason for waiting, nodes and names."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    token: str = ""
    name: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state in QUEUED | RUNNING


def is_available() -> bool:
    """Return whether Slurm's commands are installed here."""
    return shutil.which("squeue") is not None


def find_jobs(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Return these jobs by number; one that Slurm no longer knows is left out."""
    ids = set(ids)
    if not ids:
        return {}
    numbers, queued_jobs = sorted({job.partition("_")[0] for job in ids}), []  # those that Slurm still knows
    for first in range(0, len(numbers), JOBS_PER_CALL):
        with contextlib.suppress(UnknownJobError):
            queued_jobs += _run_squeue(f"--jobs={','.join(numbers[first : first + JOBS_PER_CALL])}")
    # an array that was cancelled before it started has one line, under its own number
    whole_arrays = {job.id.partition("_")[0]: job for job in queued_jobs if "_" not in job.id or "[" in job.id}
    jobs_by_id = {
        name: replace(whole_arrays[array], id=name) for name in ids if (array := name.partition("_")[0]) in whole_arrays
    }
    jobs_by_id |= {job.id: job for job in queued_jobs if job.id in ids}
    return jobs_by_id | _read_accounts(ids - jobs_by_id.keys())


def find_sent_jobs(token: str) -> list[SlurmJob]:
    """Return the jobs with a token, in the order of their numbers; those that ended long ago are missing."""
    jobs = [job for job in list_own_jobs() if token in (job.token, job.name[-len(token) :])]
    return sorted(jobs, key=lambda job: [int(part) for part in job.id.split("_")])


def read_array_limit() -> int:
    """Return how many elements an array may have here; Slurm's default where it does not answer."""
    match = None
    with contextlib.suppress(RunError):
        match = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_command("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else DEFAULT_ARRAY


def list_own_jobs() -> list[SlurmJob]:
    """Return all jobs of this user that Slurm still knows, ended ones too; each element of an array is one."""
    return _run_squeue("--me")


def _run_squeue(option: str) -> list[SlurmJob]:
    """Return squeue's jobs, each element of an array as one."""
    text = run_command("squeue", option, "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%j|%k")
    jobs = []
    for line in text.splitlines():
        if "|" in line:  # the comment comes last, for it may be the user's own and hold any character
            number, state, reason, nodes, name, comment = [*line.split("|", 5), *[""] * 5][:6]
            jobs.append(SlurmJob(number, state, reason, nodes, comment, name))
    return jobs


def _read_accounts(ids: set[str]) -> dict[str, SlurmJob]:
    """Return the jobs that squeue no longer knows, by sacct; empty where the site keeps no accounts."""
    if not ids or shutil.which("sacct") is None:
        return {}
    command = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList", "-j", ",".join(sorted(ids))]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    jobs_by_id = {}
    for line in process.stdout.splitlines():
        name, state, nodes = [*line.split("|"), "", ""][:3]
        if name in ids and state:
            jobs_by_id[name] = SlurmJob(name, state.split()[0].rstrip("+"), "", nodes)
    return jobs_by_id


def run_command(*command: str) -> str:
    """Return what one of Slurm's commands prints.

    Raises:
        UnknownJobError: when it does not know the job.
        RunError: when it can't be run or fails, with its own message.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{command[0]} does not answer ({error}); is Slurm up?") from error
    if "Invalid job id" in process.stderr:
        raise UnknownJobError(f"{command[0]}: {' '.join(process.stderr.split())}")
    if process.returncode:
        raise RunError(f"{command[0]}: {' '.join(process.stderr.split()) or process.returncode}")
    return process.stdout


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
UNKNOWN_SECONDS = 120.0  # how long Slurm may not know the jobs of a submission until it counts as failed
FORGOTTEN_REASON = "Slurm no longer knows its job, which left no exit record: its node was lost, or it was killed"


def read_state(directory: Path) -> SweepState | None:
    """Return the sweep in a directory, with the states of its jobs where Slurm is installed; None if there is none."""
    if not is_available():
        return ledger.read(directory)
    jobs = find_jobs(job for trial in ledger.read_trials(directory) for job in trial.jobs)
    with contextlib.suppress(OSError):
        os.listdir(directory / ledger.SLURM)  # so that a shared folder's client looks again
    sweep = ledger.read(directory)  # only now: jobs that ended before have left their exit records
    if sweep is None:
        return None
    trials = (reconcile_trial(sweep.directory, trial, jobs) if trial.jobs else trial for trial in sweep.trials)
    return replace(sweep, trials=tuple(trials))


def read_trials(directory: Path) -> dict[str, TrialState]:
    """Return the trials of the sweep in a directory by their ids; empty if there is none."""
    sweep = read_state(directory)
    return {trial.id: trial for trial in sweep.trials} if sweep else {}


def report_skipped(states: Sequence[str], total: int, verb: str) -> None:
    """Print how many trials of a command are not started again, by their states."""
    for state, count in Counter(states).items():
        print(f"{count} of {format_plural(total, 'trial')}: {state}, not {verb} again", flush=True)


def reconcile_trial(directory: Path, trial: TrialState, jobs: dict[str, SlurmJob]) -> TrialState:
    """Return a trial that was submitted to Slurm, with its state by Slurm."""
    if trial.state == "finished":
        return trial
    live_jobs = [jobs[job] for job in trial.jobs if job in jobs and jobs[job].is_alive]
    if running := next((job for job in live_jobs if job.state in RUNNING), None):
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
        job_ids = [job.id for job in find_sent_jobs(token)]
        if job_ids:
            if len(trial_ids) > 1:  # all elements of the array: Slurm forgets those first that ended first
                job_ids = [f"{job_ids[0].partition('_')[0]}_{index}" for index in range(len(trial_ids))]
            ledger.add_events(directory, {"event": "sent", "token": token, "jobs": assign_jobs(trial_ids, job_ids)})
        elif time.time() - sent_at > UNKNOWN_SECONDS:
            reason = "its submission was interrupted"
            ledger.add_events(directory, {"event": "unsent", "points": trial_ids, "reason": reason})


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
