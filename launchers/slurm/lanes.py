"""Limit a whole sweep to `hydra.launcher.at_once` jobs: so many lanes, in each of which jobs run one by one.

Slurm itself limits how many elements of one job array run. Trials of several shapes are several arrays, and those that
are submitted later are further ones: then each trial is a separate job in one of the lanes, and depends on all jobs
before it in its lane. So the limit holds while no launcher waits, and when a job is requeued or cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan.sweep.ledger import TrialState

ALIVE = ("queued", "running")


class Lanes:
    """The jobs of a sweep that have not ended, by lane; those in no lane precede all later ones."""

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
