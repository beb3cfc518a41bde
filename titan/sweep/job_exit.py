"""The exit records of a run's jobs, in a sweep's `slurm/` folder. Free of torch.

Each attempt of a job writes `JOB.ATTEMPT.out` (the batch script's output), `JOB.ATTEMPT/NODE/RANK.out` (a task's output
before it opens its own log; NODE is a number), `JOB.ATTEMPT/NODE/RANK.error` (see `titan.cluster.rank_error`) and,
last, `JOB.ATTEMPT.end`, written by the batch script. Older jobs wrote `JOB.ATTEMPT.RANK.out` and
`JOB.ATTEMPT.RANK.error`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from titan.cluster import rank_error
from titan.errors import EXIT_REQUEUE
from titan.files import untrusted

DIED = "Out Of Memory|Killed|Segmentation fault|Aborted|Bus error"
"""srun's messages about a task that a signal ended; an extended regular expression."""
TERMINATING = "Terminating StepId"
"""srun's message before it ends the other tasks, since one has failed; it kills those that do not end in time."""


@dataclass(frozen=True)
class JobExit:
    """How one attempt of a job ended."""

    attempt: int  # 0 for the first
    code: int  # the ranks' highest exit code
    requeue: bool  # whether it is to be started again
    stopped: bool  # whether it was stopped from outside, not by its own error
    reason: str  # why it ended, in one sentence


def read_last_exit(folder: Path, job: str) -> JobExit | None:
    """Return how the last attempt of a job that has ended did so; None if none has."""
    end_files = {int(file.name.split(".")[-2]): file for file in folder.glob(f"{job}.*.end")}
    return _read_exit(folder, job, max(end_files), end_files[max(end_files)]) if end_files else None


def find_latest_attempt(folder: Path, job: str) -> str:
    """Return the newest attempt of a job that has written anything, as `JOB.ATTEMPT`."""
    attempts = (file.name.removeprefix(f"{job}.").partition(".")[0] for file in folder.glob(f"{job}.*"))
    return f"{job}.{max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=0)}"


def _read_exit(folder: Path, job: str, attempt: int, file: Path) -> JobExit | None:
    try:
        content = untrusted.read_object(file, {"code": int, "again": bool | int, "state": str})
        untrusted.check_type(content.get("why", ""), str, "why")
        code, requeue, state = int(content["code"]), bool(content["again"]), str(content["state"])
    except (OSError, ValueError, KeyError):
        return None
    stopped = code in (EXIT_REQUEUE, 130) or state not in ("", "RUNNING")
    reason = content.get("why", "")
    if not reason and state not in ("", "RUNNING"):
        reason = "cancelled"
    elif not reason:
        reason = find_error(folder, f"{job}.{attempt}") or {EXIT_REQUEUE: "asked to save and end", 130: "stopped"}.get(
            code, f"exited with code {code}"
        )
    return JobExit(attempt, code, requeue, stopped, "; ".join(filter(None, (reason, content.get("note")))))


def find_error(folder: Path, attempt: str) -> str | None:
    """Return the error that ended an attempt of a job: of a rank that was killed, else of the rank that failed first.

    A rank that srun killed after another one had failed is the cause only if that one had merely lost it.
    """
    early_kill, late_kill = _find_kills(folder / f"{attempt}.out")
    first = _find_first_error(folder, attempt)
    if kill := early_kill or (late_kill if first is None or first.lost else None):
        return kill
    if first is None:
        return _read_last_line(folder, attempt)
    return f"rank {first.rank}{f' on {first.node}' if first.node else ''}: {first.last_line}"


def find_failed_node(folder: Path, attempt: str) -> str | None:
    """Return the node that made an attempt of a job fail; None where it is not known, and for a ConfigError.

    Where ranks differ and no majority decides, they are several: "n1,n2".
    """
    first = _find_first_error(folder, attempt)
    if first is not None and not first.lost:
        return None if first.code == 2 else first.node or None
    early_kill, late_kill = _find_kills(folder / f"{attempt}.out")
    match = re.match(r"rank \d+ on ([^:]+):", early_kill or late_kill or "")
    return match[1] if match else first.node or None if first is not None else None


def find_bad_nodes(folder: Path, times: int) -> list[str]:
    """Return the nodes that made jobs fail so many times, by the exit records of all attempts."""
    end_files = sorted(folder.glob("*.*.end"))
    jobs = [(file, *file.name.removesuffix(".end").rpartition(".")[::2]) for file in end_files]
    exits = ((f"{job}.{n}", _read_exit(folder, job, int(n), file)) for file, job, n in jobs if n.isdecimal())
    failed_nodes = (find_failed_node(folder, attempt) for attempt, end in exits if end and end.code and not end.stopped)
    counts = Counter(node for nodes in failed_nodes if nodes for node in nodes.split(","))
    return sorted(node for node, count in counts.items() if count >= times)


def _find_first_error(folder: Path, attempt: str) -> rank_error.RankError | None:
    return rank_error.find_first_cause(map(rank_error.read, _list_rank_files(folder, attempt, "error")))


def _list_rank_files(folder: Path, attempt: str, kind: str) -> list[Path]:
    """Return the files of a kind that the ranks of an attempt of a job have written, by rank."""
    rank_files = (file for file in folder.glob(f"{attempt}/*/*.{kind}") if file.stem.isdecimal())
    return sorted(rank_files, key=lambda file: int(file.stem))


def _find_kills(output: Path) -> tuple[str | None, str | None]:
    """Return what srun reports of a task that a signal ended: before srun itself ended the others, and after."""
    try:
        early_text, _, late_text = output.read_text(errors="replace").partition(TERMINATING)
    except OSError:
        return None, None
    return _parse_kill(early_text), _parse_kill(late_text)


def _parse_kill(text: str) -> str | None:
    match = re.search(rf"error: (\S+): tasks? (\d+)[^:]*: ({DIED})", text)
    if not match:
        return None
    node, rank, cause = match.groups()
    memory = " (out of memory?)" if cause == "Killed" else ""
    return f"rank {rank} on {node}: {cause.lower()}{memory}"


def _read_last_line(folder: Path, attempt: str) -> str | None:
    """Return the last line that a task or the batch script printed, where no rank reported an error."""
    job = attempt.rpartition(".")[0]
    for file in [*_list_rank_files(folder, attempt, "out"), folder / f"{attempt}.out", folder / f"{job}.out"]:
        try:
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            continue
        if lines:
            return strip_timestamp(lines[-1].strip())
    return None


def strip_timestamp(line: str) -> str:
    """Return a log's line without the date and time that it begins with."""
    return _TIME.sub("", line)


_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s+(?=\S)")
