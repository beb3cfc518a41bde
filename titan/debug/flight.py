"""The collectives that this rank has entered, from torch's Flight Recorder (a ring buffer of each backend).

torch records NCCL's and gloo's collectives by default, `TORCH_FR_BUFFER_SIZE` of them (2,000); messages between two
ranks only with NCCL. Numbers of a group's collectives count on each of its ranks, so ranks that are at different ones
can be compared. Reading the recorder takes milliseconds, and happens only when a run hangs.

NCCL's collectives are entered when the host issues them, and completed when the device has computed them. Whether one
has begun on the device is recorded with `TORCH_NCCL_ENABLE_TIMING=1` only; gloo's begin at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.profile import kinds

MOST = 8
"""Collectives that have not ended: the oldest of them, since a GPU has hundreds waiting."""
COALESCED = "nccl:coalesced"
"""The name of the entry of several operations that NCCL launches together, such as `batch_isend_irecv`'s."""


@dataclass(frozen=True)
class Operation:
    """A collective that a rank has entered and that has not ended.

    Attributes:
        group: the name of its process group.
        number: which of the group's collectives; -1 for a message between two ranks.
        kind: what it does, such as "all-reduce".
        sizes: of its input.
        familiar: whether this rank has done the same before: this group, kind and sizes, called from this line.
        peers: the ranks that it needs; empty for all of its group.
        line: the innermost line outside of torch from which it was called, where that is known.
        started: whether it waits for other ranks; False on a GPU that has other work to do first; None: not known.
    """

    group: str
    number: int
    kind: str
    sizes: str = ""
    familiar: bool = True
    peers: tuple[int, ...] = ()
    line: str = ""
    started: bool | None = True


@dataclass(frozen=True)
class Collectives:
    """What the recorder has of this rank.

    Attributes:
        entered: the number of the last collective of each group that this rank has entered.
        completed: that of the last one that has ended.
        pending: those that have not ended, the oldest first.
    """

    entered: dict[str, int]
    completed: dict[str, int]
    pending: tuple[Operation, ...]


def dump() -> bytes:
    """Return the recorder's content as torch writes it, with stacks; empty where torch has none.

    A build with CUDA has a recorder for NCCL and another one for all other backends.
    """
    from torch._C import _distributed_c10d

    names = ("_dump_nccl_trace", "_dump_fr_trace")
    found = [getattr(_distributed_c10d, name, None) for name in (names if _uses_nccl() else names[::-1])]
    recorder = next((function for function in found if function is not None), None)
    return recorder() if recorder is not None else b""


def _uses_nccl() -> bool:
    """Whether this rank's collectives are NCCL's."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()


def collectives(content: bytes) -> Collectives:
    """Return what this rank has entered.

    Args:
        content: of `dump`.
    """
    found: Mapping[str, Any] = pickle.loads(content) if content else {}
    entries = _join_coalesced(found.get("entries", []))
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    for entry in (entry for entry in entries if not entry["is_p2p"]):
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        entered[group] = max(number, entered.get(group, 0))
        if _has_ended(entry):
            completed[group] = max(number, completed.get(group, 0))
    _add_status(entered, completed, entries, found.get("pg_status", {}))
    pending = [entry for entry in entries if not _has_ended(entry)]
    ended, timed = {_signature(entry) for entry in entries if _has_ended(entry)}, any(map(_is_timed, entries))
    return Collectives(
        entered, completed, tuple(_operation(entry, _signature(entry) in ended, timed) for entry in pending[:MOST])
    )


def _join_coalesced(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries with those that NCCL launches together as one, which is named like the first of them.

    Their own entries stay scheduled for ever; an entry `nccl:coalesced` of the same numbers, which has neither a name
    nor sizes, says what became of them all.
    """
    wholes = {_numbers(entry) for entry in entries if entry["profiling_name"] == COALESCED}
    parts: dict[Any, Mapping[str, Any]] = {}
    joined: list[Mapping[str, Any]] = []
    for entry in entries:
        numbers = _numbers(entry)
        if numbers not in wholes:
            joined.append(entry)
        elif entry["profiling_name"] != COALESCED:
            parts.setdefault(numbers, entry)
        else:
            about = parts.pop(numbers, entry)
            shown = {name: about[name] for name in ("profiling_name", "input_sizes", "frames") if name in about}
            joined.append({**entry, **shown})
    return joined


def _numbers(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the entries of one launch have in common."""
    of_messages = bool(entry["is_p2p"])
    return entry["process_group"][0], of_messages, entry["p2p_seq_id" if of_messages else "collective_seq_id"]


def _add_status(
    entered: dict[str, int], completed: dict[str, int], entries: Sequence[Mapping[str, Any]], status: Mapping[str, Any]
) -> None:
    """Add the numbers that NCCL keeps of each group: the ring buffer may have lost those of a group that rests."""
    names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
    for number, about in status.items():
        group = names.get(str(number))
        for numbers, key in ((entered, "last_enqueued_collective"), (completed, "last_completed_collective")):
            if group is not None and int(about.get(key, -1)) > 0:
                numbers[group] = max(int(about[key]), numbers.get(group, 0))


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective has ended. NCCL's are also retired when they have timed out; gloo's have no state."""
    return bool(entry["state"] == "completed" or (entry["retired"] and not _is_nccl(entry)))


def _is_nccl(entry: Mapping[str, Any]) -> bool:
    return str(entry["profiling_name"]).startswith("nccl:")


def _is_timed(entry: Mapping[str, Any]) -> bool:
    """Whether NCCL records when collectives begin."""
    return entry["state"] == "started" or entry.get("time_discovered_started_ns") is not None


def _signature(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    line = _line(entry.get("frames") or [])
    return str(entry["process_group"][0]), str(entry["profiling_name"]), str(entry["input_sizes"]), line


def _operation(entry: Mapping[str, Any], familiar: bool, timed: bool) -> Operation:
    group, name, sizes, line = _signature(entry)
    number = -1 if entry["is_p2p"] else int(entry["collective_seq_id"])
    started = True if not _is_nccl(entry) else entry["state"] == "started" if timed else None
    return Operation(group, number, kind(name), sizes, familiar, line=line, started=started)


def kind(name: str) -> str:
    """Return a collective in words: "all-gather" for "nccl:_all_gather_base"."""
    plain = name.partition(":")[2] or name
    return kinds.words(plain) or plain


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    own = next((f for f in frames if "/torch/" not in f["filename"]), None)
    return "" if own is None else f"{own['filename'].rpartition('/')[2]}:{own['line']} in {own['name']}"
