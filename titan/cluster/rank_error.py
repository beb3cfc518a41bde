"""The error of one rank as a file: the one format, its writer and its reader. Free of torch.

A rank writes the file, and so does the supervisor of a rank that a signal killed. The launcher that started the ranks
reads it, and under Slurm also the batch script (`launchers.slurm.script`), which matches the keys in their order, one
line per file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from titan.console.text import sanitize_lines
from titan.errors import ConfigError, RunError, describe_machine_error
from titan.files import untrusted
from titan.files.atomic import write_atomic

CONNECTION_LOST = re.compile(r"onnection (closed|reset)|Read error|Broken pipe|remote (worker|process|server)|by peer")
"""What a rank's error says when another rank has gone: in the words of gloo, NCCL and the store."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """Why one rank failed.

    Attributes:
        lost: whether it only lost the connection to another rank.
        killed: whether a signal killed it, so that its supervisor reports for it.
        time: when, in seconds since the epoch.
        node: the name of its node under Slurm, else empty.
        code: the rank's exit code: 2 for a ConfigError, else 1.
        rank: its number.
        text: one sentence, or a traceback.
        plain: whether `text` is a sentence for the user.
    """

    # in the order in which the batch script matches them
    lost: bool = False
    killed: bool = False
    time: float = field(default_factory=time.time)
    node: str = ""
    code: int = 1
    rank: int
    text: str
    plain: bool = False

    @property
    def last_line(self) -> str:
        """The last line of the text, which names the exception of a traceback."""
        return self.text.strip().splitlines()[-1]

    def format_report(self) -> str:
        """Return what a launcher prints of it: the sentence, or the rank and its traceback."""
        if self.killed:
            return f"rank {self.rank} was {self.text}; see log/rank-{self.rank}.log"
        return self.text if self.plain else f"rank {self.rank} failed:\n{self.text.rstrip()}"

    def summarize(self) -> str:
        """Return the report in one line: its first line, and the last one, which names the exception of a traceback."""
        lines = [line.strip() for line in self.format_report().splitlines() if line.strip()]
        return " ".join([*lines[:1], *lines[1:][-1:]])


def describe_error(error: BaseException, rank: int) -> RankError:
    """Return what to report of an exception that ends a rank: its sentence if users can act on it, else a traceback."""
    machine_message = describe_machine_error(error)
    plain = bool(machine_message) or isinstance(error, (ConfigError, RunError))
    text = (machine_message or str(error)) if plain else sanitize_lines("".join(traceback.format_exception(error)))
    code = 2 if isinstance(error, ConfigError) else 1
    node, cause = getattr(error, "node", ""), getattr(error, "rank", None)  # of the rank that others wait for in a hang
    rank, node = (rank, _get_node()) if cause is None else (cause, node)
    return RankError(lost=bool(CONNECTION_LOST.search(text)), node=node, code=code, rank=rank, text=text, plain=plain)


def describe_kill(signal_number: int, rank: int) -> RankError:
    """Return what to report of a rank that a signal killed."""
    memory = " (out of memory?)" if signal_number == signal.SIGKILL else ""
    text = f"killed by {name_signal(signal_number)}{memory}"
    return RankError(killed=True, node=_get_node(), rank=rank, text=text, plain=True)


def name_signal(number: int) -> str:
    """Return the name of a signal; its number where Python has no name for it, as for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _get_node() -> str:
    return os.environ.get("SLURMD_NODENAME", "")


def write(file: Path, error: RankError) -> None:
    """Write the error of a rank, in a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(vars(error)) + "\n")  # one line per file, for the batch script's sort


def read(file: Path) -> RankError | None:
    """Return the error in a file; None if the file is corrupt or holds no text."""
    try:
        content = untrusted.read_object(file, get_type_hints(RankError))
        return RankError(**content) if content["text"].strip() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_first_cause(errors: Iterable[RankError | None]) -> RankError | None:
    """Return the error that caused the others: of ranks that did not merely lose another one, a killed one before the
    earliest; None if there are none."""
    present = [error for error in errors if error is not None]
    return min(present, key=lambda e: (e.lost, not e.killed, e.time), default=None)
