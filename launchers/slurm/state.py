"""How the points of a sweep stand: the ledger, what jobs left behind, and Slurm, held together. Free of torch."""

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
    "TIMEOUT": ("stopped", "its time was up before it had saved; raise cluster.time or cluster.signal_seconds"),
    "PREEMPTED": ("stopped", "preempted"),
    "NODE_FAIL": ("stopped", "its node failed"),
    "BOOT_FAIL": ("failed", "its node did not boot"),
    "DEADLINE": ("failed", "its deadline had passed"),
    "OUT_OF_MEMORY": ("failed", "out of memory on its node"),
}
"""What Slurm's words for a job that has ended mean."""
UNKNOWN_SECONDS = 120.0
"""How long after a submission Slurm may not know its jobs, until it counts as failed."""
FORGOTTEN = "Slurm no longer knows its job, which left no word: its node was lost, or it was killed"


def standing(directory: Path) -> SweepState | None:
    """The sweep in a directory, with what Slurm says of its jobs where Slurm is here; None: no sweep.

    Raises:
        RunError: when Slurm does not answer.
    """
    if not queue.available():
        return ledger.read(directory)
    known = queue.jobs(job for point in ledger.noted(directory) for job in point.jobs)
    with contextlib.suppress(OSError):
        os.listdir(directory / ledger.SLURM)  # so that a shared folder's client looks again
    sweep = ledger.read(directory)  # only now: what ended before has left its words
    if sweep is None:
        return None
    points = (reconciled(sweep.directory, point, known) if point.jobs else point for point in sweep.points)
    return replace(sweep, points=tuple(points))


def reconciled(directory: Path, point: TrialState, known: dict[str, Job]) -> TrialState:
    """A point that was handed to Slurm, with what Slurm says of its jobs."""
    if point.state == "finished":
        return point
    alive = [known[job] for job in point.jobs if job in known and known[job].alive]
    if running := next((job for job in alive if job.running), None):
        return replace(point, state="running", job=running.id, reason=None)
    if alive:
        reason = "; ".join(filter(None, (point.reason, _waits(alive[0])))) or None
        return replace(point, state="queued", job=alive[0].id, reason=reason)
    if point.state in ("failed", "stopped"):
        return point
    last = known.get(point.job or "")
    state, reason = OVER.get(last.state, ("failed", None)) if last else ("failed", FORGOTTEN)
    attempt = job_exit.last_exit(directory / ledger.SLURM, str(point.job))
    if attempt is not None and attempt.again:
        state, reason = "stopped", f"{attempt.reason}, and not begun again"
    if reason is None:
        folder = directory / ledger.SLURM
        reason = job_exit.error(folder, job_exit.latest_attempt(folder, str(point.job))) or "ended without a word"
    return replace(point, state=state, reason=reason)  # type: ignore[arg-type]


def _waits(job: Job) -> str | None:
    """Why a job waits, where Slurm says more than that it does."""
    return None if job.reason in ("", "None") else f"waits: {job.reason}"


def adopt(directory: Path) -> None:
    """Find the jobs of submissions that were cut short before their numbers were written down, and write them down.

    Slurm may take a job and yet not say so; a submission counts as failed once Slurm has not known it for a while.

    Raises:
        RunError: when Slurm does not answer.
    """
    sweep = ledger.read(directory)
    lost = {point.token: point.sent_at for point in (sweep.points if sweep else ()) if point.token is not None}
    for token, sent_at in lost.items():
        listed, found = ledger.listed(directory, token), [job.id for job in queue.sent(token)]
        if found:
            jobs = numbered(listed, _siblings(found, len(listed)))
            ledger.add(directory, {"event": "sent", "token": token, "jobs": jobs})
        elif time.time() - sent_at > UNKNOWN_SECONDS:
            reason = "its submission was cut short"
            ledger.add(directory, {"event": "unsent", "points": listed, "reason": reason})


def _siblings(found: list[str], count: int) -> list[str]:
    """All elements of the array that some belong to: Slurm forgets those first that ended first."""
    first = found[0].partition("_")[0]
    return [f"{first}_{index}" for index in range(count)] if count > 1 else found


def numbered(ids: list[str], jobs: list[str]) -> dict[str, list[str]]:
    """Which jobs belong to which point: an element of an array each, or of a single point all jobs of its chain."""
    return {ids[0]: jobs} if len(ids) == 1 else {point: [job] for point, job in zip(ids, jobs, strict=True)}
