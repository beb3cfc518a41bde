"""What one rank of a run does, and how it is written as JSON. Free of torch.

A state's beat grows whenever it is written: a rank whose beat stays the same is silent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.debug.flight import PendingCollective

FOLDER = Path("debug")
STACKS, RECORDER = FOLDER / "stacks", FOLDER / "flight_recorder"
PROCESS_WORDS = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "": "dead",
    "D": "no answer, waiting for a disk or a file system",
    "R": "no answer, running",
    "S": "no answer",
}
"""What the state of a process says (`titan.files.platform.read_process_state`); "" where there is no such process."""
STOPPED = ("T", "t", "Z", "")
"""The states of a process that does nothing."""


@dataclass(frozen=True)
class RankGroup:
    """A process group: the layout's dimension that it runs along, and its ranks, as `compact_ranks` returns them."""

    dimension: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    Attributes:
        rank: its number.
        host: the name of its machine.
        node: the name of its node under Slurm.
        pid: its process.
        attempt: the run's attempt.
        beat: grows with every write.
        step: its step.
        phase: its phase, see `titan.debug.activity`.
        age: seconds since the phase began.
        line: the line in which its main thread is.
        layer: the layer in which its main thread is; None: in none.
        compiles: see `titan.debug.thread_state.ThreadState`.
        exchanges: see `ThreadState`.
        joins: see `ThreadState`.
        transfers: see `ThreadState`.
        reads: where the thread is that reads its data.
        saving: the step of the checkpoint that it writes; None: it writes none.
        saving_age: for how many seconds it has been writing it.
        saving_line: the line in which the thread is that writes it.
        saving_waits: whether that thread waits for another rank.
        usual: the usual seconds of a step.
        advances: how often it has recorded progress within phases.
        late: its time without progress in units of its patience; see `titan.debug.clock.Clock.compute_lateness`.
        entered: see `titan.debug.flight.Collectives`.
        completed: see `titan.debug.flight.Collectives`.
        pending: see `titan.debug.flight.Collectives`.
        groups: its process groups by their names.
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
    advances: int = 0
    late: float = 0.0
    entered: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    pending: tuple[PendingCollective, ...] = ()
    groups: dict[str, RankGroup] = field(default_factory=dict)
    hung: bool = False
    dumped: bool = False


def to_json_object(state: RankState) -> dict[str, Any]:
    """Return a state as what JSON can hold."""
    groups = {name: [group.dimension, _pack_ranks(group.ranks)] for name, group in state.groups.items()}
    return {**asdict(replace(state, groups={})), "groups": groups}


def from_json_object(content: dict[str, Any]) -> RankState:
    """Return a state from what `to_json_object` returned.

    Raises:
        KeyError: when a value is missing.
        TypeError: when a value has another type, or is not a field.
        ValueError: when a value can't be unpacked.
    """
    pending = tuple(PendingCollective(**{**op, "peers": tuple(op["peers"])}) for op in content["pending"])
    groups = {name: RankGroup(words, _unpack_ranks(ranks)) for name, (words, ranks) in content["groups"].items()}
    return RankState(**{**content, "pending": pending, "groups": groups})


def encode_state(state: RankState) -> bytes:
    """Return a state as JSON."""
    return json.dumps(to_json_object(state)).encode()


def decode_state(content: bytes | None, attempt: int) -> RankState | None:
    """Return a state from JSON; None where it is none, or of another attempt."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        state = from_json_object(json.loads(content or b""))
        return state if state.attempt == attempt else None
    return None


def compact_ranks(ranks: Sequence[int]) -> Sequence[int]:
    """Return ranks at equal distances as a range: a group of all ranks may have thousands."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    span = range(ranks[0], ranks[-1] + 1, step)
    return span if list(span) == list(ranks) else tuple(ranks)


def _pack_ranks(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    span = compact_ranks(ranks)
    return {"start": span.start, "stop": span.stop, "step": span.step} if isinstance(span, range) else list(span)


def _unpack_ranks(ranks: list[int] | dict[str, int]) -> Sequence[int]:
    return range(ranks["start"], ranks["stop"], ranks["step"]) if isinstance(ranks, dict) else tuple(ranks)
