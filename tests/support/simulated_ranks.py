"""The watchers' states of many ranks, in one process and with a simulated clock: what they do to the file system.

Each node is its writing rank, as `titan.debug.states` makes it; the states of its other ranks lie in its memory, here a
dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.measure.in_memory import DictFolder
from titan.cluster.rank_info import RankInfo
from titan.debug import rank_state
from titan.debug.activity import Activity, Clock
from titan.debug.rank_state import RankState
from titan.debug.states import MEMORY_FILE, Folder, States


class CountingFolder(Folder):
    """Counts the calls of the file system."""

    operations = 0

    def write(self, name: str, content: bytes) -> None:
        self.operations += 1 if name in self._open_files else 4
        super().write(name, content)

    def read(self, name: str) -> bytes | None:
        self.operations += 3
        return super().read(name)

    def list_names(self) -> list[str]:
        self.operations += 1
        return super().list_names()


@dataclass
class SimulatedNode:
    """A node: what its ranks do, and the states as its writer sees them."""

    first: int
    ranks: int
    clock: Clock
    memory: DictFolder
    states: States
    shared: CountingFolder
    beat: int = 0
    alive: bool = True

    def run_watchers(self) -> None:
        """Do what the watchers of all its ranks do at a look."""
        self.beat += 1
        late = self.clock.compute_lateness()
        state = self.make_state(self.first, late)
        number, content = f'"rank": {self.first},'.encode(), rank_state.encode_state(state)
        for rank in range(self.first + 1, self.first + self.ranks):
            self.memory.write(MEMORY_FILE.format(rank), content.replace(number, f'"rank": {rank},'.encode()))
        self.states.write_rank(state)
        if late >= 0.5:
            self.states.read_verdict()
            if self.states.is_reporter():
                self.states.read_nodes()

    def make_state(self, rank: int, late: float) -> RankState:
        activity = self.clock.activity
        return RankState(
            rank,
            f"n{self.first}",
            pid=os.getpid(),
            attempt=1,
            beat=self.beat,
            phase=activity.phase,
            late=late,
            age=activity.compute_idle_seconds(),
        )


@dataclass
class SimulatedRun:
    """All nodes of a run."""

    ranks: int
    per_node: int
    directory: Path
    clock_time: float = 1000.0  # the time in seconds
    nodes: list[SimulatedNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = [self._make_node(first) for first in range(0, self.ranks, self.per_node)]

    def _make_node(self, first: int) -> SimulatedNode:
        memory, clock = DictFolder(), Clock(Activity(get_time=lambda: self.clock_time), None, self.ranks)
        states = States(self.directory, RankInfo(first, self.ranks, 0), 1, clock, lambda key: memory)  # type: ignore[arg-type, return-value]
        states.shared = shared = CountingFolder(states.shared.path)
        return SimulatedNode(first, self.per_node, clock, memory, states, shared)

    def enter_phase(self, phase: str) -> None:
        """Begin a phase on all ranks."""
        for node in self.nodes:
            node.clock.activity.enter_phase(phase)

    def count_operations(self) -> int:
        """Return the operations on the run's directory so far."""
        return sum(node.shared.operations for node in self.nodes)

    def measure_rates(self, seconds: float, tick: float = 1.0) -> Iterable[float]:
        """Let the time pass, and yield the operations a second of each `tick`."""
        end = self.clock_time + seconds
        while self.clock_time < end:
            initial_count = self.count_operations()
            self.clock_time += tick
            for node in self.nodes:
                if node.alive:
                    node.run_watchers()
            yield (self.count_operations() - initial_count) / tick
