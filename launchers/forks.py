"""Ranks that are forked from this process, which has imported torch: sixteen start in a second on two cores."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from titan.cluster import rank_error, rank_process
from titan.cluster.rank_info import RankInfo
from titan.files import platform
from titan.files.environment import use_loopback

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
"""How long other ranks may take to report, after one has failed: the first to fail is often not the cause."""


def fork_ranks(body: Callable[[RankInfo], int], size: int, folder: Path, timeout: float) -> rank_error.RankError | None:
    """Call `body` on forked ranks, each with one thread, and wait for them; none outlives the call.

    This process may have used torch, but no backward pass: threads do not survive a fork.

    Args:
        folder: a new folder for their output, errors and rendezvous.
        timeout: seconds after which they are killed.

    Returns:
        The error that explains a failure; None where all ranks returned 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context: Any = multiprocessing.get_context(platform.START_METHOD)
    ranks = [
        context.Process(target=_run_rank, args=(body, rank, size, folder, os.getpid()), daemon=True)
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        _wait(ranks, time.monotonic() + timeout)
        return _find_error(ranks, folder, timeout)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _run_rank(body: Callable[[RankInfo], int], rank: int, size: int, folder: Path, parent: int) -> None:
    """Be a rank: its output goes to a file, and it ends without the parent's exit handlers."""
    import torch

    platform.die_with_parent(parent)
    log = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    gc.freeze()  # what comes from the parent is not for this process to collect
    if size > 1:
        use_loopback(os.environ)
    rank_info = RankInfo(rank, size, rank, f"file://{folder}/rendezvous" if size > 1 else "", supervised=True)
    report = partial(rank_process.report_error, _get_error_file(folder, rank), rank)
    code = rank_process.run_body(lambda: body(rank_info), report)
    os._exit(code)


def _get_error_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.error"


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> None:
    """Wait until all have ended, or one has failed and the others had time to report, or the time is over."""
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)


def _find_error(ranks: Sequence[BaseProcess], folder: Path, timeout: float) -> rank_error.RankError | None:
    codes = [process.exitcode for process in ranks]
    if not any(code != 0 for code in codes):
        return None
    errors = [rank_error.read(_get_error_file(folder, rank)) for rank in range(len(ranks))]
    killed = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    errors += [rank_error.describe_kill(number, rank) for rank, number in killed]
    first = rank_error.find_first_cause(errors)
    if first is not None:
        return first
    rank = next(rank for rank, code in enumerate(codes) if code != 0)
    late = TimeoutError(f"no result within {timeout:g} s")
    return rank_error.describe_error(late if codes[rank] is None else SystemExit(codes[rank]), rank)
