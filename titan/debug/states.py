"""What all ranks of a run do, as one of them sees it. Free of torch.

1. Every rank writes its state into its node's memory, a few hundred bytes at every look.
2. The lowest rank of a node that beats writes the states of all its ranks into one file of the run's directory,
   `debug/ranks/ATTEMPT/node-N.json`, N being its number.
3. The lowest rank of all that beats reads these files, and reports. The others read its file alone, which says whether
   the run ends.

Where a node's memory can't be used each rank counts as a node.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from titan.cluster.rank_info import RankInfo
from titan.debug import rank_state
from titan.debug.clock import Clock
from titan.debug.diagnosis import World
from titan.debug.folder import Folder, node_memory
from titan.debug.rank_state import FOLDER, STOPPED, RankState
from titan.debug.verdict import Verdict

RANKS = FOLDER / "ranks"
MEMORY_FILE, NODE_FILE, VERDICT_FILE = "rank-{}.json", "node-{}.json", "verdict.json"


@dataclass
class Node:
    """What the file of a node says.

    Attributes:
        beat: grows with every write.
        states: of its ranks.
        silent: those that it has not heard of.
        processes: the states of its ranks' processes in /proc.
        verdict: what it has found, where it reports.
        at: when the beat changed last, in seconds of the clock.
    """

    beat: int = -1
    states: dict[int, RankState] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    processes: dict[int, str] = field(default_factory=dict)
    verdict: Verdict | None = None
    at: float = 0.0


class States:
    """The states of all ranks.

    Attributes:
        known: the latest state of each rank.
        verdict: what this rank or the one that reports has found.
    """

    def __init__(
        self,
        directory: Path,
        rank_info: RankInfo,
        attempt: int,
        clock: Clock,
        memory: Callable[[str], Folder] = node_memory,
    ) -> None:
        """Take who this is.

        Args:
            directory: the run's.
            rank_info, attempt: who this is.
            clock: when to read and write.
            memory: returns the folder in the node's memory, from a key.
        """
        self.rank, self.attempt, self.clock = rank_info.rank, attempt, clock
        self.first = rank_info.rank - rank_info.local_rank
        self.shared = Folder(directory / RANKS / str(attempt))
        self.memory = self._memory(memory, f"{directory.resolve()} {attempt} {self.first}")
        self.known: dict[int, RankState] = {}
        self.verdict: Verdict | None = None
        self.nodes: dict[int, Node] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._processes: dict[int, str] = {}
        self._began, self._beat = clock.now(), 0
        # nodes start to write one after another; ranks behind a node's first one know by then that it writes
        self._turn = rank_info.rank / rank_info.world_size
        self._first_turn = 1.0 if rank_info.local_rank else self._turn
        self._published: float | None = None
        self._read_at = self._began
        self._followed: float | None = None
        self._is_first = self.rank == 0
        self._unread: list[int] = []

    def _memory(self, memory: Callable[[str], Folder], key: str) -> Folder | None:
        """Return this node's memory; None where it can't be used, or has no room for this rank's file."""
        with contextlib.suppress(OSError):
            folder = memory(key)
            folder.write(MEMORY_FILE.format(self.rank), b"")
            return folder
        return None

    # --- this node

    def write(self, state: RankState) -> None:
        """Write this rank's state, and those of its node when it is this rank's turn and time."""
        self._hear(state)
        if self.memory is not None:
            with contextlib.suppress(OSError):
                self.memory.write(MEMORY_FILE.format(self.rank), rank_state.encoded(state))
            self.clock.ranks_here = max(1, sum(1 for _ in _numbers(MEMORY_FILE, self.memory.names())))
        if self._is_due():
            self.publish()

    def _is_due(self) -> bool:
        """Whether it is time to write the states of this node."""
        if self._published is None:
            return self.clock.now() - self._began >= self._first_turn * self.clock.node_interval(late=False)
        return self.clock.now() - self._published >= self.clock.node_interval(self._is_late())

    def _is_late(self) -> bool:
        return any(state.late >= 0.5 or state.hung for state in self._here().values())

    def publish(self) -> None:
        """Write the states of this node into the run's directory, where this rank does so."""
        self.read_node()
        self._published = self.clock.now()
        if not self.writes():
            return
        self._beat += 1
        content = {
            "beat": self._beat,
            "states": [rank_state.plain(state) for state in self._here().values()],
            "silent": sorted(self.silent_here()),
            "processes": self._processes,
            "verdict": None if self.verdict is None else vars(self.verdict),
        }
        with contextlib.suppress(OSError):
            self.shared.write(NODE_FILE.format(self.rank), json.dumps(content).encode())

    def read_node(self) -> None:
        """Read the states of the other ranks of this node."""
        for rank in _numbers(MEMORY_FILE, self.memory.names()) if self.memory else ():
            state = None if rank == self.rank else self._read_rank(rank)
            if state is not None:
                self._hear(state)
        self._processes = {rank: rank_state.process_state(state.pid) for rank, state in self._here().items()}

    def _read_rank(self, rank: int) -> RankState | None:
        return rank_state.decoded(self.memory.read(MEMORY_FILE.format(rank)) if self.memory else None, self.attempt)

    def _here(self) -> dict[int, RankState]:
        return {rank: state for rank, state in sorted(self.known.items()) if rank == self.rank or rank in self._heard}

    def _hear(self, state: RankState) -> None:
        self.known[state.rank] = state
        if state.beat != self._heard.get(state.rank, (-1, 0.0))[0]:
            self._heard[state.rank] = state.beat, self.clock.now()

    def silent_here(self) -> set[int]:
        """Return the ranks of this node that do not beat."""
        now = self.clock.now()
        return {
            rank
            for rank, (_, at) in self._heard.items()
            if rank != self.rank and now - at >= self.clock.silent_after(self._processes.get(rank) in STOPPED)
        }

    def writes(self) -> bool:
        """Whether this rank writes for its node: it is the lowest one that beats."""
        return self.rank == min(self._heard.keys() - self.silent_here(), default=self.rank)

    # --- all nodes

    def follow(self) -> None:
        """Learn what the rank that reports has found: from memory, and where this rank writes for its node, from the
        first node that beats, when it is time."""
        self.read_node()
        self.verdict = self._verdict_here() or self.verdict
        if self.writes() and self._is_time_to_follow():
            self._followed = self.clock.now()
            self._follow_node()

    def _is_time_to_follow(self) -> bool:
        interval, now = self.clock.node_interval(late=True), self.clock.now()
        if self._followed is None or now - self._followed > 2 * interval:  # it was not late: nodes take turns
            self.nodes.clear()  # what was read long ago says nothing of who is alive
            self._followed = now - (1 - self._turn) * interval
        return now - self._followed >= interval

    def _follow_node(self) -> None:
        for number in self._before(sorted(_numbers(NODE_FILE, self.shared.names()))):
            known = self.nodes.get(number)
            if known is None or self._alive(known):
                node = self._read_node_file(number)
                if node.verdict is not None and node.verdict != self.verdict:
                    self.pass_on(node.verdict)
                if self._alive(node):
                    self._is_first = False
                    return
        self._is_first = True

    def _before(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the nodes' files that belong to other nodes before this one."""
        return [number for number in numbers if number < self.rank and number not in self._heard]

    def _verdict_here(self) -> Verdict | None:
        """Return the verdict that this node's writer has passed on in memory."""
        content = self.memory.read(VERDICT_FILE) if self.memory else None
        return _verdict(json.loads(content)) if content else None

    def pass_on(self, verdict: Verdict | None) -> None:
        """Keep a verdict for the other ranks: those of this node read it from memory, others from this node's file."""
        self.verdict = verdict
        if self.memory is not None:
            with contextlib.suppress(OSError):
                self.memory.write(VERDICT_FILE, json.dumps(None if verdict is None else vars(verdict)).encode())
        self.publish()

    def reports(self) -> bool:
        """Whether all lower ranks are silent, so that this one reports."""
        before = [self.nodes[number] for number in self._before(self.nodes)]
        return self.writes() and self._is_first and not any(map(self._alive, before))

    def read(self) -> bool:
        """Read the states of some nodes, as many as the time since the last call allows.

        Returns:
            Whether those of all nodes have been read since it was last true.
        """
        self.read_node()
        now = self.clock.now()
        allowed, self._read_at = self.clock.reads(now - self._read_at), now
        if not self._unread:
            self._unread = [number for number in _numbers(NODE_FILE, self.shared.names()) if number != self.rank]
        for number in self._unread[:allowed]:
            self._read_node_file(number)
        del self._unread[:allowed]
        return not self._unread

    def _read_node_file(self, number: int) -> Node:
        node, now = self.nodes.setdefault(number, Node(at=self.clock.now())), self.clock.now()
        content = self.shared.read(NODE_FILE.format(number))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = _node(json.loads(content or b""), now)
            if found.beat != node.beat:
                node = self.nodes[number] = found
                self.known |= {rank: state for rank, state in found.states.items() if self._is_news(state)}
        return node

    def _is_news(self, state: RankState) -> bool:
        return state.rank not in self._heard and state.beat >= self.known.get(state.rank, state).beat

    def _alive(self, node: Node) -> bool:
        return self.clock.now() - node.at < self.clock.node_silent_after()

    def world(self) -> World:
        """Return what all ranks do."""
        silent, processes = self.silent_here(), dict(self._processes)
        alive = self._heard.keys() - silent
        for node in self.nodes.values():
            alive |= node.states.keys() - node.silent - self._heard.keys() if self._alive(node) else set()
            processes |= {rank: state for rank, state in node.processes.items() if rank not in self._heard}
        return World(self.clock.ranks, dict(self.known), frozenset(self.known.keys() - alive), processes)

    def undecided(self) -> bool:
        """Whether a rank or a node has missed beats, and is not silent yet, or may still have to start."""
        now, silent, missed = self.clock.now(), self.silent_here(), self.clock.missed_after()
        if any(rank not in silent and now - at > missed for rank, (_, at) in self._heard.items()):
            return True
        if len(self.known) < self.clock.ranks and now - self._began < self.clock.node_silent_after():
            return True
        late = 1.5 * (self.clock.node_interval(late=True) + self.clock.read_interval())
        return any(self._alive(node) and now - node.at > missed + late for node in self.nodes.values())

    def close(self) -> None:
        """Close the files, and remove those in memory."""
        self.shared.close()
        if self.memory is not None:
            self.memory.remove()


def _numbers(pattern: str, names: list[str]) -> Iterator[int]:
    """Yield the numbers in the names of files."""
    form = re.compile(re.escape(pattern).replace(re.escape("{}"), r"(\d+)"))
    return (int(found[1]) for found in map(form.fullmatch, names) if found)


def _node(content: dict[str, object], now: float) -> Node:
    plain: list[dict[str, object]] = content["states"]  # type: ignore[assignment]
    states = {state.rank: state for state in map(rank_state.from_plain, plain)}
    processes: dict[str, str] = content["processes"]  # type: ignore[assignment]
    return Node(
        int(str(content["beat"])),
        states,
        frozenset(content["silent"]),  # type: ignore[call-overload]
        {int(rank): state for rank, state in processes.items()},
        _verdict(content["verdict"]),
        now,
    )


def _verdict(content: object) -> Verdict | None:
    if not isinstance(content, dict):
        return None
    return Verdict(**{**content, "ranks": tuple(content["ranks"])})
