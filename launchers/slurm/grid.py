"""Hand the points of a grid to Slurm through submitit, and wait for them or leave. Free of torch.

Points of equal shape go as one job array, cut where the site's limits say; where a grid's own limit takes more than one
array, each point goes by itself (`launchers.slurm.lanes`). Before a submission the ledger notes its token and its
points, afterwards the jobs' numbers: a launcher that is killed in between loses nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launchers import trials as grid
from launchers.slurm import queue, script, snapshot
from launchers.slurm.lanes import Lanes
from launchers.slurm.script import Work
from launchers.slurm.shape import Shape, shape
from launchers.slurm.state import adopt, numbered, standing
from launchers.trials import Trial
from titan.config.settings import show
from titan.console.text import safe, safe_lines
from titan.errors import ConfigError, RunError
from titan.run import summary
from titan.sweep import ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.schema import SlurmLaunch

CLIENT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables of Slurm's that say how to reach it; the others belong to a job."""
RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
ENDED = {"finished": 0, "stopped": 130, "failed": 1}
"""The exit code of a point by its state."""
OPEN = ("planned", "stopped", "failed")
"""States of points that are to be submitted."""
PATIENCE = 60
"""How many times in a row Slurm may give no answer while a launcher waits."""


class SubmissionRejected(RunError):
    """Slurm did not take a job."""


class QueueFull(SubmissionRejected):
    """Slurm did not take a job, since its user has as many as the site allows."""


@dataclass
class Grid:
    """A grid on its way through Slurm.

    Attributes:
        root: the sweep's directory.
        points, shapes: what is to run, and on what.
        how: the launcher's settings.
        asked: what the grid is for.
        said: the last word said of each point.
    """

    root: Path
    points: Sequence[Trial]
    how: SlurmLaunch
    asked: SweepSpec
    said: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes = {point.id: shape(point.run) for point in self.points}
        self.folder = self.root / ledger.SLURM
        self.code = snapshot.ROOT

    def launch(self) -> list[int]:
        """Submit what has to run; gives the exit code of each point, 0 for those that are not waited for.

        Raises:
            ConfigError: without Slurm or submitit.
            RunError: when Slurm takes no more.
            KeyboardInterrupt: for Ctrl-C while waiting; the jobs go on.
        """
        self._check()
        if self.how.dry_run:
            return self._show()
        with ledger.alone(self.root):
            grid.register_trials(self.root, self.points, self.asked)
            adopt(self.root)
            self.code = snapshot.take(self.folder) if self.how.snapshot else snapshot.ROOT
            left = self._submit_first(self._to_do())
        if not self.how.wait:
            self._leave(left)
            return [0] * len(self.points)
        try:
            return self._wait(left)
        except KeyboardInterrupt:
            print(f"\nThe jobs go on. {self._next()}", flush=True)
            raise

    def _check(self) -> None:
        """Refuse to go on without what hands jobs to Slurm, and with limits that leave no room for a single point."""
        if importlib.util.find_spec("submitit") is None:
            raise ConfigError("hydra/launcher=slurm: needs submitit; pip install 'titan[slurm]'.")
        if not (self.how.dry_run or queue.available()):
            raise ConfigError(
                "hydra/launcher=slurm: Slurm's commands are not here; run this where sbatch is, or give "
                "hydra.launcher.dry_run=true."
            )
        if not self.how.dry_run:
            queue.ask("scontrol", "ping")  # before anything is written
        if "%" in str(self.root):
            raise ConfigError(f"hydra.run.dir={self.root}: Slurm would read the % in it; choose another name.")
        for one in self.shapes.values():
            script.signal_of(one.cluster)
        longest = max(one.cluster.chain for one in self.shapes.values())
        if self.how.max_jobs is not None and longest > self.how.max_jobs:
            raise ConfigError(
                f"hydra.launcher.max_jobs={self.how.max_jobs}: a chain of cluster.chain={longest} jobs never has room; "
                "give as many at least."
            )

    def _submit_first(self, todo: list[Trial]) -> list[Trial]:
        """As `_submit`; of what was submitted before one was refused, say how to go on."""
        try:
            return self._submit(todo)
        except RunError:
            if any(state == "queued" for state in self.said.values()):
                print(f"What was submitted goes on. {self._next()}", flush=True)
            raise

    def _to_do(self) -> list[Trial]:
        """The points that are neither finished nor with Slurm."""
        now = {id: point.state for id, point in self._now().items()}
        self.said = {p.id: now.get(p.id, "planned") for p in self.points}
        for state in ("finished", "running", "queued"):
            if count := list(self.said.values()).count(state):
                print(f"{count} of {len(self.points)} points: {state}, left as they are", flush=True)
        return [p for p in self.points if self.said[p.id] in OPEN]

    def _now(self) -> dict[str, TrialState]:
        sweep = standing(self.root)
        return {point.id: point for point in sweep.points} if sweep else {}

    def _submit(self, todo: list[Trial]) -> list[Trial]:
        """Submit points as far as the queue has room for them; gives those that are left."""
        lanes = Lanes(self.how.at_once, self._now().values()) if self.how.at_once else None
        room, waiting = self._room(), self._arrays(todo, lanes)
        left: list[Trial] = []
        while waiting:
            chunk = waiting.pop(0)
            each = max(1, chunk[0].run.cluster.chain)
            fits = len(chunk) if room is None else min(len(chunk), room // each)
            left += chunk[fits:]
            chunk = chunk[:fits]
            if not chunk:
                continue
            try:
                self._send(chunk, lanes if fits == 1 else None)
                room = None if room is None else room - fits * each
            except QueueFull:
                if fits > 1:
                    waiting[:0] = [[p] for p in chunk] if lanes else [chunk[: fits // 2], chunk[fits // 2 :]]
                else:
                    left, room = left + chunk, 0
        return left

    def _room(self) -> int | None:
        """How many more jobs the user may have in the queue."""
        return None if self.how.max_jobs is None else max(0, self.how.max_jobs - queue.count())

    def _arrays(self, todo: Sequence[Trial], lanes: Lanes | None) -> list[list[Trial]]:
        """The points that are submitted together: as an array, or each in a lane where one array can't limit them."""
        arrays = list(self._by_shape(todo))
        return [[p] for p in todo] if lanes and (len(arrays) > 1 or lanes.busy) else arrays

    def _by_shape(self, todo: Sequence[Trial]) -> Iterator[list[Trial]]:
        """Points of equal shape, as many together as an array may have; those of a chain each alone."""
        by_shape: list[tuple[Shape, list[Trial]]] = []
        for point in todo:
            mine = self.shapes[point.id]
            same = next((points for one, points in by_shape if one == mine), None)
            if same is None:
                by_shape.append((mine, same := []))
            same.append(point)
        for one, same in by_shape:
            most = 1 if one.cluster.chain else min(self.how.array_size or queue.array_size(), queue.array_size())
            yield from (same[i : i + most] for i in range(0, len(same), most))

    def _send(self, chunk: list[Trial], lanes: Lanes | None) -> None:
        """Submit one array, or one point's job or chain of jobs, in a lane where there are any."""
        lane, before = lanes.take() if lanes else (None, None)
        token = f"titan-{uuid.uuid4().hex[:12]}"
        one = self.shapes[chunk[0].id]
        files = [grid.pickle_run(point, self.folder / "points") for point in chunk]
        list_ = self.folder / f"{token}.json"
        list_.write_text(
            json.dumps({"points": list(map(str, files)), "tasks": one.cluster.tasks, "ranks_per_node": one.ranks})
        )
        list_.with_suffix(".runs").write_text("".join(f"{point.run.directory}\n" for point in chunk))
        ids = [point.id for point in chunk]
        ledger.add(self.root, {"event": "sending", "token": token, "points": ids})
        jobs: list[str] = []
        try:
            for _ in range(max(1, one.cluster.chain)):
                jobs += self._sbatch(one, self._work(chunk, token, list_, jobs[-1] if jobs else before))
        except SubmissionRejected as refused:
            if not jobs:
                ledger.add(self.root, {"event": "unsent", "points": ids, "reason": str(refused)})
                raise
        ledger.add(self.root, {"event": "sent", "token": token, "jobs": numbered(ids, jobs), "lane": lane})
        if lanes:
            lanes.put(lane, jobs)
        for point, job in zip(chunk, jobs, strict=False):
            self._say(point, "queued", f"job {job}, {one}")

    def _work(self, chunk: list[Trial], token: str, list_: Path, after: str | None) -> Work:
        return Work(self.folder, list_, self.root.name, token, self.code, len(chunk), self.how.at_once, after)

    def _sbatch(self, one: Shape, work: Work) -> list[str]:
        """Submit a script; gives the numbers of its jobs.

        Raises:
            NoRoom: when the user has as many jobs in the queue as the site allows.
            Refused: when Slurm says no, in its own words.
            RunError: when it does not say whether it took the job.
        """
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = submitit.SlurmExecutor(folder=work.folder)
        executor.update_parameters(**script.parameters(one, work))
        if work.count > 1:
            executor.parameters["map_count"] = work.count
        try:
            with _outside():
                first = executor._submit_command(script.command(one, work)).job_id
        except (FailedJobError, FailedSubmissionError) as error:
            raise _failure(_own_words(error), one) from error
        for file in work.folder.glob(f"{first}_submission.sh"):
            file.chmod(0o600)  # it may hold secrets, of cluster.environment
        return [f"{first}_{i}" for i in range(work.count)] if work.count > 1 else [first]

    def _wait(self, left: list[Trial]) -> list[int]:
        """Say how points end until all have, and submit those for which there was no room before."""
        silent = 0
        while True:
            try:
                now = self._now()
                left = self._submit_more(left)
                silent = 0
            except RunError as failure:
                silent += 1
                if silent == 1:
                    print(f"{failure} It is asked again.", flush=True)
                if silent == PATIENCE:
                    raise
                time.sleep(self.how.poll_seconds)
                continue
            waiting = {point.id for point in left}
            for point in self.points:
                if point.id not in waiting:
                    self._say(point, now[point.id].state, now[point.id].reason)
            if not left and all(now[point.id].state in ENDED for point in self.points):
                self._leave([])
                return [ENDED[now[point.id].state] for point in self.points]
            time.sleep(self.how.poll_seconds)

    def _submit_more(self, left: list[Trial]) -> list[Trial]:
        """Submit those for which there was no room before and that no other launcher has taken; gives what is left."""
        if not left:
            return []
        with ledger.alone(self.root):
            adopt(self.root)
            now = self._now()
            return self._submit([point for point in left if now[point.id].state in OPEN])

    def _say(self, point: Trial, state: str, more: str | None) -> None:
        """Say how a point stands, when that is another way than before."""
        if self.said.get(point.id) != state:
            self.said[point.id] = state
            why = f"  ({safe(more)})" if more else ""
            print(f"{time.strftime('%H:%M:%S')}  {state:<8}  {point.label}{why}", flush=True)

    def _leave(self, left: list[Trial]) -> None:
        if left:
            print(
                f"{len(left)} points found no room (hydra.launcher.max_jobs={self.how.max_jobs}): give the same "
                "command again when there is."
            )
        print(self._next(), flush=True)

    def _next(self) -> str:
        """The commands that one may want next."""
        shown = summary.short(str(self.root))
        jobs = sorted(
            {job.partition("_")[0] for p in self._now().values() if p.state in ("queued", "running") for job in p.jobs}
        )
        cancel = f"; scancel {' '.join(jobs)} ends them" if jobs else ""
        if not jobs and len(self.points) > 1:
            cancel = f"; python -m titan.compare {shown} compares them"
        return f"python -m titan.status {shown} shows how they stand{cancel}."

    def _show(self) -> list[int]:
        """Print what would be submitted now, and what it may cost."""
        hours: float | None = 0.0
        todo = self._to_do()
        lanes = Lanes(self.how.at_once, self._now().values()) if self.how.at_once else None
        for chunk in self._arrays(todo, lanes):
            one = self.shapes[chunk[0].id]
            lane, before = lanes.take() if lanes and len(chunk) == 1 else (None, None)
            print(f"# {len(chunk)} x {one}: {', '.join(p.label for p in chunk)}")
            print(safe_lines(script.text(one, self._work(chunk, "TOKEN", self.folder / "TOKEN.json", before))))
            if lanes and lane is not None:
                lanes.put(lane, [f"JOB_OF_{chunk[0].id}"])
            hours = None if hours is None or one.hours() is None else hours + len(chunk) * float(one.hours() or 0)
        cost = "unknown without cluster.time" if hours is None else f"at most {hours:,.1f}"
        print(
            f"{len(todo)} points; device-hours: {cost} for each attempt of a job. Nothing was submitted.",
            flush=True,
        )
        return [0] * len(self.points)


@contextmanager
def _outside() -> Iterator[None]:
    """Without what a job around this process, or torchrun, has put into the environment: jobs would inherit it."""
    kept = dict(os.environ)
    for name in kept:
        if (name.startswith("SLURM_") and name not in CLIENT) or name in RANK:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def _own_words(error: Exception) -> str:
    """What sbatch said, out of what submitit makes of it."""
    lines = [line for line in str(error).splitlines() if "sbatch: error:" in line]
    return (lines[-1] if lines else str(error).strip().splitlines()[-1]).partition("sbatch: error:")[2].strip() or str(
        error
    )


def _asked_for(shape: Shape) -> str:
    """What a job asks of its nodes, for one who has to ask for less."""
    names = ("partition", "constraint", "exclude", "gres", "exclusive", "cpus_per_rank", "node_memory_gib")
    given = {name: getattr(shape.cluster, name) for name in (*names, "rank_memory_gib")}
    asked = [f"cluster.{name}={show(value)}" for name, value in given.items() if value]
    return f"It was asked for {' '.join([str(shape), *asked])}; give what the nodes have."


def _failure(said: str, shape: Shape) -> RunError:
    """What became of a submission, by what sbatch said."""
    text = f"sbatch: {said.rstrip('.')}."
    if re.search(r"configuration is not available|CPU count|memory specification", said, re.IGNORECASE):
        return SubmissionRejected(f"{text} {_asked_for(shape)}")
    if re.search(r"MaxSubmit|job submit limit", said, re.IGNORECASE):
        return QueueFull(text)
    unsure = re.search(r"timed out|connection|zero bytes|communication", said, re.IGNORECASE)
    return (
        RunError(f"{text} Whether it took the job will show; give the same command again.")
        if unsure
        else SubmissionRejected(text)
    )
