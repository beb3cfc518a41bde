"""The collectives that this rank has entered, from torch's Flight Recorder (a ring buffer of each process group).

torch records NCCL's and gloo's collectives by default, `TORCH_FR_BUFFER_SIZE` of them (2,000); messages between two
ranks only with NCCL. Numbers of a group's collectives count on each of its ranks, so ranks that are at different ones
can be compared. Reading the recorder takes milliseconds, and happens only when a run hangs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.profile import kinds

MOST = 8
"""Collectives that have not ended: the oldest of them, since a GPU has hundreds waiting."""


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
        started: whether it waits for other ranks; False on a GPU that has other work to do first.
    """

    group: str
    number: int
    kind: str
    sizes: str = ""
    familiar: bool = True
    peers: tuple[int, ...] = ()
    line: str = ""
    started: bool = True


def dump() -> bytes:
    """Return the recorder's content as torch writes it, with stacks; empty where torch has none."""
    from torch._C import _distributed_c10d

    found = getattr(_distributed_c10d, "_dump_fr_trace", None) or getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return found() if found is not None else b""


def entered(content: bytes) -> tuple[dict[str, int], list[Operation]]:
    """Return the number of the last collective in each group that this rank has entered, and those that have not ended.

    Args:
        content: of `dump`.
    """
    entries: Sequence[Mapping[str, Any]] = (pickle.loads(content) if content else {}).get("entries", [])
    last: dict[str, int] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            last[entry["process_group"][0]] = int(entry["collective_seq_id"])
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    ended = {_signature(entry) for entry in entries if entry["retired"] or entry["state"] == "completed"}
    return last, [_operation(entry, _signature(entry) in ended) for entry in pending[:MOST]]


def _signature(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    line = _line(entry.get("frames") or [])
    return str(entry["process_group"][0]), str(entry["profiling_name"]), str(entry["input_sizes"]), line


def _operation(entry: Mapping[str, Any], familiar: bool) -> Operation:
    group, name, sizes, line = _signature(entry)
    number = -1 if entry["is_p2p"] else int(entry["collective_seq_id"])
    started = entry["state"] == "started" or not name.startswith("nccl:")  # gloo records no state
    return Operation(group, number, kind(name), sizes, familiar, line=line, started=started)


def kind(name: str) -> str:
    """Return a collective in words: "all-gather" for "nccl:_all_gather_base"."""
    plain = name.partition(":")[2] or name
    return kinds.words(plain) or plain


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    own = next((f for f in frames if "/torch/" not in f["filename"]), None)
    return "" if own is None else f"{own['filename'].rpartition('/')[2]}:{own['line']} in {own['name']}"
