"""What all ranks of a run do, as one of them sees it. Free of torch.

1. Every rank writes its state into its node's memory, a few hundred bytes at every look.
2. The lowest rank of a node that beats writes the states of all its ranks into one file of the run's directory,
   `debug/ranks/ATTEMPT/node-N.json`, N being its number.
3. The lowest rank of all that beats reads these files, and reports. The others read its file alone, which says whether
   the run ends.

Where a node's memory can't be used each rank counts as a node. Each file is written in place with one call.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from titan.cluster.rank_info import RankInfo
from titan.debug import rank_state
from titan.debug.activity import ENDED, Clock
from titan.debug.diagnosis import RunState
from titan.debug.rank_state import FOLDER, STOPPED, RankState
from titan.debug.verdict import Verdict, parse_verdict
from titan.files import platform
from titan.files.leases import identify_machine
from titan.files.platform import read_process_state

FILE_BYTES = 1 << 16  # bytes that a file in memory has from the beginning, so that a full memory does not stop it later
NEW_SECONDS = 60.0  # a folder in memory may wait so long for its first file
PID = re.compile(r'"pid": (\d+)')


class Folder:
    """Files of one folder, by their names; the folder is created with the first of them."""

    def __init__(self, path: Path, file_bytes: int = 0) -> None:
        """Take the folder; each file that is written gets `file_bytes` bytes."""
        self.path, self.file_bytes = path, file_bytes
        self._open_files: dict[str, int] = {}

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file; what was longer is filled with spaces."""
        if self.file_bytes and name in self._open_files and not os.fstat(self._open_files[name]).st_nlink:
            os.close(self._open_files.pop(name))  # somebody has cleared the memory
        if name not in self._open_files:
            self._open_files[name] = self._create_file(name)
        descriptor = self._open_files[name]
        os.pwrite(descriptor, content.ljust(os.fstat(descriptor).st_size), 0)

    def _create_file(self, name: str) -> int:
        self.path.mkdir(0o700 if self.file_bytes else 0o777, parents=True, exist_ok=True)
        # NFS's client would keep what is not written synchronously for half a minute before others see it
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (0 if self.file_bytes else os.O_DSYNC)
        descriptor = os.open(self.path / name, flags, 0o600 if self.file_bytes else 0o644)
        try:
            platform.reserve_space(descriptor, self.file_bytes)
        except OSError:
            os.close(descriptor)
            os.unlink(self.path / name)
            raise
        return descriptor

    def read(self, name: str) -> bytes | None:
        """Return the content of a file without what it is filled with; None where there is none."""
        try:
            return (self.path / name).read_bytes().rstrip(b"\0 ")
        except OSError:
            return None

    def list_names(self) -> list[str]:
        """Return the names of the files."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open_files.values():
            os.close(descriptor)
        self._open_files.clear()

    def remove(self, names: Iterable[str] = ()) -> None:
        """Remove the files that were written here, and others, and the folder where it has no more."""
        for name in {*self._open_files, *names}:
            with contextlib.suppress(OSError):
                os.unlink(self.path / name)
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()


def node_memory(key: str) -> Folder:
    """Return a folder in this node's memory, which its processes of this user share.

    Folders of ranks that have all ended are removed: a killed rank leaves its own behind.

    Args:
        key: what the folder is for.
    """
    parent = platform.MEMORY if os.access(platform.MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    prefix = f"titan-{os.getuid()}-{identify_machine()}-"
    path = parent / f"{prefix}{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    for sibling in parent.glob(f"{prefix}*"):
        if sibling != path and not _is_used(sibling):
            shutil.rmtree(sibling, ignore_errors=True)
    os.makedirs(path, mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return Folder(path, FILE_BYTES)


def _is_used(path: Path) -> bool:
    """Whether a process that wrote a state into the folder runs, or may be about to write its first."""
    try:
        pids = [match[1] for file in path.glob("rank-*.json") for match in PID.finditer(file.read_text())]
        return any(platform.is_alive(int(pid)) for pid in pids) or time.time() - path.stat().st_mtime < NEW_SECONDS
    except (OSError, ValueError):
        return True


RANKS = FOLDER / "ranks"
MEMORY_FILE, NODE_FILE, VERDICT_FILE = "rank-{}.json", "node-{}.json", "verdict.json"


@dataclass
class NodeStates:
    """What the file of a node says."""

    beat: int = -1  # grows with every write
    states: dict[int, RankState] = field(default_factory=dict)  # of its ranks
    silent: frozenset[int] = frozenset()  # those that it has not heard of
    processes: dict[int, str] = field(default_factory=dict)  # the states of its ranks' processes
    verdict: Verdict | None = None  # what it has found, where it reports
    changed_at: float = 0.0  # when the beat changed last, in seconds of the clock


class States:
    """The states of all ranks."""

    def __init__(
        self,
        directory: Path,
        rank_info: RankInfo,
        attempt: int,
        clock: Clock,
        open_memory: Callable[[str], Folder] = node_memory,
    ) -> None:
        """Take who this is.

        Args:
            clock: when to read and write.
            open_memory: returns the folder in the node's memory, from a key.
        """
        self.rank, self.attempt, self.clock = rank_info.rank, attempt, clock
        self.first = rank_info.rank - rank_info.local_rank
        self.shared = Folder(directory / RANKS / str(attempt))
        self.memory: Folder | None = None
        with contextlib.suppress(OSError):  # it can't be used, or has no room for this rank's file
            memory = open_memory(f"{directory.resolve()} {attempt} {self.first}")
            memory.write(MEMORY_FILE.format(self.rank), b"")
            self.memory = memory
        self.latest: dict[int, RankState] = {}  # the latest state of each rank
        self.verdict: Verdict | None = None  # what this rank or the one that reports has found
        self.nodes: dict[int, NodeStates] = {}
        self._last_beats: dict[int, tuple[int, float]] = {}
        self._processes: dict[int, str] = {}
        self._start_time = self._turn_time = self._read_time = clock.get_time()
        # nodes take turns, at the start and once they are late; ranks behind a node's first one know by then that it
        # writes
        self._turn = rank_info.rank / rank_info.world_size
        self._turn_part = 1.0 if rank_info.local_rank else self._turn
        self._is_late, self._is_first, self._beat = False, self.rank == 0, 0
        self._unread_nodes: list[int] = []

    # --- this node

    def write_rank(self, state: RankState) -> None:
        """Write this rank's state, and, when it is this rank's turn and time, what its node does; once that is late,
        learn which node reports, and what it has found."""
        self._record_beat(state)
        if self.memory is not None:
            with contextlib.suppress(OSError):
                self.memory.write(MEMORY_FILE.format(self.rank), rank_state.encode_state(state))
            self.clock.ranks_on_node = max(1, sum(1 for _ in _parse_numbers(MEMORY_FILE, self.memory.list_names())))
        if self._is_due():
            self.publish_node()
            if not self._is_late:
                self.nodes.clear()  # what was read long ago says nothing of who is alive
            elif self.is_writer():
                self._follow_node()

    def _is_due(self) -> bool:
        """Whether it is time to write the states of this node."""
        was_late, current_time = self._is_late, self.clock.get_time()
        self._is_late = any(state.late >= 0.5 or state.hung for state in self._list_node_states().values())
        if self._is_late and not was_late:
            self._turn_time, self._turn_part = current_time, self._turn
        return current_time - self._turn_time >= self._turn_part * self.clock.node_interval(self._is_late)

    def publish_node(self) -> None:
        """Write the states of this node into the run's directory, where this rank does so."""
        self.read_node()
        self._turn_time, self._turn_part = self.clock.get_time(), 1.0
        if not self.is_writer():
            return
        self._beat += 1
        content = {
            "beat": self._beat,
            "states": list(self._list_node_states().values()),
            "silent": sorted(self.find_silent_ranks()),
            "processes": self._processes,
            "verdict": self.verdict,
        }
        with contextlib.suppress(OSError):
            self.shared.write(NODE_FILE.format(self.rank), rank_state.encode_state(content))

    def read_node(self) -> None:
        """Read the states of the other ranks of this node."""
        for rank in _parse_numbers(MEMORY_FILE, self.memory.list_names()) if self.memory else ():
            content = self.memory.read(MEMORY_FILE.format(rank)) if self.memory and rank != self.rank else None
            if (state := rank_state.decode_state(content, self.attempt)) is not None:
                self._record_beat(state)
        self._processes = {rank: read_process_state(state.pid) for rank, state in self._list_node_states().items()}

    def _list_node_states(self) -> dict[int, RankState]:
        return {
            rank: state for rank, state in sorted(self.latest.items()) if rank == self.rank or rank in self._last_beats
        }

    def _record_beat(self, state: RankState) -> None:
        self.latest[state.rank] = state
        if state.beat != self._last_beats.get(state.rank, (-1, 0.0))[0]:
            self._last_beats[state.rank] = state.beat, self.clock.get_time()

    def find_silent_ranks(self) -> set[int]:
        """Return the ranks of this node that do not beat, or have ended."""
        current_time = self.clock.get_time()
        return {
            rank
            for rank, (_, beat_time) in self._last_beats.items()
            if rank != self.rank
            and (
                self.latest[rank].phase == ENDED
                or current_time - beat_time >= self.clock.silence_timeout(self._processes.get(rank) in STOPPED)
            )
        }

    def is_writer(self) -> bool:
        """Whether this rank writes for its node: it is the lowest one that beats."""
        return self.rank == min(self._last_beats.keys() - self.find_silent_ranks(), default=self.rank)

    # --- all nodes

    def read_verdict(self) -> Verdict | None:
        """Return what this rank or the one that reports has found; the writer of this node passes it on in memory."""
        self.read_node()
        if content := self.memory.read(VERDICT_FILE) if self.memory else None:
            self.verdict = parse_verdict(json.loads(content))
        return self.verdict

    def _follow_node(self) -> None:
        """Read the first node that beats: it reports, unless that is this one."""
        for number in self._filter_earlier(sorted(_parse_numbers(NODE_FILE, self.shared.list_names()))):
            last_node = self.nodes.get(number)
            if last_node is None or self._is_alive(last_node):
                node = self._read_node_file(number)
                if node.verdict is not None and node.verdict != self.verdict:
                    self.publish_verdict(node.verdict)
                if self._is_alive(node):
                    self._is_first = False
                    return
        self._is_first = True

    def _filter_earlier(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the nodes' files that belong to other nodes before this one."""
        return [number for number in numbers if number < self.rank and number not in self._last_beats]

    def publish_verdict(self, verdict: Verdict | None) -> None:
        """Keep a verdict for the other ranks: those of this node read it from memory, others from this node's file."""
        self.verdict = verdict
        if self.memory is not None:
            with contextlib.suppress(OSError):
                self.memory.write(VERDICT_FILE, b"" if verdict is None else rank_state.encode_state(verdict))
        self.publish_node()

    def is_reporter(self) -> bool:
        """Whether all lower ranks are silent, so that this one reports."""
        earlier_nodes = [self.nodes[number] for number in self._filter_earlier(self.nodes)]
        return self.is_writer() and self._is_first and not any(map(self._is_alive, earlier_nodes))

    def read_nodes(self) -> bool:
        """Read the states of some nodes, as many as the time since the last call allows.

        Returns:
            Whether those of all nodes have been read since it was last true.
        """
        self.read_node()
        current_time = self.clock.get_time()
        read_count, self._read_time = self.clock.count_reads(current_time - self._read_time), current_time
        if not self._unread_nodes:
            numbers = _parse_numbers(NODE_FILE, self.shared.list_names())
            self._unread_nodes = [number for number in numbers if number != self.rank]
        for number in self._unread_nodes[:read_count]:
            self._read_node_file(number)
        del self._unread_nodes[:read_count]
        return not self._unread_nodes

    def _read_node_file(self, number: int) -> NodeStates:
        node = self.nodes.setdefault(number, NodeStates(changed_at=self.clock.get_time()))
        current_time = self.clock.get_time()
        content = self.shared.read(NODE_FILE.format(number))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(content or b"")
            new_node = NodeStates(
                int(fields["beat"]),
                {state.rank: state for state in map(rank_state.from_json_object, fields["states"])},
                frozenset(fields["silent"]),
                {int(rank): state for rank, state in fields["processes"].items()},
                None if fields["verdict"] is None else parse_verdict(fields["verdict"]),
                current_time,
            )
            if new_node.beat != node.beat:
                node = self.nodes[number] = new_node
                self.latest |= {
                    rank: state
                    for rank, state in new_node.states.items()
                    if rank not in self._last_beats and state.beat >= self.latest.get(rank, state).beat
                }
        return node

    def _is_alive(self, node: NodeStates) -> bool:
        return self.clock.get_time() - node.changed_at < self.clock.node_silence_timeout()

    def build_run_state(self) -> RunState:
        """Return what all ranks do."""
        processes, alive = dict(self._processes), self._last_beats.keys() - self.find_silent_ranks()
        for node in self.nodes.values():
            alive |= node.states.keys() - node.silent - self._last_beats.keys() if self._is_alive(node) else set()
            processes |= {rank: state for rank, state in node.processes.items() if rank not in self._last_beats}
        silent = (rank for rank in self.latest.keys() - alive if self.latest[rank].phase != ENDED)
        return RunState(self.clock.ranks, dict(self.latest), frozenset(silent), processes)

    def is_undecided(self) -> bool:
        """Whether a rank or a node has missed beats, and is not silent yet, or may still have to start."""
        current_time, silent = self.clock.get_time(), self.find_silent_ranks()
        missed_beat = self.clock.missed_beat_timeout()
        if any(
            rank not in silent and current_time - beat_time > missed_beat
            for rank, (_, beat_time) in self._last_beats.items()
        ):
            return True
        if len(self.latest) < self.clock.ranks and current_time - self._start_time < self.clock.node_silence_timeout():
            return True
        write_delay = 1.5 * (self.clock.node_interval(is_late=True) + self.clock.read_interval())
        return any(
            self._is_alive(node) and current_time - node.changed_at > missed_beat + write_delay
            for node in self.nodes.values()
        )

    def close(self) -> None:
        """Close the files, and remove those in memory: its own, or, where all ranks of the node have ended, all.

        Until then the state of a rank that has ended stays, so that no other one takes it for dead.
        """
        self.shared.close()
        if self.memory is None:
            return
        self.read_node()
        states = self._list_node_states()
        if all(state.phase == ENDED for state in states.values()):
            self.memory.remove(self.memory.list_names())
        elif states[self.rank].phase == ENDED:
            self.memory.close()
        else:
            self.memory.remove()


def _parse_numbers(pattern: str, names: list[str]) -> Iterator[int]:
    """Yield the numbers in the names of files."""
    form = re.compile(re.escape(pattern).replace(re.escape("{}"), r"(\d+)"))
    return (int(match[1]) for match in map(form.fullmatch, names) if match)
