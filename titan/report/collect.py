"""Find runs and read their files, each once. Free of torch.

A directory with run.yaml is a run, one with ledger.jsonl a sweep that names its runs; any other is searched for
runs and sweeps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from titan.config.settings import format_value
from titan.console.numbers import shortest
from titan.console.text import safe
from titan.errors import ConfigError
from titan.files.untrusted import parse_object, read_regular_file
from titan.report import columns
from titan.report.columns import Metrics, Steps
from titan.report.findings import Failed, State
from titan.run import axes
from titan.run.directory import ended_by, is_locked, read_attempts, read_result
from titan.sweep import job_exit, ledger
from titan.sweep.ledger import SweepSpec, TrialState

ESSENTIAL = (
    "ids.science", "ids.group", "ids.execution", "ids.code", "config.training.steps", "config.training.seq_len",
    "config.training.global_batch", "config.model", "config.dataset", "config.optimizer", "config.metrics",
)  # fmt: skip
"""Keys of a document in run.yaml that a comparison needs."""


@dataclass(frozen=True)
class Raw:
    """A run as its files describe it.

    Attributes:
        directory: where it is.
        documents: of run.yaml, one an attempt.
        metrics: of metrics.jsonl.
        result: of result.json; empty where there is none.
        device: the device in env.json.
        state, reason: its state; why it did not finish.
        overrides: those of a trial that differ from the sweep's; of other runs, the whole command line.
        host: the name of the machine of its first rank; empty where env.json has none.
        corruption: what is wrong with its files and was ignored, one sentence each.
    """

    directory: Path
    documents: tuple[Mapping[str, Any], ...]
    metrics: Metrics
    result: Mapping[str, Any]
    device: Mapping[str, Any]
    state: State
    reason: str | None
    overrides: tuple[str, ...] = ()
    host: str = ""
    corruption: tuple[str, ...] = ()

    @property
    def last(self) -> Mapping[str, Any]:
        """Return the document of the last attempt."""
        return self.documents[-1]

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the resolved configuration of the last attempt."""
        return dict(self.last["config"])

    @cached_property
    def seed(self) -> int:
        """Return the seed."""
        return int(self.config["training"].get("seed", 0))

    @cached_property
    def repeat(self) -> int:
        """Return which repeat of the seed it is."""
        return int(self.config["training"].get("repeat", 0))

    @property
    def continued(self) -> tuple[int, ...]:
        """Return the planned steps of earlier attempts where they differ from the last one's, in order.

        The learning rate followed their schedules first, so such a run differs from one with the same number of steps.
        """
        steps = dict.fromkeys(int(d["config"]["training"]["steps"]) for d in self.documents)
        return tuple(number for number in steps if number != self.wanted)

    @property
    def wanted(self) -> int:
        """Return the planned number of steps."""
        return int(self.config["training"]["steps"])

    @property
    def devices(self) -> int:
        """Return the number of devices of the last attempt."""
        return devices(self.last)

    @cached_property
    def hardware(self) -> str:
        """Return the name of the devices; empty where unknown."""
        return str(self.device.get("name") or "")


@dataclass(frozen=True)
class Collected:
    """The runs and sweeps in the directories.

    Attributes:
        runs: each once, in the order in which they were found.
        failed: trials without a run, and runs whose run.yaml can't be read.
        sweeps: directory and question of each sweep.
        corruption: what is wrong with the sweeps' own files.
    """

    runs: tuple[Raw, ...]
    failed: tuple[Failed, ...]
    sweeps: tuple[tuple[Path, SweepSpec], ...]
    corruption: tuple[str, ...] = ()


@dataclass
class _Found:
    runs: dict[Path, Raw] = field(default_factory=dict)
    failed: dict[Path, Failed] = field(default_factory=dict)
    sweeps: dict[Path, SweepSpec] = field(default_factory=dict)
    corruption: list[str] = field(default_factory=list)

    def known(self, directory: Path) -> bool:
        return directory in self.runs or directory in self.failed


def devices(document: Mapping[str, Any]) -> int:
    """Return the number of devices of the attempt that a document in run.yaml describes."""
    return prod(int(degree) for degree in (document.get("layout") or {}).values())


def collect(directories: Sequence[Path]) -> Collected:
    """Read all runs in directories and their subdirectories.

    Raises:
        ConfigError: for a directory that does not exist or contains no run.
    """
    found = _Found()
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: there is no such directory; give the directory of a run or a sweep.")
        before = len(found.runs) + len(found.failed)
        at = directory.resolve()
        _enter(at, found, given=True)
        if len(found.runs) + len(found.failed) == before and not found.known(at):
            raise ConfigError(
                f"{directory}: contains no run (a run has a run.yaml); give the directory of a run or a sweep."
            )
    return Collected(
        tuple(found.runs.values()), tuple(found.failed.values()), tuple(found.sweeps.items()), tuple(found.corruption)
    )


def _enter(directory: Path, found: _Found, given: bool = False) -> None:
    """Add a run or a sweep, else search the subdirectories."""
    if (directory / "run.yaml").is_file():
        if given or _began(directory):
            _take(directory, found, None)
        return
    sweep = ledger.read(directory)
    if sweep is not None:
        found.sweeps[directory] = sweep.spec
        found.corruption += [f"{directory.name}: {note}" for note in sweep.notes]
        for point in sweep.trials:
            _take(Path(point.directory), found, point)
        return
    for child in _children(directory):
        _enter(child, found)


def _began(directory: Path) -> bool:
    """Return whether it is a run's directory: a remote directory of its checkpoints has a run.yaml too."""
    return any((directory / name).exists() for name in ("metrics.jsonl", ".lock", "log"))


def _children(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.is_symlink() and not e.name.startswith("."))
    except OSError:
        return
    yield from (directory / name for name in names)


def _take(directory: Path, found: _Found, point: TrialState | None) -> None:
    if found.known(directory):
        return
    run = _read(directory, point)
    if isinstance(run, Raw):
        found.runs[directory] = run
    else:
        found.failed[directory] = run


def _read(directory: Path, point: TrialState | None) -> Raw | Failed:
    """Return a run, or why there is none."""
    label = safe(" ".join(map(_typed, point.overrides)) if point else directory.name)
    try:
        documents = tuple(read_attempts(directory)) if (directory / "run.yaml").is_file() else ()
    except ConfigError as refusal:
        return Failed(label, str(directory), "failed", str(refusal), _overrides(point))
    if not documents:
        state: State = point.state if point else "failed"
        why = _reason(point) or _nothing(state, point)
        return Failed(label, str(directory), state, why, _overrides(point))
    if lacking := _lacking(documents):
        return Failed(
            label, str(directory), "failed", f"its run.yaml has no {lacking}: another version of titan wrote it"
        )
    metrics = columns.read(directory / "metrics.jsonl")
    result, wrong = read_result(directory, {d["ids"]["science"] for d in documents})
    corruption = [wrong] if wrong else []
    if metrics.broken:
        lines = "1 line" if metrics.broken == 1 else f"{metrics.broken} lines"
        corruption.append(f"{lines} of metrics.jsonl ignored: corrupt or truncated")
    state, reason = _state(directory, documents[-1], result, point, metrics.steps)
    typed = point.overrides if point else documents[-1].get("overrides") or ()
    overrides = tuple(axes.present(typed, warn=False))
    machine = _json(directory / "env.json")
    device, host = machine.get("device"), machine.get("host")
    about = device if isinstance(device, dict) else {}
    damaged, named = tuple(corruption), host if isinstance(host, str) else ""
    return Raw(directory, documents, metrics, result, about, state, reason, overrides, named, damaged)


def _overrides(point: TrialState | None) -> tuple[str, ...]:
    return point.overrides if point else ()


def neat(value: Any) -> str:
    """Return a setting's value as one would type it; a float in its shortest form, as in 1e9."""
    return (shortest(value) if isinstance(value, float) else "") or format_value(value)


def _typed(override: str) -> str:
    """Return an override with a float in its shortest form."""
    name, equals, value = override.partition("=")
    return (
        f"{name}={neat(float(value))}" if re.fullmatch(r"-?\d+(\.\d*e.*|\.\d*|e.*)", value) else name + equals + value
    )


def _lacking(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the first key of `ESSENTIAL` that a document lacks; else empty."""
    for document in documents:
        for name in ESSENTIAL:
            value: Any = document
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is None:
                return name
    return ""


def _reason(point: TrialState | None) -> str | None:
    """Return the reason of a trial's end in the ledger."""
    return job_exit.strip_timestamp(point.reason) if point and point.reason else None


def _nothing(state: State, point: TrialState | None) -> str:
    if state == "queued":
        return f"queued as job {point.job}" if point and point.job else "queued"
    return {"planned": "not started", "running": "its first attempt has not started"}.get(state, "it wrote no run.yaml")


def _state(
    directory: Path, last: Mapping[str, Any], result: Mapping[str, Any], point: TrialState | None, steps: Steps
) -> tuple[State, str | None]:
    """Return a run's state and reason: by its files first, then by the ledger."""
    wanted = int(last["config"]["training"]["steps"])
    if result.get("finished") and int(result.get("step") or 0) >= wanted:
        return "finished", None
    if is_locked(directory):
        return "running", None
    own = _ended(directory, last, result, steps)
    if point and point.state in ("failed", "stopped", "queued", "running"):
        return point.state, _reason(point) or (None if point.state == "running" else own[1])
    return own


def _ended(directory: Path, last: Mapping[str, Any], result: Mapping[str, Any], steps: Steps) -> tuple[State, str]:
    """Return how the last attempt of an unfinished run ended."""
    if result.get("attempt") == last["attempt"] and result.get("finished") is False:
        if hook := ended_by(result):
            return "stopped", f"ended at step {result.get('step')} by {hook}"
        return "stopped", f"stopped by a signal at step {result.get('step')}; the same command resumes it"
    if message := _launcher_message(directory / "log" / "launcher.log", str(last.get("began") or "")):
        return "failed", message
    if len(steps) and steps.odd()[-1]:
        return "stopped", f"it ended after step {steps.step[-1]}, whose loss or gradient norm is not finite"
    return "stopped", "it ended without an error message; the same command resumes it"


def _launcher_message(log: Path, began: str) -> str | None:
    """Return the launcher's last message since the attempt began; the first and last line of a traceback."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    starts = [i for i, line in enumerate(lines) if (_seconds(line.partition(" ")[0]) or 0) >= (_seconds(began) or 0)]
    starts = [i for i in starts if _seconds(lines[i].partition(" ")[0]) is not None]
    if not starts:
        return None
    first, *more = [line for line in lines[starts[-1] :] if line.strip()]
    return " ".join([first.partition(" ")[2], *more[-1:]])


def _seconds(text: str) -> float | None:
    """Return a date in ISO format in seconds since 1970; None where it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def began(document: Mapping[str, Any]) -> float | None:
    """Return when an attempt began, in seconds since 1970; None where its document has no date."""
    return _seconds(str(document.get("began") or ""))


def _json(file: Path) -> dict[str, Any]:
    try:
        return parse_object(read_regular_file(file))
    except (OSError, ValueError):
        return {}
