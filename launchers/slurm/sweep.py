"""Submit the trials of a sweep to Slurm through submitit, and wait for them or leave. Free of torch.

Trials of the same shape are one job array, or several where the site limits their size; where `at_once` concerns more
than one array, each trial is a separate job (`launchers.slurm.state.Lanes`). Before a submission the ledger records its
token and its trials, afterwards the jobs' numbers: a launcher that is killed in between loses nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from launchers import trials as sweep_trials
from launchers.session import Describe, TrialSource, describe_nothing
from launchers.slurm import script
from launchers.slurm import state as slurm
from launchers.slurm.script import JobShape, Submission, derive_job_shape
from launchers.slurm.state import ALIVE, Lanes, adopt_jobs, assign_jobs, read_trials, report_skipped
from launchers.trials import Trial
from titan.config.optional import advise_extra
from titan.config.settings import format_setting, format_value
from titan.console.numbers import format_plural, format_rounded
from titan.console.text import sanitize_line, sanitize_lines
from titan.errors import ConfigError, RunError
from titan.files.atomic import write_atomic, write_json
from titan.files.run_directory import shorten_path
from titan.run import identity
from titan.run.directory import is_done
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepSpec, TrialState
from titan.sweep.schema import SlurmLaunch

CLIENT_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Slurm's variables that name how to reach it; the others belong to a job."""
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
EXIT_CODES = {"finished": 0, "stopped": 130, "failed": 1}  # the exit code of a trial by its state
OPEN_STATES = ("planned", "stopped", "failed")  # states of trials that are to be submitted
MAX_UNANSWERED = 60  # how many times in a row Slurm may not answer while a launcher waits


class SubmissionRejectedError(ConfigError):
    """Slurm rejected a job for what it requests."""


class QueueFullError(SubmissionRejectedError):
    """Slurm rejected a job, since its user has as many as the site allows."""


@dataclass
class SlurmSweep:
    """A sweep that is submitted to Slurm."""

    root: Path  # the sweep's directory
    trials: Sequence[Trial]  # what is to run
    settings: SlurmLaunch  # the launcher's
    spec: SweepSpec  # what the sweep is for
    describe: Describe = describe_nothing  # returns what a dry run prints about trials beside their scripts
    printed_states: dict[str, str] = field(default_factory=dict)  # the last state of each trial that was printed
    excluded_nodes: list[str] = field(default_factory=list)  # nodes that were printed as excluded
    source: TrialSource | None = None  # chooses more trials while others run, if any
    finished_ids: set[str] = field(default_factory=set)  # the trials that it knows have ended

    def __post_init__(self) -> None:
        self.shapes = {trial.id: derive_job_shape(trial.run) for trial in self.trials}  # resources, by id
        self.folder, self.code_folder = self.root / ledger.SLURM, ROOT

    def launch(self) -> list[int]:
        """Submit the trials that are not finished; returns the exit code of each, 0 for those that are not waited for.

        Raises:
            ConfigError: without Slurm or submitit, and when Slurm rejects a job.
            RunError: when Slurm does not answer.
            KeyboardInterrupt: for Ctrl-C while waiting; the jobs continue.
        """
        self._check_settings()
        if self.settings.dry_run:
            return self._show_plan()
        with ledger.lock_sweep(self.root):
            sweep_trials.register_trials(self.root, self.trials, self.spec)
            adopt_jobs(self.root)
            packages = sorted({package for trial in self.trials for package in identity.find_packages(trial.run)})
            self.code_folder = copy_code(self.folder, packages) if self.settings.snapshot else ROOT
            try:
                unsubmitted = self._submit_trials(self._select_todo())
            except (RunError, SubmissionRejectedError):
                if "queued" in self.printed_states.values():
                    print(f"The jobs submitted before continue. {self._describe_next_commands()}", flush=True)
                raise
        if not self.settings.wait:
            self._print_unsubmitted(unsubmitted)
            return [0] * len(self.trials)
        try:
            return self._wait_for_trials(unsubmitted)
        except KeyboardInterrupt:
            print(f"\nThe jobs continue. {self._describe_next_commands()}", flush=True)
            raise

    def launch_pool(self, source: TrialSource) -> None:
        """Submit the trials that a source asks for, and wait, until it has none left; errors as in `launch`."""
        self.trials, self.source = list(source.ask()), source
        self.__post_init__()
        if self.trials:
            self.launch()

    def _ask_source(self, waiting: set[str], trial_states: Mapping[str, TrialState]) -> list[Trial]:
        """Tell the source which trials have ended; return those that it asks for, which are to be submitted."""
        if self.source is None:
            return []
        for trial in self.trials:
            state = trial_states[trial.id].state
            if trial.id not in waiting | self.finished_ids and state in EXIT_CODES:
                self.finished_ids.add(trial.id)
                self.source.tell(trial, 0 if is_done(trial.run) else EXIT_CODES[state])
        asked = list(self.source.ask())
        if asked:
            ids = {trial.id for trial in asked}
            self.trials = [*(trial for trial in self.trials if trial.id not in ids), *asked]
            self.finished_ids -= ids
            self.shapes |= {trial.id: derive_job_shape(trial.run) for trial in asked}
            sweep_trials.register_trials(self.root, asked, self.spec)
        return asked

    def _check_settings(self) -> None:
        """Raise ConfigError without submitit or Slurm, and with limits that no trial can keep."""
        if importlib.util.find_spec("submitit") is None:
            raise ConfigError(f"hydra/launcher=slurm: needs submitit; {advise_extra('slurm')}.")
        if not (self.settings.dry_run or slurm.is_available()):
            raise ConfigError(
                "hydra/launcher=slurm: Slurm's commands are not installed here; run this where sbatch is, or give "
                "hydra.launcher.dry_run=true."
            )
        if not self.settings.dry_run:
            _check_controller()  # before anything is written
        if "%" in str(self.root):
            raise ConfigError(f"hydra.run.dir={self.root}: Slurm would interpret the % in it; choose another name.")
        for job_shape in self.shapes.values():
            script.choose_signal(job_shape.cluster)
        longest_chain = max(job_shape.cluster.chain for job_shape in self.shapes.values())
        if self.settings.max_jobs is not None and longest_chain > self.settings.max_jobs:
            raise ConfigError(
                f"hydra.launcher.max_jobs={self.settings.max_jobs}: is less than the cluster.chain={longest_chain} "
                "jobs of one chain; give at least as many."
            )

    def _select_todo(self) -> list[Trial]:
        """Return the trials that are neither finished nor with Slurm."""
        states = read_trials(self.root)
        self.printed_states = {p.id: states[p.id].state if p.id in states else "planned" for p in self.trials}
        skipped = [state for state in self.printed_states.values() if state not in OPEN_STATES]
        report_skipped(sorted(skipped, key=("finished", *ALIVE[::-1]).index), len(self.trials), "submitted")
        return [p for p in self.trials if self.printed_states[p.id] in OPEN_STATES and not is_done(p.run)]

    def _submit_trials(self, todo: list[Trial]) -> list[Trial]:
        """Submit as many trials as the queue has room for; returns the others."""
        lanes = Lanes(self.settings.at_once, read_trials(self.root).values()) if self.settings.at_once else None
        most, pending_chunks = self.settings.max_jobs, self._group_trials(todo, lanes)
        free_slots = None if most is None else max(0, most - sum(job.is_alive for job in slurm.list_own_jobs()))
        unsubmitted: list[Trial] = []
        while pending_chunks:
            chunk = pending_chunks.pop(0)
            chain_length = max(1, chunk[0].run.cluster.chain)
            fits = len(chunk) if free_slots is None else min(len(chunk), free_slots // chain_length)
            unsubmitted += chunk[fits:]
            chunk = chunk[:fits]
            if not chunk:
                continue
            try:
                self._submit_chunk(chunk, lanes if fits == 1 else None)
                free_slots = None if free_slots is None else free_slots - fits * chain_length
            except QueueFullError:
                if fits > 1:
                    pending_chunks[:0] = [[p] for p in chunk] if lanes else [chunk[: fits // 2], chunk[fits // 2 :]]
                else:
                    unsubmitted, free_slots = unsubmitted + chunk, 0
        return unsubmitted

    def _group_trials(self, todo: Sequence[Trial], lanes: Lanes | None) -> list[list[Trial]]:
        """Group trials that are submitted together: as arrays, or one by one in lanes where no array can limit them.

        An array has trials of the same shape, as many as it may have; those of chains come one by one.
        """
        groups: dict[str, list[Trial]] = {}
        for trial in todo:
            groups.setdefault(repr(self.shapes[trial.id]), []).append(trial)
        arrays: list[list[Trial]] = []
        for group in groups.values():
            limit = 1 if group[0].run.cluster.chain else slurm.read_array_limit()
            size = min(self.settings.array_size or limit, limit)
            arrays += [group[i : i + size] for i in range(0, len(group), size)]
        return [[p] for p in todo] if lanes and (len(arrays) > 1 or lanes.busy) else arrays

    def _submit_chunk(self, chunk: list[Trial], lanes: Lanes | None) -> None:
        """Submit one array, or one trial's job or chain of jobs, which take a lane where there are any."""
        lane, dependency = lanes.take_lane() if lanes else (None, None)
        token = f"titan-{uuid.uuid4().hex[:12]}"
        job_shape = self.shapes[chunk[0].id]
        files = [sweep_trials.write_run(trial, self.folder / "points") for trial in chunk]
        trial_list, tasks = self.folder / f"{token}.json", job_shape.cluster.tasks
        write_json(trial_list, {"points": list(map(str, files)), "tasks": tasks, "ranks_per_node": job_shape.ranks})
        write_atomic(trial_list.with_suffix(".runs"), "".join(f"{trial.run.directory}\n" for trial in chunk))
        ids = [trial.id for trial in chunk]
        ledger.add_events(self.root, {"event": "sending", "token": token, "points": ids})
        jobs: list[str] = []
        try:
            for _ in range(max(1, job_shape.cluster.chain)):
                after = jobs[-1] if jobs else dependency
                jobs += self._run_sbatch(job_shape, self._build_submission(chunk, token, trial_list, after))
        except SubmissionRejectedError as error:
            if not jobs:
                ledger.add_events(self.root, {"event": "unsent", "points": ids, "reason": str(error)})
                raise
        ledger.add_events(self.root, {"event": "sent", "token": token, "jobs": assign_jobs(ids, jobs), "lane": lane})
        if lanes:
            lanes.add_jobs(lane, jobs)
        for trial, job in zip(chunk, jobs, strict=False):
            self._print_state(trial, "queued", f"job {job}, {job_shape}")

    def _build_submission(self, chunk: list[Trial], token: str, trial_list: Path, dependency: str | None) -> Submission:
        cluster = self.shapes[chunk[0].id].cluster
        bad_nodes = job_exit.find_bad_nodes(self.folder, cluster.exclude_bad) if cluster.exclude_bad else []
        if new_nodes := [node for node in bad_nodes if node not in self.excluded_nodes]:
            self.excluded_nodes += new_nodes
            print(f"cluster.exclude_bad={cluster.exclude_bad}: without {', '.join(new_nodes)}", flush=True)
        name, at_once, nodes = self.root.name, self.settings.at_once, tuple(bad_nodes)
        return Submission(
            self.folder, trial_list, name, token, self.code_folder, len(chunk), at_once, dependency, nodes
        )

    def _run_sbatch(self, job_shape: JobShape, submission: Submission) -> list[str]:
        """Submit a script; returns the numbers of its jobs.

        Raises:
            QueueFullError: when the user has as many jobs in the queue as the site allows.
            SubmissionRejectedError: when Slurm rejects the job, with its own message.
            RunError: when it is unknown whether Slurm took the job.
        """
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = submitit.SlurmExecutor(folder=submission.folder)
        executor.update_parameters(**script.build_parameters(job_shape, submission))
        if submission.count > 1:
            executor.parameters["map_count"] = submission.count
        try:
            with _hide_job_variables(), redirect_stderr(io.StringIO()):  # submitit prints what sbatch does
                job_id = executor._submit_command(script.build_command(job_shape, submission)).job_id
        except (FailedJobError, FailedSubmissionError) as error:
            raise _build_submission_error(_find_sbatch_message(error), job_shape) from error
        for file in submission.folder.glob(f"{job_id}_submission.sh"):
            file.chmod(0o600)  # it may hold secrets, of cluster.environment
        return [f"{job_id}_{i}" for i in range(submission.count)] if submission.count > 1 else [job_id]

    def _wait_for_trials(self, unsubmitted: list[Trial]) -> list[int]:
        """Print each change of state until all trials have ended, and submit those that had no room before."""
        unanswered = 0
        while True:
            try:
                trial_states = read_trials(self.root)
                unsubmitted = self._submit_more(unsubmitted)
                unanswered = 0
            except (RunError, SubmissionRejectedError) as error:
                unanswered += 1
                if unanswered == 1:
                    print(f"{error} Retrying.", flush=True)
                if unanswered == MAX_UNANSWERED:
                    raise
                time.sleep(self.settings.poll_seconds)
                continue
            waiting = {trial.id for trial in unsubmitted}
            for trial in self.trials:
                if trial.id not in waiting:
                    self._print_state(trial, trial_states[trial.id].state, trial_states[trial.id].reason)
            if asked := self._ask_source(waiting, trial_states):
                unsubmitted += asked
                continue
            if not unsubmitted and all(trial_states[trial.id].state in EXIT_CODES for trial in self.trials):
                self._print_unsubmitted([])
                return [0 if is_done(trial.run) else EXIT_CODES[trial_states[trial.id].state] for trial in self.trials]
            time.sleep(self.settings.poll_seconds)

    def _submit_more(self, unsubmitted: list[Trial]) -> list[Trial]:
        """Submit trials that had no room before and that no other launcher has submitted; returns the others."""
        if not unsubmitted:
            return []
        with ledger.lock_sweep(self.root):
            adopt_jobs(self.root)
            states = read_trials(self.root)
            still_open = [trial for trial in unsubmitted if states[trial.id].state in OPEN_STATES]
            return self._submit_trials([trial for trial in still_open if not is_done(trial.run)])

    def _print_state(self, trial: Trial, state: str, detail: str | None) -> None:
        if self.printed_states.get(trial.id) != state:
            self.printed_states[trial.id] = state
            suffix = f"  ({sanitize_line(detail)})" if detail else ""
            print(f"{time.strftime('%H:%M:%S')}  {state:<8}  {trial.label}{suffix}", flush=True)

    def _print_unsubmitted(self, unsubmitted: list[Trial]) -> None:
        if unsubmitted:
            print(
                f"not submitted: {format_plural(len(unsubmitted), 'trial')} "
                f"(hydra.launcher.max_jobs={self.settings.max_jobs}); "
                "give the same command again when jobs have ended."
            )
        if self.source is None:  # a search ends with the counts of its study
            print(self._describe_next_commands(), flush=True)

    def _describe_next_commands(self) -> str:
        directory = shorten_path(str(self.root))
        running = [trial for trial in read_trials(self.root).values() if trial.state in ALIVE]
        jobs = sorted({job.partition("_")[0] for trial in running for job in trial.jobs})
        cancel = f"; scancel {' '.join(jobs)} ends them" if jobs else ""
        if not jobs and len(self.trials) > 1:
            cancel = f"; python -m titan.compare {directory} compares them"
        return f"python -m titan.status {directory} shows their state{cancel}."

    def _show_plan(self) -> list[int]:
        """Print the scripts that would be submitted now, the trials' plan, and the device-hours that they may use."""
        todo = self._select_todo()
        lanes = Lanes(self.settings.at_once, read_trials(self.root).values()) if self.settings.at_once else None
        for chunk in self._group_trials(todo, lanes):
            job_shape = self.shapes[chunk[0].id]
            lane, dependency = lanes.take_lane() if lanes and len(chunk) == 1 else (None, None)
            print(f"# {len(chunk)} x {job_shape}: {', '.join(p.label for p in chunk)}")
            submission = self._build_submission(chunk, "TOKEN", self.folder / "TOKEN.json", dependency)
            print(sanitize_lines(script.build_script(job_shape, submission)))
            if lanes and lane is not None:
                lanes.add_jobs(lane, [f"JOB_OF_{chunk[0].id}"])
        plans = self.describe(todo)
        if todo:
            print(plans.text)
        limits = [self.shapes[trial.id].compute_device_hours() for trial in todo]
        print(f"{format_cost(plans.device_hours, limits)} Nothing was submitted.", flush=True)
        return [0] * len(self.trials)


def format_cost(predicted: Sequence[float | None], limits: Sequence[float | None]) -> str:
    """Return the sentences on the device-hours of trials.

    Args:
        predicted: of each trial's training steps; None where they are not predicted.
        limits: that the time limits of each trial's jobs allow; None where a job has none.
    """
    if not predicted:
        return "0 trials."
    predicted_hours, allowed_hours = ([h for h in hours if h is not None] for hours in (predicted, limits))
    steps = f"{format_rounded(sum(predicted_hours))} device-hours of training steps predicted"
    steps += f" for {len(predicted_hours)} of them" if len(predicted_hours) < len(predicted) else ""
    parts = [steps if predicted_hours else "device-hours not predicted"]
    limit = f"at most {format_rounded(sum(allowed_hours))} by cluster.time, if each job is started once"
    parts.append("no limit without cluster.time" if len(allowed_hours) < len(limits) else limit)
    longer = sum(h > limit for h, limit in zip(predicted, limits, strict=True) if h is not None and limit is not None)
    subject = "1 trial needs" if longer == 1 else f"{longer:,} trials need"
    note = f" {subject} more than cluster.time allows: raise it, or their jobs are started again." if longer else ""
    return f"{format_plural(len(predicted), 'trial')}: {'; '.join(parts)}.{note}"


@contextmanager
def _hide_job_variables() -> Iterator[None]:
    """Remove the variables of a surrounding job or of torchrun while the block runs: jobs would inherit them."""
    saved_variables = dict(os.environ)
    for name in saved_variables:
        if (name.startswith("SLURM_") and name not in CLIENT_VARIABLES) or name in RANK_VARIABLES:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(saved_variables)


def _find_sbatch_message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    errors = [line for line in lines if "sbatch: error:" in line]
    line = errors[-1] if errors else next((line for line in lines if line.startswith("sbatch:")), lines[-1])
    return line.rpartition("sbatch: error:")[2].strip().removeprefix("sbatch: ")


def _describe_request(shape: JobShape) -> str:
    """Return what a job requests of its nodes, for a user who has to request less."""
    names = ("partition", "constraint", "exclude", "gres", "exclusive", "cpus_per_rank", "node_memory_gib")
    requests = {name: getattr(shape.cluster, name) for name in (*names, "rank_memory_gib")}
    assignments = [f"cluster.{name}={format_value(value)}" for name, value in requests.items() if value]
    return f"The job requested {' '.join([str(shape), *assignments])}; request what the nodes have."


_REJECTIONS = {
    "account": "account", "qos": "qos", "reservation": "reservation", "partition": "partition", "time limit": "time",
    "feature specification": "constraint", "node name": "exclude",
}  # fmt: skip
"""Settings of the cluster by what sbatch says of them."""


def _build_submission_error(message: str, shape: JobShape) -> SubmissionRejectedError | RunError:
    text = f"sbatch: {message.rstrip('.')}."
    if re.search(r"configuration is not available|CPU count|memory specification", message, re.IGNORECASE):
        return SubmissionRejectedError(f"{text} {_describe_request(shape)}")
    if re.search(r"MaxSubmit|job submit limit", message, re.IGNORECASE):
        return QueueFullError(text)
    if re.search(r"timed out|connection|zero bytes|communication", message, re.IGNORECASE):
        return RunError(f"{text} It is unknown whether it took the job; give the same command again.")
    return SubmissionRejectedError(
        f"{_name_setting(message, shape)}: sbatch rejects the job ({message.rstrip('.')}); correct it."
    )


def _name_setting(message: str, shape: JobShape) -> str:
    """Return the setting that a message of sbatch is about, with its value; else the axis."""
    values = {f"cluster.{name}": getattr(shape.cluster, name) for name in _REJECTIONS.values()}
    for words, name in _REJECTIONS.items():
        if words in message.lower() and values[f"cluster.{name}"]:
            return format_setting(f"cluster.{name}", values[f"cluster.{name}"])
    option = re.search(r"--([\w-]+)", message)
    options = {str(name): value for name, value in (shape.cluster.sbatch or {}).items()}
    if option and option[1] in options:
        return format_setting(f"cluster.sbatch.{option[1]}", options[option[1]])
    return format_setting("cluster.sbatch", format_value(options)) if options else "cluster"


def _check_controller() -> None:
    try:
        slurm.run_command("scontrol", "ping")
    except RunError as error:
        reason = str(error).rpartition("fatal: ")[2]
        raise ConfigError(
            f"hydra/launcher=slurm: no Slurm controller answers here ({reason}); run this on a login node of a "
            "cluster, or give hydra.launcher.dry_run=true."
        ) from error


ROOT = Path(__file__).resolve().parents[2]  # the folder that titan is imported from: a checkout, or site-packages
PARTS = ("titan", "launchers", "conf", "experiments")


def copy_code(folder: Path, packages: Iterable[str] = ()) -> Path:
    """Copy titan's code to a folder in `folder`, named by a digest of its content, unless it is there already.

    So jobs in the queue run what was submitted.

    Args:
        packages: the user's own packages, which are copied too unless they are installed.

    Returns:
        The folder to import from.
    """
    code = identity.describe_code()
    # of site-packages only titan's own
    parts = [part for part in PARTS if (ROOT / part).is_dir() and (part != "experiments" or (ROOT / "conf").is_dir())]
    files = {str(file.relative_to(ROOT)): file for part in parts for file in identity.walk_files(ROOT / part)}
    for package in packages:
        if package not in PARTS and not identity.is_installed(package):
            files |= identity.find_files(package)
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    copy = folder / "code" / digest.hexdigest()[:12]
    if copy.is_dir():
        return copy
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    for name, file in files.items():
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (temporary / identity.FROZEN).write_text(json.dumps({"code": code, "diff": identity.read_git_diff()}))
    try:
        temporary.rename(copy)
    except OSError:  # another launcher was faster
        shutil.rmtree(temporary)
    return copy
