"""What grows with the number of ranks: `python -m tests.measure suite=scale`.

One process plays one rank of 8 to 16,384, and does what that rank does on its host: the other ranks' messages, states
and times are made beforehand, by the same code, and are not counted. Process groups are torch's fake ones, and messages
wait in a dictionary, so that network and file systems are not in the figures. Each figure is taken in a separate
process: its CPU time, and by how much its memory grows at most. For training beside a save: the time that
the training thread loses.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.measure.in_memory import DictFolder
from tests.measure.lost_time import TrainingThread
from tests.measure.simulated_save import SimulatedSave, compute_parameter_sizes
from titan.checkpoint import reader
from titan.checkpoint.save_planner import CachingSavePlanner
from titan.cluster import heap
from titan.cluster.rank_info import RankInfo
from titan.dataset.loader import Batch
from titan.debug.activity import COMPUTING, Activity, Clock
from titan.debug.rank_state import RankState, encode_state
from titan.debug.states import MEMORY_FILE, States
from titan.errors import ConfigError, RunError
from titan.files.platform import PROC
from titan.parallelism import mesh
from titan.run.compose import compose_run
from titan.run.run import Run
from titan.training import step_metrics
from titan.training.rank_times import FIGURES, RankTimes

RANKS = (8, 128, 2048, 16384)
NODE = 8
"""Ranks of a node."""
SETTINGS = (
    "name=scale", "model=llama405b", "dataset=synthetic", "training.seq_len=8192", "training.global_batch=16777216",
    "precision=bf16", "memory=full", "parallelism=fsdp", "parallelism.tensor=8", "checkpoint=async", "compile=block",
    "cluster=h100", "cluster.memory_gib=2000",
)  # fmt: skip
PIPELINE, LARGE = "parallelism.pipeline=16", 2048
"""Added with so many ranks: the layout is that of recipe=train_405b there."""
STEPS = 25
"""Steps that are timed, after as many that are not."""
HEADER = f"{'rank':<8}{'what':<26}" + "".join(f"{ranks:>20,}" for ranks in RANKS) + f"{'growth':>9}"


class CostMeter:
    """Adds up the CPU time of what runs inside of it, and the growth of the process's memory. A context manager."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.seconds = self.mebibytes = 0.0

    def __enter__(self) -> None:
        heap.release_freed_memory()  # or what is freed already would be used unseen
        (PROC / "self/clear_refs").write_text("5")  # the peak is now the present size
        self._start_mebibytes, self._start_seconds = _read_memory("VmRSS"), time.process_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.process_time() - self._start_seconds
        self.mebibytes = max(self.mebibytes, _read_memory("VmHWM") - self._start_mebibytes)


def _read_memory(name: str) -> float:
    """Return a size of this process in MiB (Linux)."""
    lines = (PROC / "self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


@dataclass(frozen=True)
class RankCost:
    """What something takes on one rank of many.

    Attributes:
        rank: "0" or "another".
        what: what it does.
        ranks: the number of ranks.
        seconds: CPU time.
        mebibytes: the growth of memory.
    """

    rank: str
    what: str
    ranks: int
    seconds: float
    mebibytes: float


@dataclass(frozen=True)
class CostRow:
    """A row of the table: a rank's costs with each number of ranks."""

    costs: Sequence[RankCost]

    def row(self) -> str:
        """Return the line of the table."""
        cells = "".join(f"{_format_seconds(cost.seconds)} {cost.mebibytes:,.0f} MiB".rjust(20) for cost in self.costs)
        growth = self.compute_growth()
        return f"{self.costs[0].rank:<8}{self.costs[0].what:<26}{cells}{'-' if growth is None else f'{growth:.1f}':>9}"

    def compute_growth(self) -> float | None:
        """Return the exponent with which the time grows between the two largest numbers of ranks: 1 is linear.

        None where it is unknown: of one number of ranks, and of a time that is too short to be measured.
        """
        if len(self.costs) < 2 or min(cost.seconds for cost in self.costs[-2:]) <= 0:
            return None
        previous, last = self.costs[-2:]
        return math.log(last.seconds / previous.seconds) / math.log(last.ranks / previous.ranks)


def _format_seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.1f} s"


Work = Callable[[int, CostMeter], None]
"""Does something on one rank of so many, within a meter."""


def suite(case: str) -> Iterator[CostRow]:
    """Measure the rows whose title contains a text.

    Raises:
        ConfigError: when there is none, or no /proc.
        RunError: when a measurement fails.
    """
    if not (PROC / "self/clear_refs").exists():
        raise ConfigError("suite=scale: it measures memory by Linux's /proc, which is not here; run it on Linux.")
    rows = {title: work for title, work in WORK.items() if case in title[1]}
    if not rows:
        raise ConfigError(f"case={case}: no row has a title that contains this; give a part of one of the titles.")
    for (rank, task), work in rows.items():
        yield CostRow([RankCost(rank, task, count, *_measure_cost(work, count)) for count in RANKS])


def _measure_cost(work: Work, ranks: int) -> tuple[float, float]:
    """Return seconds and MiB of some work in a separate process."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run_work, args=(work, ranks, send), daemon=True)
    process.start()
    send.close()
    try:
        seconds, mebibytes = receive.recv()
    except EOFError:
        process.join()
        raise RunError(f"a simulated rank of {ranks:,} ended with exit code {process.exitcode}.") from None
    process.join()
    return seconds, mebibytes


def _run_work(work: Work, ranks: int, send: Any) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()  # as in a run
    meter = CostMeter()
    work(ranks, meter)
    send.send((meter.seconds, meter.mebibytes))


def compose_scale_run(ranks: int) -> Run:
    """Return the run of so many ranks."""
    extra = (PIPELINE,) if ranks >= LARGE else ()
    return compose_run([*SETTINGS, f"cluster.nodes={-(-ranks // NODE)}", *extra], remote=True)


# --- rows


def _measure_composing(ranks: int, meter: CostMeter) -> None:
    compose_scale_run(NODE)  # imports, Hydra's search path
    with meter:
        compose_scale_run(ranks)


def _measure_receiving(ranks: int, meter: CostMeter) -> None:
    content = pickle.dumps(compose_scale_run(ranks))
    with meter:
        pickle.loads(content)


def _measure_groups(ranks: int, meter: CostMeter, last: bool) -> None:
    rank, layout = ranks - 1 if last else 0, compose_scale_run(ranks).layout
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    with meter:
        mesh.build_world(RankInfo(rank, ranks, rank % NODE), layout, torch.device("cpu"))


def _measure_plan(ranks: int, meter: CostMeter, first: bool) -> None:
    """Measure rank 0 in the first save, or in the second."""
    run = compose_scale_run(ranks)
    save = SimulatedSave(run, compute_parameter_sizes(run))
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        for is_first in (True, False)[: 1 if first else 2]:
            used_meter = meter if is_first == first else CostMeter()
            save.send_holdings(is_first)
            with used_meter:
                save.make_global_plan(is_first)
            save.send_positions(is_first)
            with used_meter:
                save.finish_save(is_first, Path(folder))


def _measure_training(ranks: int, meter: CostMeter, first: bool) -> None:
    """Measure the time that rank 0's training thread loses while another one plans a save in the background."""
    run = compose_scale_run(ranks)
    save, training = SimulatedSave(run, compute_parameter_sizes(run)), TrainingThread()
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        for is_first in (True, False)[: 1 if first else 2]:
            save.send_holdings(is_first)
            lost = training.measure_lost_time(partial(save.make_global_plan, is_first))
            save.send_positions(is_first)
            lost += training.measure_lost_time(partial(save.finish_save, is_first, Path(folder)))
    meter.seconds = lost


def _measure_local_plan(ranks: int, meter: CostMeter) -> None:
    run = compose_scale_run(ranks)
    save, rank = SimulatedSave(run, compute_parameter_sizes(run)), run.layout.sharded * run.layout.tensor - 1
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    tensors, planner = save.make_tensors(), CachingSavePlanner(rank)
    with meter:
        planner.create_local_plan(tensors)


def _measure_restore(ranks: int, meter: CostMeter) -> None:
    """Measure what each rank reads and plans before it loads its tensors."""
    run = compose_scale_run(ranks)
    save = SimulatedSave(run, compute_parameter_sizes(run))
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        save.send_holdings(True)
        save.make_global_plan(True)
        save.send_positions(True)
        save.finish_save(True, Path(folder))
        content = (Path(folder) / reader.METADATA).read_bytes()
    items, _ = save.templates[-1]
    with meter:
        tensors: dict[str, Any] = reader.parse_metadata(content).state_dict_metadata
        for item in items:
            if item.tensor_data is not None:
                create_read_items_for_chunk_list(item.index.fqn, tensors[item.index.fqn], [item.tensor_data.chunk])


class _Heartbeats:
    """The states of a run's ranks as the watchers see them; the time is `now`, in seconds."""

    def __init__(self, ranks: int, directory: Path) -> None:
        self.ranks, self.directory, self.now = ranks, directory, 1000.0

    def make_node_states(self, first: int, rank: int) -> States:
        """Return the states as a rank of the node of the ranks from `first` on sees them; all its ranks beat."""
        memory: Any = DictFolder()
        for peer in range(first, first + NODE):
            memory.write(MEMORY_FILE.format(peer), encode_state(self.make_state(peer)))
        clock = Clock(Activity(get_time=lambda: self.now), None, self.ranks)
        clock.ranks_on_node = NODE
        return States(self.directory, RankInfo(rank, self.ranks, rank - first), 1, clock, lambda key: memory)

    def make_state(self, rank: int) -> RankState:
        return RankState(rank, f"node-{rank // NODE}", attempt=1, beat=1, phase=COMPUTING)


def _measure_heartbeat(ranks: int, meter: CostMeter) -> None:
    """Measure a look of a rank that does not write for its node: each second."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        beats = _Heartbeats(ranks, Path(folder))
        states = beats.make_node_states(ranks - NODE, ranks - 1)
        states.read_node()
        with meter:
            states.write_rank(beats.make_state(ranks - 1))


def _measure_beat_reading(ranks: int, meter: CostMeter) -> None:
    """Measure the reading of all states, which rank 0 does when the run makes no progress."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        beats = _Heartbeats(ranks, Path(folder))
        for first in range(NODE, ranks, NODE):
            states = beats.make_node_states(first, first)
            states.write_rank(beats.make_state(first))
            states.publish_node()
            states.shared.close()
        states = beats.make_node_states(0, 0)
        states.write_rank(beats.make_state(0))
        with meter:
            while not states.read_nodes():
                beats.now += 1.0
            world = states.build_run_state()
        if len(world.states) < ranks:
            raise RunError(f"rank 0 has read the states of {len(world.states):,} of {ranks:,} ranks.")


def _measure_metrics(ranks: int, meter: CostMeter, rank: int) -> None:
    """Measure the metrics of a step: packing this rank's part, and reading the sum; per step."""
    run = compose_scale_run(ranks)
    world = mesh.RunContext(RankInfo(rank, ranks, rank % NODE), run.layout, torch.device("cpu"))
    no_step: Any = None  # the step itself is not measured
    times = RankTimes(run.profile, world, no_step, compiled=False)
    batch = Batch(np.zeros((2, 1, 1, 4), np.int32), 0, 0, 1, 1, valid=3, pairs=16)
    other_ranks = np.random.default_rng(0).random(times.num_slots)
    for step in range(2 * STEPS):
        with meter if step >= STEPS else CostMeter():
            times.latest = step, [1.0] * len(FIGURES)
            zero = torch.zeros(())
            vector = step_metrics.pack_metrics(zero, batch, zero, (False,) * 5, times.build_slots(step))
            summed = vector.numpy()
        summed[step_metrics.RANK_SLOTS :] += other_ranks
        with meter if step >= STEPS else CostMeter():
            metrics, slots, _ = step_metrics.split_metrics(summed, times.num_slots, 0)
            times.read_slots(step, slots)
            step_metrics.format_batch_hash(metrics)
    meter.seconds /= STEPS
    times.close()


WORK: dict[tuple[str, str], Work] = {
    ("0", "composing"): _measure_composing,
    ("another", "composing (receiving)"): _measure_receiving,
    ("0", "process groups"): partial(_measure_groups, last=False),
    ("another", "process groups"): partial(_measure_groups, last=True),
    ("0", "first save's plan"): partial(_measure_plan, first=True),
    ("0", "a later save's plan"): partial(_measure_plan, first=False),
    ("another", "first save's plan"): _measure_local_plan,
    ("0", "training, first save"): partial(_measure_training, first=True),
    ("0", "training, a later save"): partial(_measure_training, first=False),
    ("0", "heartbeat (reading all)"): _measure_beat_reading,
    ("another", "heartbeat"): _measure_heartbeat,
    ("0", "metrics of a step"): partial(_measure_metrics, rank=0),
    ("another", "metrics of a step"): partial(_measure_metrics, rank=1),
    ("each", "restore: what to read"): _measure_restore,
}
"""What is measured, by the rank and by what it does."""
