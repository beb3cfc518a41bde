"""What each rank of a run does, as small files in the run's directory: `debug/ranks/rank-N.json`. Free of torch.

A file is written in place with one call, by one rank, and read by others, so it needs no collective and no store. Its
beat grows with every write: a rank whose beat stays the same is silent.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.debug.flight import Operation

FOLDER = Path("debug")
RANKS, STACKS, RECORDER = FOLDER / "ranks", FOLDER / "stacks", FOLDER / "flight_recorder"
WORDS = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "": "dead",
    "D": "no answer, waiting for a disk or a file system",
    "R": "no answer, running",
    "S": "no answer",
}
"""What a state of a process in /proc says; "" where there is no such process."""


@dataclass(frozen=True)
class Group:
    """A process group: the layout's dimension that it runs along, and its ranks."""

    dimension: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    Attributes:
        rank, host, node, pid, attempt: who it is; `node` is the name of its node under Slurm.
        beat: grows with every write.
        step, phase, age: its step and phase, and the seconds since the phase began.
        line, layer: where its main thread is.
        compiles, exchanges, joins, transfers: see `titan.debug.place.Place`.
        reads: where the thread is that reads its data.
        saving, saving_age, saving_line, saving_waits: the step of the checkpoint that it writes, for how many seconds,
            where, and whether it waits for another rank in this.
        usual: the usual seconds of a step.
        entered, pending: see `titan.debug.flight.entered`.
        groups: its process groups by their names.
        neighbours: the state in /proc of the other ranks on its host.
        hung: whether a collective of it has timed out.
        dumped: whether it has written its stacks.
    """

    rank: int
    host: str = ""
    node: str = ""
    pid: int = 0
    attempt: int = 0
    beat: int = 0
    step: int = 0
    phase: str = ""
    age: float = 0.0
    line: str = ""
    layer: str | None = None
    compiles: bool = False
    exchanges: bool = False
    joins: bool = False
    transfers: bool = False
    reads: str = ""
    saving: int | None = None
    saving_age: float = 0.0
    saving_line: str = ""
    saving_waits: bool = False
    usual: float | None = None
    entered: dict[str, int] = field(default_factory=dict)
    pending: tuple[Operation, ...] = ()
    groups: dict[str, Group] = field(default_factory=dict)
    neighbours: dict[int, str] = field(default_factory=dict)
    hung: bool = False
    dumped: bool = False


class StateFile:
    """The file of one rank's state, kept open."""

    def __init__(self, directory: Path, rank: int) -> None:
        """Create it, empty."""
        file = path(directory, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, state: RankState) -> None:
        """Replace its content; a full disk is no reason to fail."""
        groups = {name: [group.dimension, _packed(group.ranks)] for name, group in state.groups.items()}
        content = (json.dumps({**asdict(replace(state, groups={})), "groups": groups}) + "\n").encode()
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, content, 0)
            os.ftruncate(self.descriptor, len(content))

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)


def _packed(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Return ranks at equal distances as a range: a group of all ranks may have thousands."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    span = range(ranks[0], ranks[-1] + 1, step)
    return {"start": span.start, "stop": span.stop, "step": step} if list(span) == list(ranks) else list(ranks)


def _unpacked(ranks: list[int] | dict[str, int]) -> Sequence[int]:
    return range(ranks["start"], ranks["stop"], ranks["step"]) if isinstance(ranks, dict) else ranks


def path(directory: Path, rank: int) -> Path:
    """Return the file of a rank's state."""
    return directory / RANKS / f"rank-{rank}.json"


def read(directory: Path, rank: int, attempt: int) -> RankState | None:
    """Return the state of a rank; None where it has written none in this attempt."""
    try:
        content: dict[str, Any] = json.loads(path(directory, rank).read_text())
        content["pending"] = tuple(Operation(**{**op, "peers": tuple(op["peers"])}) for op in content["pending"])
        content["groups"] = {name: Group(words, _unpacked(ranks)) for name, (words, ranks) in content["groups"].items()}
        content["neighbours"] = {int(number): state for number, state in content["neighbours"].items()}
        found = RankState(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.attempt == attempt else None


def read_all(directory: Path, ranks: Sequence[int], attempt: int) -> dict[int, RankState]:
    """Return the states of those ranks that have written one in this attempt."""
    found = {rank: read(directory, rank, attempt) for rank in ranks}
    return {rank: state for rank, state in found.items() if state is not None}


def process_state(pid: int) -> str:
    """Return the state of a process of this host by /proc, such as "T"; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
