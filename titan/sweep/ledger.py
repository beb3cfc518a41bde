"""A sweep's directory: what it asks (`sweep.yaml`), and the ledger of its points (`ledger.jsonl`). Free of torch.

The ledger is only ever added to, a line an event, under a lock, so that a launcher that was killed leaves a ledger that
the next one goes on with. A point is known by its id, which follows from its settings, never by a job's number: the
same command finds what it has begun, and a grid that grew keeps what it has. How a point stands is never written down:
it follows from what its run's directory holds, from what its job left when it ended, and from Slurm.

Events: `point` (an id, its directory, its overrides), `sending` (before points are handed to Slurm, with a token that
their jobs carry), `sent` (with the jobs' numbers), `started` and `ended` (a point on this machine).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from titan.files import locks, untrusted
from titan.run.result import is_finished, is_locked
from titan.sweep import job_exit

State = Literal["planned", "queued", "running", "finished", "stopped", "failed"]

LEDGER, SWEEP, SLURM = "ledger.jsonl", "sweep.yaml", "slurm"
"""Names in a sweep's directory."""
ENDED: tuple[State, ...] = ("finished", "stopped", "failed")
UNCONFIRMED = "its submission is not confirmed yet"


@dataclass(frozen=True)
class SweepSpec:
    """What a sweep is for: the content of `sweep.yaml`.

    Attributes:
        question: in words; None for a grid without a name.
        axes: the settings that vary, with their values as typed.
        baseline: of these settings, the values of the arm that the others are held against; may be empty.
        margin: difference in validation loss, nats, that counts as none.
        target: the validation loss to come to; None: there is none.
    """

    question: str | None = None
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Mapping[str, str] = field(default_factory=dict)
    margin: float = 0.02
    target: float | None = None


@dataclass(frozen=True)
class TrialState:
    """A point of the grid and how it stands.

    Attributes:
        id: follows from its settings.
        directory: its run's directory, absolute.
        overrides: what the command line says of this point alone, such as ("parallelism=fsdp", "training.seed=1").
        state: how it stands.
        job: what Slurm calls its last job, such as "123_4"; None where it has none.
        reason: of a failed or stopped one: why.
        submissions: how often it was submitted or started.
        token, sent_at: of the submission whose job numbers the ledger does not know, and when it was.
        jobs: all numbers of its last submission: several where jobs are chained.
        steps, devices: that its run is to do, on so many ranks.
        lane: of its last submission, see `launchers.slurm.lanes`; None where it is an array's.
        asked: see `titan.run.identity.asked`; empty in a ledger that an older titan wrote.
    """

    id: str
    directory: str
    overrides: tuple[str, ...]
    state: State
    job: str | None = None
    reason: str | None = None
    submissions: int = 0
    token: str | None = None
    sent_at: float = 0.0
    jobs: tuple[str, ...] = ()
    steps: int = 0
    devices: int = 1
    lane: int | None = None
    asked: str = ""


@dataclass(frozen=True)
class SweepState:
    """What a sweep's directory says, and what is wrong with that."""

    directory: Path
    asked: SweepSpec
    points: tuple[TrialState, ...]
    notes: tuple[str, ...] = ()


def read(directory: Path) -> SweepState | None:
    """The sweep in `directory`, as its ledger and its runs' directories tell, without asking Slurm; None: no sweep.

    What was handed to Slurm and has not told of its end counts as queued, or running where its run's lock is held.
    """
    if not (directory / LEDGER).is_file():
        return None
    points = tuple(_standing(directory, point) for point in noted(directory))
    return SweepState(directory, asked(directory), points, tuple(_wrong(directory)))


def noted(directory: Path) -> list[TrialState]:
    """The points as the ledger alone has them."""
    points: dict[str, TrialState] = {}
    for event in events(directory):
        _take(points, event, directory)
    return list(points.values())


def asked(directory: Path) -> SweepSpec:
    """The content of `sweep.yaml`; empty where there is none."""
    try:
        return _asked(directory)
    except (OSError, ValueError):  # `read` says so
        return SweepSpec()


def _asked(directory: Path) -> SweepSpec:
    """As `asked`.

    Raises:
        ValueError: when `sweep.yaml` is damaged.
        OSError: when it can't be read.
    """
    content = next(iter(untrusted.parse_yaml(untrusted.read(directory / SWEEP).decode())), None) or {}
    untrusted.check(content, dict[str, Any], "it")
    for name, kind in _ASKED.items():
        untrusted.check(content.get(name), kind, name)
    axes = {k: tuple(map(str, v)) for k, v in (content.get("axes") or {}).items()}
    baseline = {k: str(v) for k, v in (content.get("baseline") or {}).items()}
    margin = content.get("margin")
    return SweepSpec(content.get("question"), axes, baseline, 0.02 if margin is None else margin, content.get("target"))


_ASKED: dict[str, Any] = {
    "question": str | None,
    "axes": dict[str, list[Any]] | None,
    "baseline": dict[str, Any] | None,
    "margin": float | None,
    "target": float | None,
}
"""What `sweep.yaml` holds, by the types of its values."""


def write_asked(directory: Path, content: SweepSpec) -> None:
    """Write `sweep.yaml`."""
    plain = {
        "question": content.question,
        "axes": {k: list(v) for k, v in content.axes.items()},
        "baseline": dict(content.baseline),
        "margin": content.margin,
        "target": content.target,
    }
    temporary = directory / f".{SWEEP}"
    temporary.write_text(yaml.safe_dump(plain, sort_keys=False))
    temporary.rename(directory / SWEEP)


def listed(directory: Path, token: str) -> list[str]:
    """The ids of the points that a submission handed to Slurm, in the order of the job array."""
    return next(
        (
            list(event["points"])
            for event in events(directory)
            if event.get("event") == "sending" and event["token"] == token
        ),
        [],
    )


def add(directory: Path, *lines: Mapping[str, Any]) -> None:
    """Add events to the ledger, in one write."""
    text = "".join(json.dumps({"time": round(time.time(), 3), **line}) + "\n" for line in lines)
    with (directory / LEDGER).open("a+b", buffering=0) as file:
        locks.acquire(file.fileno(), f"hydra.sweep.dir={directory}")
        file.seek(0, 2)
        if file.tell():  # a line that a kill cut short ends here
            file.seek(-1, 2)
            text = text if file.read() == b"\n" else "\n" + text
        file.write(text.encode())


def events(directory: Path) -> Iterator[dict[str, Any]]:
    """The ledger's events in order; a line that a kill cut short, or that is damaged, is left out."""
    return (event for event in _lines(directory) if event is not None)


def _lines(directory: Path) -> Iterator[dict[str, Any] | None]:
    """The ledger's events in order; None for a line that is damaged or cut short."""
    with contextlib.suppress(OSError, ValueError):
        for line in untrusted.read(directory / LEDGER).decode(errors="replace").splitlines():
            try:
                yield _event(directory, line)
            except (ValueError, KeyError):
                yield None


def _event(directory: Path, line: str) -> dict[str, Any]:
    """An event.

    Raises:
        ValueError, KeyError: when the line is none, or names a folder elsewhere.
    """
    event = untrusted.parse_object(line)
    for name, kind in _EVENTS.get(str(event.get("event")), {}).items():
        untrusted.check(event[name] if kind != str | None else event.get(name), kind, name)
    if event.get("event") == "point":
        untrusted.inside(directory, event["directory"])
    jobs = (job for of in event["jobs"].values() for job in of) if event.get("event") == "sent" else ()
    if not all(re.fullmatch(r"\d{1,18}(_\d{1,18})?", job) for job in jobs):
        raise ValueError("it names no jobs")
    return event


_EVENTS: dict[str, dict[str, Any]] = {
    "point": {"id": str, "directory": str, "overrides": list[str], "steps": int, "devices": int},
    "sending": {"token": str, "points": list[str], "time": float},
    "sent": {"jobs": dict[str, list[str]]},
    "unsent": {"points": list[str], "reason": str | None},
    "started": {"id": str},
    "ended": {"id": str, "code": int, "reason": str | None},
}
"""What each event holds, by the types of its values."""


def _wrong(directory: Path) -> Iterator[str]:
    """What is wrong with a sweep's own files, in a sentence each."""
    if broken := sum(event is None for event in _lines(directory)):
        yield f"{LEDGER}: {broken} line{'s are' if broken > 1 else ' is'} damaged or cut short, and not used"
    try:
        _asked(directory)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield f"{SWEEP} can't be read, and is not used: {getattr(error, 'strerror', None) or error}"


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Let one launcher at a time hand points of a sweep on; another one waits."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = locks.open_lock(directory / f".{LEDGER}.lock")
    try:
        locks.acquire(lock, f"hydra.sweep.dir={directory}")
        yield
    finally:
        os.close(lock)


def _take(points: dict[str, TrialState], event: Mapping[str, Any], directory: Path) -> None:
    """Let one event change what is known of the points."""
    kind = event.get("event")
    if kind == "point":
        where = os.path.abspath(directory / event["directory"])
        point = points.get(event["id"], TrialState(event["id"], where, tuple(event["overrides"]), "planned"))
        told = {"steps": int(event["steps"]), "devices": int(event["devices"]), "asked": event.get("asked", "")}
        points[point.id] = replace(point, **told)
        return
    for name in _concerned(event):
        if name not in points:
            continue
        before = points[name]
        if kind == "sending":
            sent = {"token": event["token"], "sent_at": float(event["time"]), "submissions": before.submissions + 1}
            points[name] = replace(before, job=None, jobs=(), state="queued", reason=UNCONFIRMED, **sent)
        elif kind == "sent":
            jobs = tuple(event["jobs"][name])
            if not jobs:
                continue
            lane = event.get("lane")
            points[name] = replace(before, token=None, job=jobs[0], jobs=jobs, lane=lane, state="queued", reason=None)
        elif kind == "unsent":
            points[name] = replace(before, token=None, state="failed", reason=event["reason"])
        elif kind == "started":
            points[name] = replace(before, state="running", job=None, jobs=(), submissions=before.submissions + 1)
        elif kind == "ended":
            state = {0: "finished", 130: "stopped"}.get(event["code"], "failed")
            points[name] = replace(before, state=state, reason=event.get("reason"))  # type: ignore[arg-type]


def _concerned(event: Mapping[str, Any]) -> Iterable[str]:
    return list(event.get("jobs", ())) or list(event.get("points", ())) or [str(event.get("id"))]


def _standing(directory: Path, point: TrialState) -> TrialState:
    """The point as its run's directory and its job's last words have it."""
    run = Path(point.directory)
    if is_finished(run, point.steps):
        return replace(point, state="finished", reason=None)
    if point.job is not None:
        return _of_job(directory, point)
    if point.state == "running" and not is_locked(run):
        return replace(point, state="stopped", reason="its launcher was killed")
    if point.state == "finished":
        return replace(point, state="stopped", reason="its result is gone")
    return point


def _of_job(directory: Path, point: TrialState) -> TrialState:
    """What a job that is not finished has said of itself: it runs, has ended, or is to be begun again."""
    job = last_job(directory, point)
    point = replace(point, job=job)
    end = job_exit.last_exit(directory / SLURM, job)
    if end is None or end.again:
        running = is_locked(Path(point.directory))
        return replace(
            point, state="running" if running else "queued", reason=None if running or not end else end.reason
        )
    return replace(point, state="stopped" if end.stopped else "failed", reason=end.reason)


def last_job(directory: Path, point: TrialState) -> str:
    """The job of a point's chain that has spoken last, or else the first."""
    spoken = [job for job in point.jobs if job_exit.last_exit(directory / SLURM, job) is not None]
    return spoken[-1] if spoken else str(point.job)
