"""`hydra.launcher.at_once` for a whole grid: so many lanes, in each of which jobs run one by one. Free of torch.

Slurm itself limits how many elements of one job array run. Points of several shapes are several arrays, and those that
are submitted later are others again: then each point is a job of its own in one of the lanes, and depends on all jobs
that are before it in its lane. So the limit holds while nobody waits, and when a job is requeued or cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan.sweep.ledger import TrialState

ALIVE = ("queued", "running")


class Lanes:
    """The jobs of a grid that have not ended, by their lane; what is in no lane is before all that come."""

    def __init__(self, count: int, points: Iterable[TrialState]) -> None:
        self.jobs: list[list[str]] = [[] for _ in range(count)]
        self.before: list[str] = []
        for point in points:
            if point.state in ALIVE:
                self.put(point.lane, point.jobs)

    @property
    def busy(self) -> bool:
        """Whether any job has not ended."""
        return bool(self.before or any(self.jobs))

    def take(self) -> tuple[int, str | None]:
        """The lane of the next job, the one with the fewest, and the jobs that it comes after, as Slurm names them."""
        lane = min(range(len(self.jobs)), key=lambda number: len(self.jobs[number]))
        return lane, ":".join([*self.before, *self.jobs[lane]]) or None

    def put(self, lane: int | None, jobs: Sequence[str]) -> None:
        """Take note of a point's jobs, which have been submitted."""
        if lane is not None:
            self.jobs[lane % len(self.jobs)] += jobs
            return
        arrays = (job.partition("_")[0] for job in jobs)
        self.before += [array for array in dict.fromkeys(arrays) if array not in self.before]
