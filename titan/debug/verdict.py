"""What the ranks of a run say about a hang, in the run's directory, and when the run ends. Free of torch.

The lowest rank that is alive judges and writes both files: `debug/hang.json`, the last diagnosis, which the other ranks
read, and `debug/hangs.log`, one line per message, which the launcher shows on the terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from titan.cluster.rank_info import RankInfo
from titan.debug import diagnosis
from titan.debug.activity import IN_STEP, STOP_SECONDS, Clock
from titan.debug.diagnosis import Diagnosis, RunState
from titan.errors import RunError
from titan.files import untrusted
from titan.files.atomic import write_atomic

VERDICT, MESSAGES, ANALYSIS = Path("debug/hang.json"), Path("debug/hangs.log"), Path("debug/analysis.txt")
"""Files in the run's directory."""


@dataclass(frozen=True)
class Verdict:
    """A diagnosis."""

    attempt: int  # of the run
    sentence: str  # what the run waits for
    ranks: tuple[int, ...] = ()  # those that it waits for
    node: str = ""  # the name of the node of the first of them
    exit_code: int | None = None  # with which all ranks end now; None: not yet


def parse_verdict(content: Any) -> Verdict:
    """Return a verdict from its JSON; raise KeyError, TypeError or ValueError for anything else."""
    return Verdict(**{**content, "ranks": tuple(content["ranks"])})


class HangError(RunError):
    """A run hangs, and has to end."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.sentence)
        # the first that the others wait for; None where it is not known
        self.rank = verdict.ranks[0] if verdict.ranks else None
        self.node = verdict.node  # the name of its node; empty where it is not known


def write(directory: Path, verdict: Verdict) -> None:
    """Replace the last diagnosis."""
    with contextlib.suppress(OSError):
        write_atomic(directory / VERDICT, json.dumps(asdict(verdict)))


def read(directory: Path, attempt: int | None = None) -> Verdict | None:
    """Return the last diagnosis, of an attempt where one is given; None when there is none."""
    try:
        verdict = parse_verdict(untrusted.parse_json(untrusted.read_regular_file(directory / VERDICT)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if attempt in (None, verdict.attempt) else None


def read_hang_sentence(directory: Path) -> str | None:
    """Return what a run waits for now, by its last diagnosis; None when its ranks have found nothing."""
    verdict = read(directory)
    return verdict.sentence if verdict is not None and isinstance(verdict.sentence, str) else None


def clear(directory: Path) -> None:
    """Remove the last diagnosis: the run continues."""
    with contextlib.suppress(OSError):
        (directory / VERDICT).unlink(missing_ok=True)


def append_message(directory: Path, line: str) -> None:
    """Append a message, with the time."""
    timestamp = datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError), (directory / MESSAGES).open("a") as file:
        file.write(f"{timestamp} {line}\n")


class Messages:
    """The messages that come from now on."""

    def __init__(self, directory: Path) -> None:
        """Begin at the present end of the file."""
        self.file = directory / MESSAGES
        self.offset = self._read_size()

    def read_new(self) -> list[str]:
        """Return the messages since the last call, without their time."""
        if self._read_size() <= self.offset:
            return []
        with self.file.open("rb") as file:
            file.seek(self.offset)
            content = file.read().rpartition(b"\n")[0] + b"\n"
        self.offset += len(content)
        return [line.partition(" ")[2] for line in content.decode(errors="replace").splitlines() if line]

    def _read_size(self) -> int:
        try:
            return self.file.stat().st_size
        except OSError:
            return 0


log = logging.getLogger("titan")


class Judge:
    """Says what the run waits for."""

    def __init__(self, directory: Path, rank_info: RankInfo, attempt: int, clock: Clock) -> None:
        """Take whose progress it is; nothing is said yet."""
        self.directory, self.rank_info, self.attempt, self.clock = directory, rank_info, attempt, clock
        # returns the name of the setting that a timeout in seconds comes from
        self.find_setting: Callable[[float], str] = lambda seconds: "cluster.timeout"
        # the ranks that were named last, and after how many seconds without progress; None: nothing is said
        self.last_report: tuple[tuple[int, ...], float] | None = None

    def decide_verdict(self, run_state: RunState) -> Verdict | None:
        """Say what the run waits for; None where it waits for nothing that hangs.

        The verdict has an exit code where the run ends now.
        """
        finding, subject, age, limit = self._diagnose_lateness(run_state)
        code = self._choose_exit_code(run_state, finding, age, limit)
        # the run is slow, but does not hang, where all ranks do the same, or those that are late make progress
        is_expected = finding.is_expected and age < limit / 2 and self.clock.stop_request_time is None
        if code is None and (is_expected or _is_progressing(run_state, finding.ranks)):
            return None
        sentence = f"{subject}: {finding.sentence}"
        if code == 1:
            name = "cluster.hook_timeout" if finding.is_hook else self.find_setting(limit)
            sentence += f"; ended after {name}={limit:g}, see {self.directory}/{ANALYSIS} and the stacks there"
        if code == 1 and self.rank_info.supervised:
            log.error(sentence)  # the launcher shows it as the error that ended the run
        elif (
            code is not None
            or self.last_report is None
            or finding.ranks != self.last_report[0]
            or age >= 2 * self.last_report[1]
        ):
            self.report_message(sentence)
            self.last_report = (finding.ranks, age)
        result = Verdict(self.attempt, sentence, finding.ranks, finding.node, code)
        write(self.directory, result)
        return result

    def _diagnose_lateness(self, run_state: RunState) -> tuple[Diagnosis, str, float, float]:
        """Return what is late, the step or a save, the sentence's beginning, the seconds that it takes, and its limit
        in seconds."""
        activity = self.clock.activity
        step_seconds = activity.estimate_step_seconds()
        usual_text = f" (usually {step_seconds:.2g} s)" if step_seconds else ""
        finding = diagnosis.diagnose(run_state)
        is_saving = any(state.saving is not None for state in run_state.states.values())
        age = activity.compute_idle_seconds()
        if is_saving and not (finding.ranks and age >= self.clock.compute_patience()):
            age, finding = max(activity.compute_save_idle_seconds(), age), diagnosis.diagnose_save(run_state)
            return finding, f"no progress of a save for {age:.0f} s", age, activity.save_timeout
        subject = f"no {'step' if activity.phase in IN_STEP else 'progress'} for {age:.0f} s{usual_text}"
        if finding.is_hook:
            return finding, subject, max(run_state.states[rank].age for rank in finding.ranks), activity.hook_timeout
        return finding, subject, age, activity.timeout

    def _choose_exit_code(self, run_state: RunState, finding: Diagnosis, age: float, limit: float) -> int | None:
        """Return the code with which the run ends now; None when it goes on waiting."""
        if not (finding.ranks or finding.all_entered) or self.rank_info.world_size == 1:
            return None
        stop_time, is_progressing = self.clock.stop_request_time, _is_progressing(run_state, finding.ranks)
        if stop_time is not None and not self.rank_info.scheduled:
            is_over = self.clock.get_time() - stop_time >= min(STOP_SECONDS, limit / 2)
            return 130 if is_over and not is_progressing else None
        if any(state.hung for state in run_state.states.values()):
            return 1
        if is_progressing and finding.is_save:
            return None  # training goes on beside the save
        is_over = age >= limit - self.clock.lead_seconds(limit)
        return 1 if is_over else None

    def withdraw_report(self, step: int) -> None:
        """Say that the run continues."""
        self.last_report = None
        clear(self.directory)
        self.report_message(f"the run continues with step {step}")

    def report_message(self, line: str) -> None:
        """Write a message into this rank's log and the run's, and on the terminal where no launcher does so."""
        log.warning(line)
        append_message(self.directory, line)
        if not self.rank_info.supervised:
            print(f"titan: {line}", file=sys.stderr, flush=True)


def _is_progressing(run_state: RunState, ranks: Sequence[int]) -> bool:
    """Whether the ranks that the others wait for make progress."""
    late = [run_state.states[rank].late if rank in run_state.states else 1.0 for rank in ranks]
    return bool(late) and max(late) < 0.5 and not run_state.silent_ranks & set(ranks)
