"""Run a function on several ranks: forked from this process (which has imported torch), joined by gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan.cluster.rank_error import CONNECTION_LOST


class RankFailedError(Exception):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300, joined: bool = True) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` forked ranks and give their results, in rank order.

    Each rank has one thread, a gloo process group over a file and the environment RANK, LOCAL_RANK, WORLD_SIZE; with
    `joined` false, none of the two last: `fn` itself joins and leaves the others.
    Results travel by pickle. The parent must not have compiled with Inductor's pool of workers, whose locks do not
    survive a fork.

    Raises:
        RankFailedError: on the first rank that raises (with its traceback) or dies, or after `timeout` seconds; all
            ranks are killed before.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = (world, args, str(Path(folder) / "store") if joined else None, timeout, results)
        ranks = [context.Process(target=_run_rank, args=(fn, rank, *common)) for rank in range(world)]
        try:
            for process in ranks:
                process.start()
            return _collect_results(results, ranks, time.monotonic() + timeout)
        except BaseException:
            for process in ranks:
                if process.is_alive():
                    process.kill()
            raise
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.join()


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    store: str | None,
    timeout: float,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what comes from the parent is not for this process to collect
    try:
        if store:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        value = pickle.dumps(fn(rank, world, *args))  # here: the queue's own pickler sends tensors by shared memory
        if store:
            dist.barrier()  # before anyone leaves: a rank that is done must not break those still talking
            dist.destroy_process_group()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # without the parent's exit handlers


def _collect_results(results: Any, ranks: Sequence[BaseProcess], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        missing = [i for i in range(len(ranks)) if i not in values]
        dead = _describe_dead(ranks)
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            if dead:
                raise RankFailedError(f"died without a word: {dead}") from None
            if time.monotonic() > deadline:
                raise RankFailedError(f"no result in time from ranks {missing}") from None
            continue
        if error is not None:
            dead = _wait_for_dead(error, ranks, deadline)
            cause = f" after others died, {dead}" if dead else ""
            raise RankFailedError(f"rank {rank} of {len(ranks)}{cause}:\n{error}")
        values[rank] = pickle.loads(value)
    return [values[rank] for rank in range(len(ranks))]


def _wait_for_dead(error: str, ranks: Sequence[BaseProcess], deadline: float) -> str:
    """Return the ranks whose end a rank's error may follow from: their connections close before they have ended."""
    patience = min(time.monotonic() + 10, deadline) if CONNECTION_LOST.search(error) else 0.0
    while not (dead := _describe_dead(ranks)) and time.monotonic() < patience:
        time.sleep(0.01)
    return dead


def _describe_dead(ranks: Sequence[BaseProcess]) -> str:
    """Ranks that ended other than by their own report, with their exit codes (negative: the signal)."""
    return ", ".join(f"rank {i} with exit code {p.exitcode}" for i, p in enumerate(ranks) if p.exitcode)
