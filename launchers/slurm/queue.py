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
PIECE = 200
"""The most jobs in one call of squeue."""


class JobUnknown(RunError):
    """Slurm does not know the job any more."""


@dataclass(frozen=True)
class Job:
    """A job in Slurm: its number ("123" or "123_4"), state, reason for waiting, nodes and names."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    token: str = ""
    name: str = ""

    @property
    def alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state in QUEUED | RUNNING

    @property
    def running(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING


def available() -> bool:
    """Return whether Slurm's commands are installed here."""
    return shutil.which("squeue") is not None


def jobs(wanted: Iterable[str]) -> dict[str, Job]:
    """Return these jobs by number; one that Slurm no longer knows is left out.

    Raises:
        RunError: when Slurm does not answer.
    """
    wanted = set(wanted)
    if not wanted:
        return {}
    there = _known(sorted({job.partition("_")[0] for job in wanted}))
    # an array that was cancelled before it started has one line, under its own number
    whole = {job.id.partition("_")[0]: job for job in there if "_" not in job.id or "[" in job.id}
    found = {name: replace(whole[first], id=name) for name in wanted if (first := name.partition("_")[0]) in whole}
    found |= {job.id: job for job in there if job.id in wanted}
    return found | _accounts(wanted - found.keys())


def sent(token: str) -> list[Job]:
    """Return the jobs with a token, in the order of their numbers; those that ended long ago are missing.

    Raises:
        RunError: when Slurm does not answer.
    """
    return sorted((job for job in _mine() if token in (job.token, job.name[-len(token) :])), key=_number)


def count() -> int:
    """Return how many jobs of this user wait or run; each element of an array counts.

    Raises:
        RunError: when Slurm does not answer.
    """
    return sum(job.alive for job in _mine())


def array_size() -> int:
    """Return how many elements an array may have here; Slurm's default where it does not answer."""
    found = None
    with contextlib.suppress(RunError):
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(found[1]) if found else DEFAULT_ARRAY


def _number(job: Job) -> tuple[int, int]:
    first, _, index = job.id.partition("_")
    return int(first), int(index or 0)


def _mine() -> list[Job]:
    """Return all jobs of this user that Slurm still knows, ended ones too."""
    return _queue("--me")


def _known(numbers: list[str]) -> list[Job]:
    """Return those of these jobs that Slurm still knows, of any user."""
    found = []
    for first in range(0, len(numbers), PIECE):
        with contextlib.suppress(JobUnknown):
            found += _queue(f"--jobs={','.join(numbers[first : first + PIECE])}")
    return found


def _queue(which: str) -> list[Job]:
    """Return squeue's jobs, each element of an array as one."""
    text = ask("squeue", which, "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%j|%k")
    return [_read(line) for line in text.splitlines() if "|" in line]


def _read(line: str) -> Job:
    """Parse a line of squeue; the comment comes last, for it may be the user's own and hold any character."""
    number, state, reason, nodes, name, comment = [*line.split("|", 5), *[""] * 5][:6]
    return Job(number, state, reason, nodes, comment, name)


def _accounts(wanted: set[str]) -> dict[str, Job]:
    """Return the jobs that squeue no longer knows, by sacct; empty where the site keeps no accounts."""
    if not wanted or shutil.which("sacct") is None:
        return {}
    command = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList", "-j", ",".join(sorted(wanted))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in done.stdout.splitlines():
        name, state, nodes = [*line.split("|"), "", ""][:3]
        if name in wanted and state:
            found[name] = Job(name, state.split()[0].rstrip("+"), "", nodes)
    return found


def ask(*command: str) -> str:
    """Return what one of Slurm's commands prints.

    Raises:
        JobUnknown: when it does not know the job.
        RunError: when it can't be run or fails, with its own message.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{command[0]} does not answer ({error}); is Slurm up?") from error
    if "Invalid job id" in done.stderr:
        raise JobUnknown(f"{command[0]}: {' '.join(done.stderr.split())}")
    if done.returncode:
        raise RunError(f"{command[0]}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
