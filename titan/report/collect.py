"""Find runs and read their files, each once. Free of torch.

A directory with run.yaml is a run, one with ledger.jsonl a sweep that names its runs; any other is searched for
runs and sweeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from titan.config.modules import list_trusted_packages
from titan.config.settings import build
from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.untrusted import parse_object, read_regular_file
from titan.metrics import columns
from titan.metrics.columns import MetricsFile, StepColumns
from titan.model.schema import Llama
from titan.report.findings import FailedRun
from titan.report.run_end import classify_end
from titan.run.directory import ENVIRONMENT, is_locked, read_attempts, read_result
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import State, SweepSpec, TrialState
from titan.sweep.trial_settings import label_trials

ESSENTIAL_KEYS = (
    "ids.science", "ids.group", "ids.execution", "ids.code", "config.training.steps", "config.training.seq_len",
    "config.training.global_batch", "config.model", "config.dataset", "config.optimizer", "config.metrics",
)  # fmt: skip
"""Keys of a document in run.yaml that a comparison needs."""
GAVE_UP = ("in a row without finite values", "in a row were not finite")
"""Words of the error that ends a run after `training.bad_steps`: today's, and those of older versions of titan."""


@dataclass(frozen=True)
class RawRun:
    """A run as its files describe it.

    Attributes:
        directory: where it is.
        documents: of run.yaml, one an attempt.
        metrics: of metrics.jsonl.
        result: of result.json; empty where there is none.
        device: the device in env.json.
        state: its state.
        reason: why it failed or stopped; None where it did not.
        overrides: those of a trial that differ from the sweep's; of other runs, the whole command line.
        host: the name of the machine of its first rank; empty where env.json has none.
        corruption: what is wrong with its files and was ignored, one sentence each.
    """

    directory: Path
    documents: tuple[Mapping[str, Any], ...]
    metrics: MetricsFile
    result: Mapping[str, Any]
    device: Mapping[str, Any]
    state: State
    reason: str | None
    overrides: tuple[str, ...] = ()
    host: str = ""
    corruption: tuple[str, ...] = ()

    @property
    def last_document(self) -> Mapping[str, Any]:
        """Return the document of the last attempt."""
        return self.documents[-1]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the resolved configuration of the last attempt."""
        return dict(self.last_document["config"])

    @cached_property
    def seed(self) -> int:
        """Return the seed."""
        return int(self.config["training"].get("seed", 0))

    @cached_property
    def repeat(self) -> int:
        """Return which repeat of the seed it is."""
        return int(self.config["training"].get("repeat", 0))

    @property
    def earlier_planned_steps(self) -> tuple[int, ...]:
        """Return the planned steps of earlier attempts where they differ from the last one's, in order.

        The learning rate followed their schedules first, so such a run differs from one with the same number of steps.
        """
        steps = dict.fromkeys(int(d["config"]["training"]["steps"]) for d in self.documents)
        return tuple(number for number in steps if number != self.planned_steps)

    @property
    def planned_steps(self) -> int:
        """Return the planned number of steps."""
        return int(self.config["training"]["steps"])

    @property
    def devices(self) -> int:
        """Return the number of devices of the last attempt."""
        return count_devices(self.last_document)

    @cached_property
    def hardware(self) -> str:
        """Return the name of the devices; empty where unknown."""
        return str(self.device.get("name") or "")

    @cached_property
    def model(self) -> Llama | None:
        """Return the schema of the model; None where its class can't be loaded."""
        name = self.last_document["science"].get("model")
        settings = dict(self.config["model"]) | ({"_target_": name} if name else {})
        try:  # not what a run's own file would import
            model: Llama = build(Llama, settings, "model", list_trusted_packages(()))
        except ConfigError:
            return None
        return model

    @property
    def gave_up(self) -> bool:
        """Return whether the run ended because too many steps in a row were not finite."""
        ended = self.state in ("failed", "stopped")
        return ended and any(words in (self.reason or "") for words in GAVE_UP)


@dataclass
class CollectedRuns:
    """The runs and sweeps in the directories, each once, in the order in which they were found.

    Attributes:
        by_directory: runs; and why there is none, for trials without a run and runs whose run.yaml can't be read.
        sweeps: directory and question of each sweep.
        corruption: what is wrong with the sweeps' own files.
    """

    by_directory: dict[Path, RawRun | FailedRun] = field(default_factory=dict)
    sweeps: dict[Path, SweepSpec] = field(default_factory=dict)
    corruption: list[str] = field(default_factory=list)

    @cached_property
    def runs(self) -> tuple[RawRun, ...]:
        """Return the runs."""
        return tuple(run for run in self.by_directory.values() if isinstance(run, RawRun))

    @cached_property
    def failed(self) -> tuple[FailedRun, ...]:
        """Return trials without a run, and runs whose run.yaml can't be read."""
        return tuple(run for run in self.by_directory.values() if isinstance(run, FailedRun))

    @property
    def sweep(self) -> SweepSpec:
        """Return the question of the only sweep; an empty one where there are several, or none."""
        return next(iter(self.sweeps.values())) if len(self.sweeps) == 1 else SweepSpec()

    def list_started_runs(self) -> list[RawRun]:
        """Return the runs with a result: those that finished a step or gave up before."""
        return [raw for raw in self.runs if len(raw.metrics.steps) or raw.gave_up]


def count_devices(document: Mapping[str, Any]) -> int:
    """Return the number of devices of the attempt that a document in run.yaml describes."""
    return prod(int(degree) for degree in (document.get("layout") or {}).values())


def collect_runs(directories: Sequence[Path]) -> CollectedRuns:
    """Read all runs in directories and their subdirectories.

    Raises:
        ConfigError: for a directory that does not exist or contains no run.
    """
    collected = CollectedRuns()
    for directory in directories:
        if not directory.is_dir():
            problem = "is a file, not a directory" if directory.is_file() else "there is no such directory"
            raise ConfigError(f"{directory}: {problem}; give the directory of a run or a sweep.")
        count_before, resolved = len(collected.by_directory), directory.resolve()
        _add_directory(resolved, collected, named_by_user=True)
        if len(collected.by_directory) == count_before and resolved not in collected.by_directory:
            raise ConfigError(
                f"{directory}: contains no run (a run has a run.yaml); give the directory of a run or a sweep."
            )
    return collected


def _add_directory(directory: Path, collected: CollectedRuns, named_by_user: bool = False) -> None:
    """Add a run or a sweep, else search the subdirectories."""
    if (directory / "run.yaml").is_file():
        # a remote directory of a run's checkpoints has a run.yaml too
        if named_by_user or any((directory / name).exists() for name in ("metrics.jsonl", ".lock", "log")):
            _add_run(directory, collected, None, sanitize_line(directory.name))
        return
    try:
        sweep = ledger.read(directory)
    except ConfigError as error:
        if named_by_user:
            raise
        collected.corruption.append(f"{directory.name}: {error}")
        return
    if sweep is not None:
        collected.sweeps[directory] = sweep.spec
        collected.corruption += [f"{directory.name}: {note}" for note in sweep.notes]
        for trial, label in zip(sweep.trials, label_trials(sweep.trials), strict=True):
            _add_run(Path(trial.directory), collected, trial, label)
        return
    try:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.is_symlink() and not e.name.startswith("."))
    except OSError:
        return
    for name in names:
        _add_directory(directory / name, collected)


def _add_run(directory: Path, collected: CollectedRuns, trial: TrialState | None, label: str) -> None:
    if directory not in collected.by_directory:
        collected.by_directory[directory] = _read_run(directory, trial, label)


def _read_run(directory: Path, trial: TrialState | None, label: str) -> RawRun | FailedRun:
    """Return a run, or why there is none."""
    typed = trial.overrides if trial else ()
    try:
        documents = tuple(read_attempts(directory)) if (directory / "run.yaml").is_file() else ()
    except ConfigError as error:
        return FailedRun(label, str(directory), "failed", str(error), typed)
    if not documents:
        state: State = trial.state if trial else "failed"
        reason = _find_ledger_reason(trial) or _explain_missing_run(state, trial)
        return FailedRun(label, str(directory), state, reason, typed)
    if missing_key := _find_missing_key(documents):
        reason = f"its run.yaml has no {missing_key}: another version of titan wrote it"
        return FailedRun(label, str(directory), "failed", reason)
    metrics = columns.read(directory / "metrics.jsonl")
    result, result_corruption = read_result(directory, {d["ids"]["science"] for d in documents})
    corruption = [result_corruption] if result_corruption else []
    if metrics.corrupt_lines:
        lines = format_plural(metrics.corrupt_lines, "line")
        corruption.append(f"{lines} of metrics.jsonl ignored: corrupt or truncated")
    try:
        environment = parse_object(read_regular_file(directory / ENVIRONMENT))
    except (OSError, ValueError):
        environment = {}
    device, host = environment.get("device"), environment.get("host")
    run_state, run_reason = _determine_state(directory, documents[-1], result, trial, metrics.steps)
    return RawRun(
        directory=directory,
        documents=documents,
        metrics=metrics,
        result=result,
        device=device if isinstance(device, dict) else {},
        state=run_state,
        reason=run_reason,
        overrides=tuple(trial.overrides if trial else documents[-1].get("overrides") or ()),
        host=host if isinstance(host, str) else "",
        corruption=tuple(corruption),
    )


def _find_missing_key(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the first key of `ESSENTIAL_KEYS` that a document lacks; else empty."""
    for document in documents:
        for name in ESSENTIAL_KEYS:
            value: Any = document
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is None:
                return name
    return ""


def _find_ledger_reason(trial: TrialState | None) -> str | None:
    """Return the reason of a trial's end in the ledger."""
    return job_exit.strip_timestamp(trial.reason) if trial and trial.reason else None


def _explain_missing_run(state: State, trial: TrialState | None) -> str:
    if state == "queued":
        return f"queued as job {trial.job}" if trial and trial.job else "queued"
    return {"planned": "not started", "running": "its first attempt has not started"}.get(state, "it wrote no run.yaml")


def _determine_state(
    directory: Path,
    document: Mapping[str, Any],
    result: Mapping[str, Any],
    trial: TrialState | None,
    steps: StepColumns,
) -> tuple[State, str | None]:
    """Return a run's state and reason: by its files first, then by the ledger."""
    planned_steps = int(document["config"]["training"]["steps"])
    if result.get("finished") and int(result.get("step") or 0) >= planned_steps:
        return "finished", None
    if is_locked(directory):
        return "running", None
    text = "it ended without an error message; the same command resumes it"
    if len(steps) and steps.is_nonfinite()[-1]:
        text = f"it ended after step {steps.step[-1]}, whose loss or gradient norm is not finite"
    end: tuple[State, str] = classify_end(directory, document, result) or ("stopped", text)
    if trial and trial.state in ("failed", "stopped", "queued", "running"):
        return trial.state, _find_ledger_reason(trial) or (None if trial.state == "running" else end[1])
    return end
