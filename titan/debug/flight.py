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

from titan.profile.breakdown import name_collective

MAX_PENDING = 8
"""Collectives that have not ended: the oldest of them, since a GPU has hundreds waiting."""
COALESCED = "nccl:coalesced"
"""The name of the entry of several operations that NCCL launches together, such as `batch_isend_irecv`'s."""


@dataclass(frozen=True)
class PendingCollective:
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
    pending: tuple[PendingCollective, ...]


def dump_recorder() -> bytes:
    """Return the recorder's content as torch writes it, with stacks; empty where torch has none.

    A build with CUDA has a recorder for NCCL and another one for all other backends.
    """
    from torch._C import _distributed_c10d

    names = ("_dump_nccl_trace", "_dump_fr_trace")
    functions = [getattr(_distributed_c10d, name, None) for name in (names if _uses_nccl() else names[::-1])]
    recorder = next((function for function in functions if function is not None), None)
    return recorder() if recorder is not None else b""


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
    has_timing = any(map(_is_timed, entries))
    return Collectives(
        entered,
        completed,
        tuple(
            _build_operation(entry, _build_signature(entry) in ended_signatures, has_timing)
            for entry in pending[:MAX_PENDING]
        ),
    )


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


def _is_timed(entry: Mapping[str, Any]) -> bool:
    """Whether NCCL records when collectives begin."""
    return entry["state"] == "started" or entry.get("time_discovered_started_ns") is not None


def _build_signature(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    line = _find_user_line(entry.get("frames") or [])
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


def _find_user_line(frames: Sequence[Mapping[str, Any]]) -> str:
    user_frame = next((f for f in frames if "/torch/" not in f["filename"]), None)
    return (
        ""
        if user_frame is None
        else f"{user_frame['filename'].rpartition('/')[2]}:{user_frame['line']} in {user_frame['name']}"
    )
