"""What one rank of a run does, with the collectives that it has entered, and how it is written as JSON. Free of torch.

A state's beat grows whenever it is written: a rank whose beat stays the same is silent.

Collectives are read from torch's Flight Recorder, a ring buffer of each backend. torch records NCCL's and gloo's by
default, `TORCH_FR_BUFFER_SIZE` of them (2,000); messages between two ranks only with NCCL. Numbers of a group's
collectives count on each of its ranks, so ranks that are at different ones can be compared. Reading the recorder takes
milliseconds, and happens only when a run hangs.

NCCL's collectives are entered when the host issues them, and completed when the device has computed them. Whether one
has begun on the device is recorded with `TORCH_NCCL_ENABLE_TIMING=1` only; gloo's begin at once.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.cluster.operation_kinds import name_collective

MAX_PENDING = 8  # collectives that have not ended: the oldest of them, since a GPU has hundreds waiting
COALESCED = "nccl:coalesced"
"""The name of the entry of several operations that NCCL launches together, such as `batch_isend_irecv`'s."""


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a rank has entered and that has not ended."""

    group: str  # the name of its process group
    number: int  # which of the group's collectives; -1 for a message between two ranks
    kind: str  # what it does, such as "all-reduce"
    sizes: str = ""  # of its input
    # whether this rank has done the same before: this group, kind and sizes, called from this line
    familiar: bool = True
    peers: tuple[int, ...] = ()  # the ranks that it needs; empty for all of its group
    line: str = ""  # the innermost line outside of torch from which it was called, where that is known
    # whether it waits for other ranks; False on a GPU that has other work to do first; None: not known
    started: bool | None = True


@dataclass(frozen=True)
class Collectives:
    """What the recorder has of this rank."""

    entered: dict[str, int]  # the number of the last collective of each group that this rank has entered
    completed: dict[str, int]  # that of the last one that has ended
    pending: tuple[PendingCollective, ...]  # those that have not ended, the oldest first


def dump_recorder() -> bytes:
    """Return the recorder's content as torch writes it, with stacks; empty where torch has none.

    A build with CUDA has a recorder for NCCL and another one for all other backends.
    """
    from torch._C import _distributed_c10d

    names = ("_dump_nccl_trace", "_dump_fr_trace")
    functions = [getattr(_distributed_c10d, name, None) for name in (names if _uses_nccl() else names[::-1])]
    return next((function() for function in functions if function is not None), b"")


def _uses_nccl() -> bool:
    """Whether this rank's collectives are NCCL's."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()


def read_collectives(content: bytes) -> Collectives:
    """Return what this rank has entered.

    Args:
        content: of `dump_recorder`.
    """
    record: Mapping[str, Any] = pickle.loads(content) if content else {}
    entries = _join_coalesced(record.get("entries", []))
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    for entry in (entry for entry in entries if not entry["is_p2p"]):
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        entered[group] = max(number, entered.get(group, 0))
        if _has_ended(entry):
            completed[group] = max(number, completed.get(group, 0))
    _add_status(entered, completed, entries, record.get("pg_status", {}))
    pending = [entry for entry in entries if not _has_ended(entry)]
    ended_signatures = {_build_signature(entry) for entry in entries if _has_ended(entry)}
    # whether NCCL records when collectives begin
    has_timing = any(e["state"] == "started" or e.get("time_discovered_started_ns") is not None for e in entries)
    operations = (
        _build_operation(entry, _build_signature(entry) in ended_signatures, has_timing)
        for entry in pending[:MAX_PENDING]
    )
    return Collectives(entered, completed, tuple(operations))


def _join_coalesced(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries with those that NCCL launches together as one, which is named like the first of them.

    Their own entries stay scheduled for ever; an entry `nccl:coalesced` of the same numbers, which has neither a name
    nor sizes, says what became of them all.
    """
    coalesced = {_build_launch_key(entry) for entry in entries if entry["profiling_name"] == COALESCED}
    first_entries: dict[Any, Mapping[str, Any]] = {}
    joined: list[Mapping[str, Any]] = []
    for entry in entries:
        launch_key = _build_launch_key(entry)
        if launch_key not in coalesced:
            joined.append(entry)
        elif entry["profiling_name"] != COALESCED:
            first_entries.setdefault(launch_key, entry)
        else:
            first_entry = first_entries.pop(launch_key, entry)
            description = {
                name: first_entry[name] for name in ("profiling_name", "input_sizes", "frames") if name in first_entry
            }
            joined.append({**entry, **description})
    return joined


def _build_launch_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the entries of one launch have in common."""
    of_messages = bool(entry["is_p2p"])
    return entry["process_group"][0], of_messages, entry["p2p_seq_id" if of_messages else "collective_seq_id"]


def _add_status(
    entered: dict[str, int], completed: dict[str, int], entries: Sequence[Mapping[str, Any]], status: Mapping[str, Any]
) -> None:
    """Add the numbers that NCCL keeps of each group: the ring buffer may have lost those of a group that rests."""
    names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
    for number, group_status in status.items():
        group = names.get(str(number))
        for numbers, key in ((entered, "last_enqueued_collective"), (completed, "last_completed_collective")):
            if group is not None and int(group_status.get(key, -1)) > 0:
                numbers[group] = max(int(group_status[key]), numbers.get(group, 0))


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective has ended. NCCL's are also retired when they have timed out; gloo's have no state."""
    return bool(entry["state"] == "completed" or (entry["retired"] and not _is_nccl(entry)))


def _is_nccl(entry: Mapping[str, Any]) -> bool:
    return str(entry["profiling_name"]).startswith("nccl:")


def _build_signature(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    frames = (f for f in entry.get("frames") or [] if "/torch/" not in f["filename"])
    line = next((f"{f['filename'].rpartition('/')[2]}:{f['line']} in {f['name']}" for f in frames), "")
    return str(entry["process_group"][0]), str(entry["profiling_name"]), str(entry["input_sizes"]), line


def _build_operation(entry: Mapping[str, Any], familiar: bool, has_timing: bool) -> PendingCollective:
    group, name, sizes, line = _build_signature(entry)
    number = -1 if entry["is_p2p"] else int(entry["collective_seq_id"])
    started = True if not _is_nccl(entry) else entry["state"] == "started" if has_timing else None
    return PendingCollective(group, number, describe_kind(name), sizes, familiar, line=line, started=started)


def describe_kind(name: str) -> str:
    """Return a collective in words: "all-gather" for "nccl:_all_gather_base"."""
    plain = name.partition(":")[2] or name
    return name_collective(plain) or plain


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
STOPPED = ("T", "t", "Z", "")  # the states of a process that does nothing


@dataclass(frozen=True)
class RankGroup:
    """A process group: the layout's dimension that it runs along, and its ranks, as `compact_ranks` returns them."""

    dimension: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    `node` is the name of its node under Slurm. `phase` is one of `titan.debug.activity`, which began `age` seconds ago.
    `line`, `layer`, `compiles`, `exchanges`, `joins` and `transfers` are of its main thread, see
    `titan.debug.thread_state.ThreadState`; `reads` is where the thread is that reads its data. `saving` is the step of
    the checkpoint that it writes, `saving_line` where the thread is that does so, and `saving_waits` whether that waits
    for another rank. `late` is its time without progress in units of its patience, see
    `titan.debug.activity.Clock.compute_lateness`. `entered`, `completed` and `pending` are as in `Collectives`, and
    `groups` its process groups by their names. `hung`: a collective of it has timed out; `dumped`: it has written its
    stacks.
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
    saving_line: str = ""
    saving_waits: bool = False
    late: float = 0.0
    entered: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    pending: tuple[PendingCollective, ...] = ()
    groups: dict[str, RankGroup] = field(default_factory=dict)
    hung: bool = False
    dumped: bool = False


def encode_state(content: object) -> bytes:
    """Return a state, or what holds states, as JSON; a group of all ranks may have thousands, so ranges stay short."""
    return json.dumps(content, default=_to_plain).encode()


def _to_plain(value: Any) -> dict[str, Any]:
    return {"range": [value.start, value.stop, value.step]} if isinstance(value, range) else vars(value)


def from_json_object(content: dict[str, Any]) -> RankState:
    """Return a state from its JSON; raise KeyError, TypeError or ValueError for anything else."""
    pending = tuple(PendingCollective(**{**op, "peers": tuple(op["peers"])}) for op in content["pending"])
    groups = {
        name: RankGroup(group["dimension"], range(*ranks["range"]) if isinstance(ranks, dict) else tuple(ranks))
        for name, group in content["groups"].items()
        for ranks in [group["ranks"]]
    }
    return RankState(**{**content, "pending": pending, "groups": groups})


def decode_state(content: bytes | None, attempt: int) -> RankState | None:
    """Return a state from JSON; None where it is none, or of another attempt."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        state = from_json_object(json.loads(content or b""))
        return state if state.attempt == attempt else None
    return None


def compact_ranks(ranks: Sequence[int]) -> Sequence[int]:
    """Return ranks at equal distances as a range."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    span = range(ranks[0], ranks[-1] + 1, step)
    return span if list(span) == list(ranks) else tuple(ranks)
