"""What the ranks of a run say about a hang, in the run's directory. Free of torch.

The lowest rank that is alive writes both files: `debug/hang.json`, the last diagnosis, which the other ranks read, and
`debug/hangs.log`, one line per message, which the launcher shows on the terminal.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from titan.errors import RunError
from titan.files import untrusted
from titan.files.atomic import write_atomic

VERDICT, MESSAGES, ANALYSIS = Path("debug/hang.json"), Path("debug/hangs.log"), Path("debug/analysis.txt")
"""Files in the run's directory."""


@dataclass(frozen=True)
class Verdict:
    """A diagnosis.

    Attributes:
        attempt: of the run.
        sentence: what the run waits for.
        ranks: those that it waits for.
        node: the name of the node of the first of them.
        exit_code: with which all ranks end now; None: not yet.
    """

    attempt: int
    sentence: str
    ranks: tuple[int, ...] = ()
    node: str = ""
    exit_code: int | None = None


class HangError(RunError):
    """A run hangs, and has to end.

    Attributes:
        rank: the first that the others wait for; None where it is not known.
        node: the name of its node; empty where it is not known.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.sentence)
        self.rank = verdict.ranks[0] if verdict.ranks else None
        self.node = verdict.node


def write(directory: Path, verdict: Verdict) -> None:
    """Replace the last diagnosis."""
    with contextlib.suppress(OSError):
        write_atomic(directory / VERDICT, json.dumps(asdict(verdict)))


def read(directory: Path, attempt: int) -> Verdict | None:
    """Return the last diagnosis of an attempt; None when there is none."""
    try:
        content = untrusted.parse_json(untrusted.read_regular_file(directory / VERDICT))
        verdict = Verdict(**{**content, "ranks": tuple(content["ranks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if verdict.attempt == attempt else None


def read_hang_sentence(directory: Path) -> str | None:
    """Return what a run waits for now, by its last diagnosis; None when its ranks have found nothing."""
    try:
        content = untrusted.parse_json(untrusted.read_regular_file(directory / VERDICT))
    except (OSError, ValueError):
        return None
    sentence = content.get("sentence") if isinstance(content, dict) else None
    return sentence if isinstance(sentence, str) else None


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
