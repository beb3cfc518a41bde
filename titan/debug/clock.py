"""When a rank is late, and how often it writes what it does and reads what others do. Free of torch.

A rank writes its state into its node's memory, which costs the file system nothing. One rank of each node writes the
states of its node into the run's directory, and one rank of all reads those of all nodes. Intervals there grow with the
number of nodes, so that the whole job does at most `WRITES_PER_SECOND` + `READS_PER_SECOND` operations a second.
"""

from __future__ import annotations

from titan.debug.activity import IN_STEP, Activity

PATIENCE_SECONDS, USUAL_TIMES = 60.0, 10.0
"""A run hangs after this many seconds without progress, and after this many usual steps."""
STOP_SECONDS = 10.0
"""After a request to stop the run hangs after this many seconds without progress in a step."""
MOST_TICK, LEAST_TICK = 1.0, 0.1
"""Seconds between two looks."""
SILENT_SECONDS = 1.5
"""A rank is silent after this many seconds at least without a beat."""
PULSE_SECONDS = 10.0
"""A node's states are written this often in normal steps."""
MISSED_SECONDS, MISSED_TICKS = 0.5, 3
"""After so many seconds and looks without a beat it is not known whether a rank that hangs is silent."""
DETAIL_PART, MOST_DETAIL_SECONDS = 60.0, 10.0
"""Of a rank that is late, stacks and collectives are read this often in its time without progress, at least every so
many seconds."""
WRITES_PER_SECOND, READS_PER_SECOND = 100.0, 60.0
"""Operations a second on the run's directory: of all nodes that write and follow, and of the rank that reads all."""
OPERATIONS_OF_NODE, OPERATIONS_OF_READ = 6, 3
"""Operations of a node that writes its states and reads those of the node that reports (where one before it has ended,
of two), and of reading one file."""
DUMP_OPERATIONS, DUMPS_PER_SECOND = 9, 150.0
"""Operations of a rank that writes its stacks and collectives, and of all such ranks a second."""
MOST_DUMP_SECONDS = 90.0
"""How long the ranks of a run write stacks at most: those whose turn comes later write none."""


class Clock:
    """The intervals of one rank. All are in seconds.

    Attributes:
        asked: when the run was asked to stop; None: it was not.
        ranks_here: the ranks of this node.
    """

    def __init__(self, activity: Activity, least: float | None, ranks: int) -> None:
        """Take what the rank does.

        Args:
            activity: what the rank does.
            least: see `PATIENCE_SECONDS`; None: that.
            ranks: how many ranks the run has.
        """
        self.activity, self.least, self.ranks, self.now = activity, least or PATIENCE_SECONDS, ranks, activity.now
        self.ranks_here = 1
        self.asked: float | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes, where all have as many ranks as this one."""
        return -(-self.ranks // self.ranks_here)

    def patience(self) -> float:
        """Return after how long without progress the run hangs."""
        usual = self.activity.usual() or 0.0
        least = max(self.least, USUAL_TIMES * usual)
        if self.asked is not None and self.activity.phase in IN_STEP:
            least = min(least, max(STOP_SECONDS, USUAL_TIMES * usual))
        return min(least, self.activity.timeout / 2)

    def lateness(self) -> float:
        """Return the time without progress in units of the patience, of training or of a save: 1 and more is a hang.

        A save in the background may take long, and is late after half of its timeout only.
        """
        what = self.activity
        return max(what.age() / self.patience(), what.save_age() / (what.save_timeout / 2))

    def tick(self) -> float:
        """Return the time between two looks."""
        return min(MOST_TICK, max(LEAST_TICK, self.patience() / 20))

    def detail_interval(self) -> float:
        """Return how often stacks and collectives are read of a rank that is late: less often the longer it is."""
        return min(MOST_DETAIL_SECONDS, max(self.tick(), self.activity.age() / DETAIL_PART))

    def node_interval(self, late: bool) -> float:
        """Return how often a node writes its states into the run's directory, and looks at the node that reports."""
        least = self.detail_interval() if late else min(PULSE_SECONDS, self.patience() / 4)
        return least if self.nodes == 1 else max(least, self.nodes * OPERATIONS_OF_NODE / WRITES_PER_SECOND)

    def reads(self, seconds: float) -> int:
        """Return of how many nodes the rank that reports reads the states after a time without reading."""
        return max(1, int(READS_PER_SECOND / OPERATIONS_OF_READ * min(seconds, MOST_TICK)))

    def read_interval(self) -> float:
        """Return how long the rank that reports takes to read the states of all nodes."""
        return self.tick() * -(-max(1, self.nodes - 1) // self.reads(self.tick()))

    def silent_after(self, stopped: bool = False) -> float:
        """Return after how long without a beat a rank of this node is silent; soon where its process is stopped."""
        soon = max(SILENT_SECONDS, 5 * self.tick())
        return soon if stopped else max(4 * soon, 2.5 * min(PULSE_SECONDS, self.patience() / 4))

    def missed_after(self) -> float:
        """Return after how long without a beat it is not known whether a rank of this node is silent."""
        return max(MISSED_SECONDS, MISSED_TICKS * self.tick())

    def node_silent_after(self) -> float:
        """Return after how long without a change of its file another node is silent."""
        written = max(self.node_interval(late=False), self.node_interval(late=True))
        return self.silent_after() + (2.5 * written + self.read_interval() if self.nodes > 1 else 0.0)

    def dump_seconds(self) -> float:
        """Return how long the ranks write their stacks, one after another where they are many."""
        return 0.0 if self.nodes == 1 else min(MOST_DUMP_SECONDS, self.ranks * DUMP_OPERATIONS / DUMPS_PER_SECOND)

    def dump_delay(self, rank: int, first: int) -> float | None:
        """Return when a rank writes its stacks, counted from the rank `first`; None where its turn comes too late."""
        delay = (rank - first) % self.ranks * DUMP_OPERATIONS / DUMPS_PER_SECOND if self.nodes > 1 else 0.0
        return None if delay > MOST_DUMP_SECONDS else delay

    def lead(self, limit: float) -> float:
        """Return how long before a limit the run's end is decided: all ranks must learn of it before."""
        spread = self.node_interval(late=True) + self.read_interval() if self.nodes > 1 else 0.0
        return min(2 * self.tick() + spread, limit / 3)
