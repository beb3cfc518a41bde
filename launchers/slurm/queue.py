"""The state of jobs in Slurm: by squeue, and by sacct where the site keeps accounts. Free of torch."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace

from titan.errors import RunError

QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "SUSPENDED", "STOPPED"}
DEFAULT_ARRAY = 1001
"""Slurm's MaxArraySize where a site has not set another (slurm.conf's manual)."""
SECONDS = 60
"""How long one of Slurm's commands may take."""
JOBS_PER_CALL = 200
"""The most jobs in one call of squeue."""


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

    @property
    def is_running(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING


def is_available() -> bool:
    """Return whether Slurm's commands are installed here."""
    return shutil.which("squeue") is not None


def find_jobs(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Return these jobs by number; one that Slurm no longer knows is left out."""
    ids = set(ids)
    if not ids:
        return {}
    queued_jobs = _list_jobs(sorted({job.partition("_")[0] for job in ids}))
    # an array that was cancelled before it started has one line, under its own number
    whole_arrays = {job.id.partition("_")[0]: job for job in queued_jobs if "_" not in job.id or "[" in job.id}
    jobs_by_id = {
        name: replace(whole_arrays[first], id=name) for name in ids if (first := name.partition("_")[0]) in whole_arrays
    }
    jobs_by_id |= {job.id: job for job in queued_jobs if job.id in ids}
    return jobs_by_id | _read_accounts(ids - jobs_by_id.keys())


def find_sent_jobs(token: str) -> list[SlurmJob]:
    """Return the jobs with a token, in the order of their numbers; those that ended long ago are missing."""
    jobs = [job for job in list_own_jobs() if token in (job.token, job.name[-len(token) :])]
    return sorted(jobs, key=lambda job: [int(part) for part in job.id.split("_")])


def count_jobs() -> int:
    """Return how many jobs of this user wait or run; each element of an array counts."""
    return sum(job.is_alive for job in list_own_jobs())


def read_array_limit() -> int:
    """Return how many elements an array may have here; Slurm's default where it does not answer."""
    match = None
    with contextlib.suppress(RunError):
        match = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_command("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else DEFAULT_ARRAY


def list_own_jobs() -> list[SlurmJob]:
    """Return all jobs of this user that Slurm still knows, ended ones too."""
    return _run_squeue("--me")


def _list_jobs(numbers: list[str]) -> list[SlurmJob]:
    known_jobs = []
    for first in range(0, len(numbers), JOBS_PER_CALL):
        with contextlib.suppress(UnknownJobError):
            known_jobs += _run_squeue(f"--jobs={','.join(numbers[first : first + JOBS_PER_CALL])}")
    return known_jobs


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
