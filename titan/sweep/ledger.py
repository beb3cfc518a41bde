"""A sweep's directory: its specification (`sweep.yaml`), and the ledger of its trials (`ledger.jsonl`). Free of torch.

The ledger is append-only, one line per event, under a lock, so that the next launcher can continue after one that was
killed. A trial is known by its id, which follows from its settings, never by a job's number: the same command finds the
trials that it has started, and a larger sweep keeps those that it has. The state of a trial is never recorded: it
follows from its run's directory, from its job's exit records, and from Slurm.

Events: `point` (a trial's id, directory, overrides and settings), `sending` (before trials are submitted to Slurm, with
a token that their jobs carry), `sent` (with the jobs' numbers), `unsent` (Slurm rejected them), `started` and `ended`
(a trial on this machine).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from titan.errors import ConfigError
from titan.files import locks, untrusted
from titan.files.atomic import write_atomic
from titan.run.directory import describe_hook_end, is_finished, is_locked, read_result
from titan.sweep import job_exit
from titan.sweep.schema import parse_margin

State = Literal["planned", "queued", "running", "finished", "stopped", "failed"]

LEDGER, SWEEP, SLURM = "ledger.jsonl", "sweep.yaml", "slurm"  # names in a sweep's directory
ENDED_STATES: tuple[State, ...] = ("finished", "stopped", "failed")
UNCONFIRMED = "its submission is not confirmed yet"


@dataclass(frozen=True)
class SweepSpec:
    """The specification of a sweep: the content of `sweep.yaml`."""

    question: str | None = None  # that it answers; None for a sweep without a name
    # the settings that vary, with their values as typed
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of these settings, the values of the variant that the others are compared with; may be empty
    baseline: Mapping[str, str] = field(default_factory=dict)
    # difference in validation loss that counts as none, in nats, or a share of compute such as "2%"
    margin: float | str = 0.02
    target: float | None = None  # the validation loss to reach; None: there is none
    budget: str = "steps"  # what the variants had as much of as the baseline; see `titan.sweep.schema.Sweep`


@dataclass(frozen=True)
class TrialState:
    """A trial of a sweep and its state."""

    id: str  # follows from its settings
    directory: str  # its run's directory, absolute
    overrides: tuple[str, ...]  # those of this trial alone, such as ("parallelism=fsdp", "training.seed=1")
    state: State  # see `State`
    job: str | None = None  # the number of its last Slurm job, such as "123_4"; None where it has none
    reason: str | None = None  # why it failed or was stopped
    submissions: int = 0  # how often it was submitted or started
    token: str | None = None  # of a submission whose job numbers the ledger does not have; None where it has them
    sent_at: float = 0.0  # the time of that submission, in seconds since 1970
    jobs: tuple[str, ...] = ()  # all job numbers of its last submission: several where jobs are chained
    steps: int = 0  # of its run
    devices: int = 1  # of its run
    lane: int | None = None  # of its last submission, see `launchers.slurm.state`; None for an array
    asked: str = ""  # see `titan.run.identity.compute_portable_trial_id`
    # see `titan.sweep.trial_settings.collect_settings`; None where an older commit of titan wrote it
    settings: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SweepState:
    """The state of a sweep, and notes on what is wrong with its files."""

    directory: Path
    spec: SweepSpec
    trials: tuple[TrialState, ...]
    notes: tuple[str, ...] = ()


def read(directory: Path) -> SweepState | None:
    """Return the sweep in `directory`, by its ledger and its runs' directories, without Slurm; None if there is none.

    A trial that was submitted to Slurm and has no exit record counts as queued, or running where its run is locked.

    Raises:
        ConfigError: when another commit of titan wrote the ledger.
    """
    if not (directory / LEDGER).is_file():
        return None
    trials = tuple(_update_state(directory, trial) for trial in read_trials(directory))
    return SweepState(directory, read_spec(directory), trials, tuple(_find_problems(directory)))


def read_trials(directory: Path) -> list[TrialState]:
    """Return the trials by the ledger alone."""
    trials: dict[str, TrialState] = {}
    for event in read_events(directory):
        _apply_event(trials, event, directory)
    return list(trials.values())


def read_spec(directory: Path) -> SweepSpec:
    """Return the content of `sweep.yaml`; empty where there is none."""
    try:
        return _parse_spec(directory)
    except (OSError, ValueError, ConfigError):  # `read` notes it
        return SweepSpec()


def _parse_spec(directory: Path) -> SweepSpec:
    """Return the content of `sweep.yaml`.

    Raises:
        ValueError: when `sweep.yaml` is damaged.
        ConfigError: when its margin is none.
        OSError: when it can't be read.
    """
    content = next(iter(untrusted.parse_yaml(untrusted.read_regular_file(directory / SWEEP).decode())), None) or {}
    untrusted.check_type(content, dict[str, Any], "it")
    for name, kind in _SPEC_TYPES.items():
        untrusted.check_type(content.get(name), kind, name)
    known = {name: content[name] for name in _SPEC_TYPES if content.get(name) is not None}
    known["axes"] = {name: tuple(map(str, values)) for name, values in known.get("axes", {}).items()}
    known["baseline"] = {name: str(value) for name, value in known.get("baseline", {}).items()}
    spec = SweepSpec(**known)
    parse_margin(spec.margin)
    return spec


_SPEC_TYPES: dict[str, Any] = {
    "question": str | None,
    "axes": dict[str, list[Any]] | None,
    "baseline": dict[str, Any] | None,
    "margin": float | str | None,
    "target": float | None,
    "budget": str | None,
}
"""The values of `sweep.yaml` by their types."""


def write_spec(directory: Path, spec: SweepSpec) -> None:
    """Write `sweep.yaml`."""
    axes = {name: list(values) for name, values in spec.axes.items()}
    plain = {**vars(spec), "axes": axes, "baseline": dict(spec.baseline)}
    write_atomic(directory / SWEEP, yaml.safe_dump(plain, sort_keys=False))


def list_submitted_trials(directory: Path, token: str) -> list[str]:
    """Return the ids of the trials of a submission, in the order of the job array."""
    events = (event for event in read_events(directory) if event.get("event") == "sending" and event["token"] == token)
    return list(next(events, {"points": ()})["points"])


def add_events(directory: Path, *lines: Mapping[str, Any]) -> None:
    """Append events to the ledger, in one write."""
    with (directory / LEDGER).open("a+b", buffering=0) as file:
        locks.acquire(file.fileno(), f"hydra.sweep.dir={directory}")
        locks.append_lines(file.fileno(), *({"time": round(time.time(), 3), **line} for line in lines))


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the ledger's events in order, without lines that are corrupt or incomplete after a kill.

    Raises:
        ConfigError: when another commit of titan wrote the ledger.
    """
    return (event for event in _read_lines(directory) if event is not None)


def _read_lines(directory: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the ledger's events in order; None for a line that is corrupt or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        for line in untrusted.read_regular_file(directory / LEDGER).decode(errors="replace").splitlines():
            try:
                yield _parse_event(directory, line)
            except (ValueError, KeyError):
                yield None


def _parse_event(directory: Path, line: str) -> dict[str, Any]:
    """Return the event in a line of the ledger.

    Raises:
        ValueError: when the line is no event, or names a folder elsewhere.
        KeyError: when the event lacks a value.
        ConfigError: when the line names a trial as another commit of titan does: a line that was cut is no object.
    """
    event = untrusted.parse_object(line)
    if event.get("event") == "point" and (missing := sorted(_EVENT_TYPES["point"].keys() - event.keys())):
        raise ConfigError(
            f"hydra.sweep.dir={directory}: another commit of titan wrote {LEDGER} (a line has no {missing[0]!r}); read "
            "it with the commit that wrote it, or choose another name to start again."
        )
    for name, kind in _EVENT_TYPES.get(str(event.get("event")), {}).items():
        untrusted.check_type(event[name] if kind != str | None else event.get(name), kind, name)
    if event.get("event") == "point":
        untrusted.check_type(event.get("settings"), dict[str, Any] | None, "settings")
        untrusted.resolve_inside(directory, event["directory"])
    jobs = (job for job_ids in event["jobs"].values() for job in job_ids) if event.get("event") == "sent" else ()
    if not all(re.fullmatch(r"\d{1,18}(_\d{1,18})?", job) for job in jobs):
        raise ValueError("it names no jobs")
    return event


_EVENT_TYPES: dict[str, dict[str, Any]] = {
    "point": {"id": str, "directory": str, "overrides": list[str], "steps": int, "devices": int, "asked": str},
    "sending": {"token": str, "points": list[str], "time": float},
    "sent": {"jobs": dict[str, list[str]]},
    "unsent": {"points": list[str], "reason": str | None},
    "started": {"id": str},
    "ended": {"id": str, "code": int, "reason": str | None},
}
"""The values of each event by their types."""


def _find_problems(directory: Path) -> Iterator[str]:
    """Yield one sentence for each thing that is wrong with a sweep's own files."""
    if broken := sum(event is None for event in _read_lines(directory)):
        yield f"{LEDGER}: {broken} line{'s are' if broken > 1 else ' is'} damaged or cut short, and not used"
    try:
        _parse_spec(directory)
    except FileNotFoundError:
        return
    except (OSError, ValueError, ConfigError) as error:
        yield f"{SWEEP} can't be read, and is not used: {getattr(error, 'strerror', None) or error}"


def lock_sweep(directory: Path) -> contextlib.AbstractContextManager[int]:
    """Lock a sweep while the block runs: one launcher at a time submits its trials, another one waits."""
    return locks.hold_file(directory / f".{LEDGER}.lock", f"hydra.sweep.dir={directory}", "choose another name")


def _apply_event(trials: dict[str, TrialState], event: Mapping[str, Any], directory: Path) -> None:
    """Apply one event to the trials."""
    kind = event.get("event")
    if kind == "point":
        run_directory = os.path.abspath(directory / event["directory"])
        trial = trials.get(event["id"], TrialState(event["id"], run_directory, tuple(event["overrides"]), "planned"))
        trials[trial.id] = replace(
            trial, steps=int(event["steps"]), devices=int(event["devices"]), asked=event["asked"],
            settings=event.get("settings"),
        )  # fmt: skip
        return
    names = event.get("jobs") or event.get("points") or [str(event.get("id"))]
    for previous in [trials[name] for name in names if name in trials]:
        change: dict[str, Any] = {}
        if kind == "sending":
            change = {"token": event["token"], "sent_at": float(event["time"]), "state": "queued"}
            change |= {"job": None, "jobs": (), "reason": UNCONFIRMED, "submissions": previous.submissions + 1}
        elif kind == "sent" and (jobs := tuple(event["jobs"][previous.id])):
            change = {"token": None, "job": jobs[0], "jobs": jobs, "lane": event.get("lane")}
            change |= {"state": "queued", "reason": None}
        elif kind == "unsent":
            change = {"token": None, "state": "failed", "reason": event["reason"]}
        elif kind == "started":
            change = {"state": "running", "job": None, "jobs": (), "submissions": previous.submissions + 1}
        elif kind == "ended":
            state = {0: "finished", 130: "stopped"}.get(event["code"], "failed")
            change = {"state": state, "reason": event.get("reason")}
        trials[previous.id] = replace(previous, **change)


def _update_state(directory: Path, trial: TrialState) -> TrialState:
    """Return the trial with its state by its run's directory and its job's exit record."""
    run = Path(trial.directory)
    if is_finished(run, trial.steps):
        return replace(trial, state="finished", reason=None)
    if trial.state == "finished" and (hook := describe_hook_end(read_result(run)[0])):
        return replace(trial, state="stopped", reason=f"ended by {hook}")
    if trial.job is not None:
        return _update_job_state(directory, trial)
    if trial.state == "running" and not is_locked(run):
        return replace(trial, state="stopped", reason="its launcher was killed")
    if trial.state == "finished":
        return replace(trial, state="stopped", reason="its result is gone")
    return trial


def _update_job_state(directory: Path, trial: TrialState) -> TrialState:
    """Return a trial that is not finished with its state by its job: it runs, has ended, or is to be started again."""
    job = find_last_job(directory, trial)
    end = job_exit.read_last_exit(directory / SLURM, job)
    if end is not None and not end.requeue:
        return replace(trial, job=job, state="stopped" if end.stopped else "failed", reason=end.reason)
    if is_locked(Path(trial.directory)):
        return replace(trial, job=job, state="running", reason=None)
    return replace(trial, job=job, state="queued", reason=end.reason if end else None)


def find_last_job(directory: Path, trial: TrialState) -> str:
    """Return the last job of a trial's chain that has an exit record, or else the first job."""
    ended_jobs = [job for job in trial.jobs if job_exit.read_last_exit(directory / SLURM, job) is not None]
    return ended_jobs[-1] if ended_jobs else str(trial.job)
