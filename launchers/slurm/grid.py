"""Submit the trials of a sweep to Slurm through submitit, and wait for them or leave. Free of torch.

Trials of the same shape are one job array, or several where the site limits their size; where `at_once` concerns more
than one array, each trial is a separate job (`launchers.slurm.lanes`). Before a submission the ledger records its token
and its trials, afterwards the jobs' numbers: a launcher that is killed in between loses nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launchers import trials as grid
from launchers.slurm import queue, script, snapshot
from launchers.slurm.lanes import Lanes
from launchers.slurm.script import Work
from launchers.slurm.shape import Shape, shape
from launchers.slurm.state import adopt, numbered, read_state
from launchers.trials import Trial
from titan.config.settings import format_value
from titan.console.text import safe, safe_lines
from titan.errors import ConfigError, RunError
from titan.files.atomic import write_atomic, write_json
from titan.run import own_code, summary
from titan.run.ended import is_done
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.schema import SlurmLaunch

CLIENT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Slurm's variables that name how to reach it; the others belong to a job."""
RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
ENDED = {"finished": 0, "stopped": 130, "failed": 1}
"""The exit code of a trial by its state."""
OPEN = ("planned", "stopped", "failed")
"""States of trials that are to be submitted."""
PATIENCE = 60
"""How many times in a row Slurm may not answer while a launcher waits."""


class SubmissionRejected(RunError):
    """Slurm rejected a job."""


class QueueFull(SubmissionRejected):
    """Slurm rejected a job, since its user has as many as the site allows."""


@dataclass
class SlurmSweep:
    """A sweep that is submitted to Slurm.

    Attributes:
        root: the sweep's directory.
        trials: what is to run.
        how: the launcher's settings.
        spec: what the sweep is for.
        describe: returns what a dry run prints about trials beside their scripts.
        printed: the last state of each trial that was printed.
        excluded: nodes that were printed as excluded.
        shapes: the resources of each trial, by its id.
    """

    root: Path
    trials: Sequence[Trial]
    how: SlurmLaunch
    spec: SweepSpec
    describe: Callable[[Sequence[Trial]], str] = lambda trials: ""
    printed: dict[str, str] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = {trial.id: shape(trial.run) for trial in self.trials}
        self.folder = self.root / ledger.SLURM
        self.code = snapshot.ROOT

    def launch(self) -> list[int]:
        """Submit the trials that are not finished; returns the exit code of each, 0 for those that are not waited for.

        Raises:
            ConfigError: without Slurm or submitit.
            RunError: when Slurm rejects a job or does not answer.
            KeyboardInterrupt: for Ctrl-C while waiting; the jobs continue.
        """
        self._check()
        if self.how.dry_run:
            return self._show()
        with ledger.exclusive_lock(self.root):
            grid.register_trials(self.root, self.trials, self.spec)
            adopt(self.root)
            own = sorted({package for trial in self.trials for package in own_code.packages(trial.run)})
            self.code = snapshot.take(self.folder, own) if self.how.snapshot else snapshot.ROOT
            left = self._submit_first(self._to_do())
        if not self.how.wait:
            self._print_left(left)
            return [0] * len(self.trials)
        try:
            return self._wait(left)
        except KeyboardInterrupt:
            print(f"\nThe jobs continue. {self._next()}", flush=True)
            raise

    def _check(self) -> None:
        """Raise ConfigError without submitit or Slurm, and with limits that no trial can keep."""
        if importlib.util.find_spec("submitit") is None:
            raise ConfigError("hydra/launcher=slurm: needs submitit; pip install 'titan[slurm]'.")
        if not (self.how.dry_run or queue.available()):
            raise ConfigError(
                "hydra/launcher=slurm: Slurm's commands are not installed here; run this where sbatch is, or give "
                "hydra.launcher.dry_run=true."
            )
        if not self.how.dry_run:
            _check_controller()  # before anything is written
        if "%" in str(self.root):
            raise ConfigError(f"hydra.run.dir={self.root}: Slurm would interpret the % in it; choose another name.")
        for one in self.shapes.values():
            script.signal_of(one.cluster)
        longest = max(one.cluster.chain for one in self.shapes.values())
        if self.how.max_jobs is not None and longest > self.how.max_jobs:
            raise ConfigError(
                f"hydra.launcher.max_jobs={self.how.max_jobs}: is less than the cluster.chain={longest} jobs of one "
                "chain; give at least as many."
            )

    def _submit_first(self, todo: list[Trial]) -> list[Trial]:
        """Submit as `_submit` does; when a later job is rejected, print how to continue with those before."""
        try:
            return self._submit(todo)
        except RunError:
            if any(state == "queued" for state in self.printed.values()):
                print(f"The jobs submitted before continue. {self._next()}", flush=True)
            raise

    def _to_do(self) -> list[Trial]:
        """Return the trials that are neither finished nor with Slurm."""
        now = {id: trial.state for id, trial in self._now().items()}
        self.printed = {p.id: now.get(p.id, "planned") for p in self.trials}
        for state in ("finished", "running", "queued"):
            if count := list(self.printed.values()).count(state):
                print(f"{count} of {len(self.trials)} trials: {state}, not submitted again", flush=True)
        return [p for p in self.trials if self.printed[p.id] in OPEN and not is_done(p.run)]

    def _now(self) -> dict[str, TrialState]:
        sweep = read_state(self.root)
        return {trial.id: trial for trial in sweep.trials} if sweep else {}

    def _submit(self, todo: list[Trial]) -> list[Trial]:
        """Submit as many trials as the queue has room for; returns the others."""
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
        """Return how many more jobs the user may have in the queue."""
        return None if self.how.max_jobs is None else max(0, self.how.max_jobs - queue.count())

    def _arrays(self, todo: Sequence[Trial], lanes: Lanes | None) -> list[list[Trial]]:
        """Group trials that are submitted together: as arrays, or one by one in lanes where no array can limit them."""
        arrays = list(self._by_shape(todo))
        return [[p] for p in todo] if lanes and (len(arrays) > 1 or lanes.busy) else arrays

    def _by_shape(self, todo: Sequence[Trial]) -> Iterator[list[Trial]]:
        """Yield trials of the same shape, as many as an array may have; those of chains one by one."""
        by_shape: list[tuple[Shape, list[Trial]]] = []
        for trial in todo:
            mine = self.shapes[trial.id]
            same = next((trials for one, trials in by_shape if one == mine), None)
            if same is None:
                by_shape.append((mine, same := []))
            same.append(trial)
        for one, same in by_shape:
            most = 1 if one.cluster.chain else min(self.how.array_size or queue.array_size(), queue.array_size())
            yield from (same[i : i + most] for i in range(0, len(same), most))

    def _send(self, chunk: list[Trial], lanes: Lanes | None) -> None:
        """Submit one array, or one trial's job or chain of jobs, which take a lane where there are any."""
        lane, before = lanes.take() if lanes else (None, None)
        token = f"titan-{uuid.uuid4().hex[:12]}"
        one = self.shapes[chunk[0].id]
        files = [grid.pickle_run(trial, self.folder / "points") for trial in chunk]
        list_ = self.folder / f"{token}.json"
        write_json(list_, {"points": list(map(str, files)), "tasks": one.cluster.tasks, "ranks_per_node": one.ranks})
        write_atomic(list_.with_suffix(".runs"), "".join(f"{trial.run.directory}\n" for trial in chunk))
        ids = [trial.id for trial in chunk]
        ledger.add(self.root, {"event": "sending", "token": token, "points": ids})
        jobs: list[str] = []
        try:
            for _ in range(max(1, one.cluster.chain)):
                jobs += self._sbatch(one, self._work(chunk, token, list_, jobs[-1] if jobs else before))
        except SubmissionRejected as error:
            if not jobs:
                ledger.add(self.root, {"event": "unsent", "points": ids, "reason": str(error)})
                raise
        ledger.add(self.root, {"event": "sent", "token": token, "jobs": numbered(ids, jobs), "lane": lane})
        if lanes:
            lanes.put(lane, jobs)
        for trial, job in zip(chunk, jobs, strict=False):
            self._print_state(trial, "queued", f"job {job}, {one}")

    def _work(self, chunk: list[Trial], token: str, list_: Path, after: str | None) -> Work:
        one = self.shapes[chunk[0].id].cluster
        bad = job_exit.bad_nodes(self.folder, one.exclude_bad) if one.exclude_bad else []
        if new := [node for node in bad if node not in self.excluded]:
            self.excluded += new
            print(f"cluster.exclude_bad={one.exclude_bad}: without {', '.join(new)}", flush=True)
        return Work(
            self.folder, list_, self.root.name, token, self.code, len(chunk), self.how.at_once, after, tuple(bad)
        )

    def _sbatch(self, one: Shape, work: Work) -> list[str]:
        """Submit a script; returns the numbers of its jobs.

        Raises:
            QueueFull: when the user has as many jobs in the queue as the site allows.
            SubmissionRejected: when Slurm rejects the job, with its own message.
            RunError: when it is unknown whether Slurm took the job.
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
            raise _submission_error(_sbatch_message(error), one) from error
        for file in work.folder.glob(f"{first}_submission.sh"):
            file.chmod(0o600)  # it may hold secrets, of cluster.environment
        return [f"{first}_{i}" for i in range(work.count)] if work.count > 1 else [first]

    def _wait(self, left: list[Trial]) -> list[int]:
        """Print each change of state until all trials have ended, and submit those that had no room before."""
        unanswered = 0
        while True:
            try:
                now = self._now()
                left = self._submit_more(left)
                unanswered = 0
            except RunError as error:
                unanswered += 1
                if unanswered == 1:
                    print(f"{error} Retrying.", flush=True)
                if unanswered == PATIENCE:
                    raise
                time.sleep(self.how.poll_seconds)
                continue
            waiting = {trial.id for trial in left}
            for trial in self.trials:
                if trial.id not in waiting:
                    self._print_state(trial, now[trial.id].state, now[trial.id].reason)
            if not left and all(now[trial.id].state in ENDED for trial in self.trials):
                self._print_left([])
                return [0 if is_done(trial.run) else ENDED[now[trial.id].state] for trial in self.trials]
            time.sleep(self.how.poll_seconds)

    def _submit_more(self, left: list[Trial]) -> list[Trial]:
        """Submit trials that had no room before and that no other launcher has submitted; returns the others."""
        if not left:
            return []
        with ledger.exclusive_lock(self.root):
            adopt(self.root)
            now = self._now()
            return self._submit([trial for trial in left if now[trial.id].state in OPEN and not is_done(trial.run)])

    def _print_state(self, trial: Trial, state: str, more: str | None) -> None:
        """Print the state of a trial if it has changed."""
        if self.printed.get(trial.id) != state:
            self.printed[trial.id] = state
            why = f"  ({safe(more)})" if more else ""
            print(f"{time.strftime('%H:%M:%S')}  {state:<8}  {trial.label}{why}", flush=True)

    def _print_left(self, left: list[Trial]) -> None:
        if left:
            print(
                f"{len(left)} trials were not submitted (hydra.launcher.max_jobs={self.how.max_jobs}): give the "
                "same command again when jobs have ended."
            )
        print(self._next(), flush=True)

    def _next(self) -> str:
        """Return the commands that a user may want next."""
        shown = summary.short(str(self.root))
        jobs = sorted(
            {job.partition("_")[0] for p in self._now().values() if p.state in ("queued", "running") for job in p.jobs}
        )
        cancel = f"; scancel {' '.join(jobs)} ends them" if jobs else ""
        if not jobs and len(self.trials) > 1:
            cancel = f"; python -m titan.compare {shown} compares them"
        return f"python -m titan.status {shown} shows their state{cancel}."

    def _show(self) -> list[int]:
        """Print the scripts that would be submitted now, the trials' plan, and the device-hours that they may use."""
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
        if todo:
            print(self.describe(todo))
        cost = "unknown without cluster.time" if hours is None else f"at most {hours:,.1f}"
        print(
            f"{len(todo)} trials; device-hours: {cost} for each attempt of a job. Nothing was submitted.",
            flush=True,
        )
        return [0] * len(self.trials)


@contextmanager
def _outside() -> Iterator[None]:
    """Remove the variables of a surrounding job or of torchrun while the block runs: jobs would inherit them."""
    kept = dict(os.environ)
    for name in kept:
        if (name.startswith("SLURM_") and name not in CLIENT) or name in RANK:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def _sbatch_message(error: Exception) -> str:
    """Return sbatch's own message in the error that submitit raised."""
    lines = [line for line in str(error).splitlines() if "sbatch: error:" in line]
    return (lines[-1] if lines else str(error).strip().splitlines()[-1]).partition("sbatch: error:")[2].strip() or str(
        error
    )


def _describe_request(shape: Shape) -> str:
    """Return what a job requests of its nodes, for a user who has to request less."""
    names = ("partition", "constraint", "exclude", "gres", "exclusive", "cpus_per_rank", "node_memory_gib")
    given = {name: getattr(shape.cluster, name) for name in (*names, "rank_memory_gib")}
    asked = [f"cluster.{name}={format_value(value)}" for name, value in given.items() if value]
    return f"The job requested {' '.join([str(shape), *asked])}; request what the nodes have."


def _submission_error(message: str, shape: Shape) -> RunError:
    """Return the error for a message of sbatch."""
    text = f"sbatch: {message.rstrip('.')}."
    if re.search(r"configuration is not available|CPU count|memory specification", message, re.IGNORECASE):
        return SubmissionRejected(f"{text} {_describe_request(shape)}")
    if re.search(r"MaxSubmit|job submit limit", message, re.IGNORECASE):
        return QueueFull(text)
    unsure = re.search(r"timed out|connection|zero bytes|communication", message, re.IGNORECASE)
    return (
        RunError(f"{text} It is unknown whether it took the job; give the same command again.")
        if unsure
        else SubmissionRejected(text)
    )


def _check_controller() -> None:
    """Raise ConfigError where no Slurm controller answers."""
    try:
        queue.ask("scontrol", "ping")
    except RunError as error:
        reason = str(error).rpartition("fatal: ")[2]
        raise ConfigError(
            f"hydra/launcher=slurm: no Slurm controller answers here ({reason}); run this on a login node of a "
            "cluster, or give hydra.launcher.dry_run=true."
        ) from error
