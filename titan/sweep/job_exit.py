"""How a run's jobs ended: what they leave in a sweep's `slurm/` folder and in the run's directory. Free of torch.

Each attempt of a job leaves `JOB.ATTEMPT.out` (the batch script's words), `JOB.ATTEMPT/NODE/RANK.out` (a task's words
before it has come to its own log; NODE is a number), `JOB.ATTEMPT/NODE/RANK.error` (a rank's own error) and, last,
`JOB.ATTEMPT.end`, written by the batch script. Older jobs have left `JOB.ATTEMPT.RANK.out` and
`JOB.ATTEMPT.RANK.error`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.errors import EXIT_REQUEUE
from titan.files import untrusted

DIED = "Out Of Memory|Killed|Segmentation fault|Aborted|Bus error"
"""What srun says of a task that a signal ended; an extended regular expression."""
LOST = re.compile(r"onnection (closed|reset)|Read error|Broken pipe|remote (worker|process|server)|by peer")
"""What a rank's error says when another one has gone: in gloo's, NCCL's and the store's words."""
TERMINATING = "Terminating StepId"
"""What srun says before it ends the other tasks, since one has failed; those that do not end in time it kills."""


@dataclass(frozen=True)
class JobExit:
    """How one attempt of a job ended.

    Attributes:
        attempt: 0 for the first.
        code: the ranks' highest exit code.
        again: whether it is to be started again.
        stopped: whether it was stopped from outside, and not by an error of its own.
        reason: why it ended, in a sentence.
    """

    attempt: int
    code: int
    again: bool
    stopped: bool
    reason: str


def last_exit(folder: Path, job: str) -> JobExit | None:
    """How the last attempt of a job ended that has; None: none has."""
    ends = {int(file.name.split(".")[-2]): file for file in folder.glob(f"{job}.*.end")}
    return _exit(folder, job, max(ends), ends[max(ends)]) if ends else None


def latest_attempt(folder: Path, job: str) -> str:
    """The newest attempt of a job of which there is a word, as `JOB.ATTEMPT`."""
    attempts = (file.name.removeprefix(f"{job}.").partition(".")[0] for file in folder.glob(f"{job}.*"))
    return f"{job}.{max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=0)}"


def _exit(folder: Path, job: str, attempt: int, file: Path) -> JobExit | None:
    try:
        content = untrusted.parse_object(untrusted.read(file))
        for name, kind in (("code", int), ("again", bool | int), ("state", str)):
            untrusted.check(content[name], kind, name)
        untrusted.check(content.get("why", ""), str, "why")
        code, again, state = int(content["code"]), bool(content["again"]), str(content["state"])
    except (OSError, ValueError, KeyError):
        return None
    stopped = code in (EXIT_REQUEUE, 130) or state not in ("", "RUNNING")
    reason = _reason(folder, f"{job}.{attempt}", code, state, content.get("why", ""))
    return JobExit(attempt, code, again, stopped, "; ".join(filter(None, (reason, content.get("note")))))


def _reason(folder: Path, attempt: str, code: int, state: str, why: str) -> str:
    if why:
        return why
    if state not in ("", "RUNNING"):
        return "cancelled"
    return error(folder, attempt) or {EXIT_REQUEUE: "told to save and end", 130: "stopped"}.get(
        code, f"ended with exit code {code}"
    )


def error(folder: Path, attempt: str) -> str | None:
    """The error that ended an attempt of a job: a rank that was killed, else the first rank's own, with its rank.

    A rank that srun killed after another one had failed is the cause only where that one had merely lost it.
    """
    before, after = _killed(folder / f"{attempt}.out")
    errors = [content for file in _of_ranks(folder, attempt, "error") if (content := _content(file))]
    first = min(errors, key=lambda e: (bool(e.get("lost")), not e.get("killed"), float(e["time"])), default=None)
    if killed := before or (after if first is None or first.get("lost") else None):
        return killed
    if first is None:
        return _last_line(folder, attempt)
    return f"rank {first['rank']}: {str(first['text']).strip().splitlines()[-1]}"


def _of_ranks(folder: Path, attempt: str, kind: str) -> list[Path]:
    """The files of a kind that ranks have left in an attempt of a job, by rank."""
    found = [*folder.glob(f"{attempt}/*/*.{kind}"), *folder.glob(f"{attempt}.*.{kind}")]
    ranks = ((file.stem.rpartition(".")[2], file) for file in found)
    return [file for _, file in sorted((int(rank), file) for rank, file in ranks if rank.isdecimal())]


def _content(file: Path) -> dict[str, Any] | None:
    try:
        found = untrusted.parse_object(untrusted.read(file))
        for name, kind in (("time", float), ("rank", int), ("text", str)):
            untrusted.check(found[name], kind, name)
    except (OSError, ValueError, KeyError):
        return None
    return found if str(found["text"]).strip() else None


def _killed(output: Path) -> tuple[str | None, str | None]:
    """What srun says of a task that a signal ended: before srun itself ended the others, and after."""
    try:
        before, _, after = output.read_text(errors="replace").partition(TERMINATING)
    except OSError:
        return None, None
    return _signalled(before), _signalled(after)


def _signalled(text: str) -> str | None:
    found = re.search(rf"error: (\S+): tasks? (\d+)[^:]*: ({DIED})", text)
    if not found:
        return None
    node, rank, how = found.groups()
    memory = " (out of memory?)" if how == "Killed" else ""
    return f"rank {rank} on {node}: {how.lower()}{memory}"


def _last_line(folder: Path, attempt: str) -> str | None:
    """The last line that a task or the batch script left, where no rank came far enough to tell of an error."""
    job = attempt.rpartition(".")[0]
    for file in [*_of_ranks(folder, attempt, "out"), folder / f"{attempt}.out", folder / f"{job}.out"]:
        try:
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            continue
        if lines:
            return strip_timestamp(lines[-1].strip())
    return None


def strip_timestamp(line: str) -> str:
    """A log's line without the date and time that it begins with."""
    return _TIME.sub("", line)


_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s+(?=\S)")
