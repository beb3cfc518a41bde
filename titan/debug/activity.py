"""What a rank does now, and when that is late: its step and phase, and since when. Free of torch.

Recording is a few attribute writes per step. `Clock` says how often a rank writes what it does and reads what others
do. A rank writes its state into its node's memory, which costs the file system nothing. One rank of each node writes
the states of its node into the run's directory, and one rank of all reads those of all nodes. Intervals there grow with
the number of nodes, so that the whole job does at most `WRITES_PER_SECOND` + `READS_PER_SECOND` operations a second.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

STARTING, DATA, COMPUTING, UPDATING = "starting", "waiting for data", "computing gradients", "updating the weights"
EVALUATING, SAVING, FINISHING = "evaluating", "saving a checkpoint", "finishing the run"
HOOK, ENDED = "running a hook", "ended"  # the phases of a rank
IN_STEP = (STARTING, DATA, COMPUTING, UPDATING)  # those that end with a step
MEDIAN_STEPS = 32  # steps of which the median is the usual time


class Activity:
    """What one rank does now. The thread that trains writes it, and the watcher reads it.

    Attributes:
        step: the step in progress, or the last one.
        phase: one of the phases above.
        since: when the phase began, in seconds of the monotonic clock.
        timeout: seconds that ranks may wait for each other in this phase.
        hook_timeout: seconds that they may wait for a rank in a hook.
        save_timeout: the same for a save in the background.
        saves: the steps of the checkpoints that are being written, and when each save began.
        progress_count: how often `record_progress` and `record_save_progress` were called.
    """

    def __init__(self, timeout: float = 1800.0, get_time: Callable[[], float] = time.monotonic) -> None:
        """Begin with the phase `STARTING`; `get_time` gives the time in seconds."""
        self.get_time = get_time
        self.step, self.phase, self.since = 0, STARTING, get_time()
        self.timeout = self.save_timeout = self.hook_timeout = timeout
        self.saves: dict[int, float] = {}
        self.progress_count = 0
        self._progress_time = self._save_progress_time = self.since
        self._compiler_count = 0
        self._step_start: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    @property
    def has_trained(self) -> bool:
        """Whether a step has ended, or what comes between steps has begun."""
        return bool(self._step_seconds) or self.phase not in IN_STEP

    def begin_step(self, step: int) -> None:
        """Record that a step begins, which first needs data; what came between two steps is not a step's time."""
        step_start = self.get_time()
        if self._step_start is not None and self.step == step - 1:
            self._step_seconds.append(step_start - self._step_start)
        self.step, self.phase, self.since, self._step_start = step, DATA, step_start, step_start

    def enter_phase(self, phase: str) -> None:
        """Record that a phase begins."""
        if phase in (EVALUATING, SAVING, FINISHING):
            self._step_start = None
        self.phase, self.since = phase, self.get_time()

    @contextmanager
    def run_hook(self) -> Iterator[None]:
        """Record that a hook of one's own runs while the block does; the phase before goes on after it."""
        phase, self.phase, self.since = self.phase, HOOK, self.get_time()
        try:
            yield
        finally:
            self.phase, self.since = phase, self.get_time()

    def record_progress(self) -> None:
        """Record progress within a phase: a micro-batch is computed, a tensor loaded, a part of a
        file read, a graph compiled, a collective entered."""
        self.progress_count += 1
        self._progress_time = self.get_time()

    def record_save_progress(self) -> None:
        """Record progress of a save, which may run in the background: a tensor or a file is written."""
        self.progress_count += 1
        self._save_progress_time = self.get_time()

    def begin_save(self, step: int) -> None:
        """Record that the checkpoint of a step is being written, until `end_save`; training may go on meanwhile."""
        self.saves[step] = self.get_time()

    def end_save(self, step: int) -> None:
        """Record that a checkpoint is no longer being written."""
        self.saves.pop(step, None)

    def check_compiler(self) -> None:
        """Record progress where the compiler has counted something since the last look; the watcher calls it."""
        module = sys.modules.get("torch._dynamo.utils")  # graphs, patterns, kernels, accesses to caches
        counters = dict(getattr(module, "counters", {}))
        count = sum(number for counts in counters.values() for number in list(counts.values()))
        if count != self._compiler_count:
            self._compiler_count = count
            self.record_progress()

    def compute_idle_seconds(self) -> float:
        """Return the seconds since this rank's last progress: since its phase began, or it advanced within it.

        A save is the phase's progress only where the phase waits for it.
        """
        waits_for_save = self.phase in (SAVING, FINISHING)
        return self.get_time() - max(
            self.since, self._progress_time, self._save_progress_time if waits_for_save else 0.0
        )

    def compute_save_idle_seconds(self) -> float:
        """Return the seconds since the last progress of the running save; 0 when there is none."""
        starts = list(self.saves.values())
        return self.get_time() - max(starts[0], self._save_progress_time) if starts else 0.0

    def estimate_step_seconds(self) -> float | None:
        """Return the usual seconds of a step; None before the third one, since the first two may compile."""
        times = list(self._step_seconds)[1:]
        return median(times) if times else None


PATIENCE_SECONDS, USUAL_TIMES = 60.0, 10.0
"""A run hangs after this many seconds without progress, and after this many usual steps."""
STOP_SECONDS = 10.0  # after a request to stop the run hangs after this many seconds without progress in a step
MAX_TICK, MIN_TICK = 1.0, 0.1  # seconds between two looks
SILENT_SECONDS = 1.5  # a rank is silent after this many seconds at least without a beat
PULSE_SECONDS = 10.0  # a node's states are written this often in normal steps
MISSED_SECONDS, MISSED_TICKS = 0.5, 3
"""After so many seconds and looks without a beat it is not known whether a rank that hangs is silent."""
DETAIL_PART, MAX_DETAIL_SECONDS = 60.0, 10.0
"""Of a rank that is late, stacks and collectives are read this often in its time without progress, at least every so
many seconds."""
WRITES_PER_SECOND, READS_PER_SECOND = 100.0, 60.0
"""Operations a second on the run's directory: of all nodes that write and follow, and of the rank that reads all."""
OPERATIONS_OF_NODE, OPERATIONS_OF_READ = 6, 3
"""Operations of a node that writes its states and reads those of the node that reports (where one before it has ended,
of two), and of reading one file."""
DUMP_OPERATIONS, DUMPS_PER_SECOND = 9, 150.0
"""Operations of a rank that writes its stacks and collectives, and of all such ranks a second."""
MAX_DUMP_SECONDS = 90.0  # how long the ranks of a run write stacks at most: those whose turn comes later write none


class Clock:
    """The intervals of one rank. All are in seconds."""

    def __init__(self, activity: Activity, min_patience: float | None, ranks: int) -> None:
        """Take what the rank does.

        Args:
            min_patience: see `PATIENCE_SECONDS`; None: that.
        """
        self.activity, self.min_patience = activity, min_patience or PATIENCE_SECONDS
        self.ranks, self.get_time = ranks, activity.get_time
        self.ranks_on_node = 1  # the ranks of this node
        self.stop_request_time: float | None = None  # when the run was asked to stop; None: it was not

    @property
    def nodes(self) -> int:
        """The number of nodes, where all have as many ranks as this one."""
        return -(-self.ranks // self.ranks_on_node)

    def compute_patience(self) -> float:
        """Return after how long without progress the run hangs."""
        step_seconds = self.activity.estimate_step_seconds() or 0.0
        patience = max(self.min_patience, USUAL_TIMES * step_seconds)
        if self.stop_request_time is not None and self.activity.phase in IN_STEP:
            patience = min(patience, max(STOP_SECONDS, USUAL_TIMES * step_seconds))
        return min(patience, self.activity.timeout / 2)

    def compute_lateness(self) -> float:
        """Return the time without progress in units of the patience, of training or of a save: 1 and more is a hang.

        A save in the background may take long, and is late after half of its timeout only.
        """
        activity = self.activity
        return max(
            activity.compute_idle_seconds() / self.compute_patience(),
            activity.compute_save_idle_seconds() / (activity.save_timeout / 2),
        )

    def tick_seconds(self) -> float:
        """Return the time between two looks."""
        return min(MAX_TICK, max(MIN_TICK, self.compute_patience() / 20))

    def detail_interval(self) -> float:
        """Return how often stacks and collectives are read of a rank that is late: less often the longer it is."""
        return min(MAX_DETAIL_SECONDS, max(self.tick_seconds(), self.activity.compute_idle_seconds() / DETAIL_PART))

    def node_interval(self, is_late: bool) -> float:
        """Return how often a node writes its states into the run's directory, and looks at the node that reports."""
        interval = self.detail_interval() if is_late else min(PULSE_SECONDS, self.compute_patience() / 4)
        return interval if self.nodes == 1 else max(interval, self.nodes * OPERATIONS_OF_NODE / WRITES_PER_SECOND)

    def count_reads(self, seconds: float) -> int:
        """Return of how many nodes the rank that reports reads the states after a time without reading."""
        return max(1, int(READS_PER_SECOND / OPERATIONS_OF_READ * min(seconds, MAX_TICK)))

    def read_interval(self) -> float:
        """Return how long the rank that reports takes to read the states of all nodes."""
        return self.tick_seconds() * -(-max(1, self.nodes - 1) // self.count_reads(self.tick_seconds()))

    def silence_timeout(self, is_stopped: bool = False) -> float:
        """Return after how long without a beat a rank of this node is silent; soon where its process is stopped."""
        shortest = max(SILENT_SECONDS, 5 * self.tick_seconds())
        return shortest if is_stopped else max(4 * shortest, 2.5 * min(PULSE_SECONDS, self.compute_patience() / 4))

    def missed_beat_timeout(self) -> float:
        """Return after how long without a beat it is not known whether a rank of this node is silent."""
        return max(MISSED_SECONDS, MISSED_TICKS * self.tick_seconds())

    def node_silence_timeout(self) -> float:
        """Return after how long without a change of its file another node is silent."""
        write_interval = max(self.node_interval(is_late=False), self.node_interval(is_late=True))
        return self.silence_timeout() + (2.5 * write_interval + self.read_interval() if self.nodes > 1 else 0.0)

    def dump_seconds(self) -> float:
        """Return how long the ranks write their stacks, one after another where they are many."""
        return 0.0 if self.nodes == 1 else min(MAX_DUMP_SECONDS, self.ranks * DUMP_OPERATIONS / DUMPS_PER_SECOND)

    def dump_delay(self, rank: int, first: int) -> float | None:
        """Return when a rank writes its stacks, counted from the rank `first`; None where its turn comes too late."""
        delay = (rank - first) % self.ranks * DUMP_OPERATIONS / DUMPS_PER_SECOND if self.nodes > 1 else 0.0
        return None if delay > MAX_DUMP_SECONDS else delay

    def lead_seconds(self, limit: float) -> float:
        """Return how long before a limit the run's end is decided: all ranks must learn of it before."""
        spread = self.node_interval(is_late=True) + self.read_interval() if self.nodes > 1 else 0.0
        return min(2 * self.tick_seconds() + spread, limit / 3)
