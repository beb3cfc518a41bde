"""Processes that measure together: start them, wait for the result of rank 0, and end all of them in any case."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from titan.cluster.environment import divide_cores, set_variables, use_loopback
from titan.cluster.rank_process import exit_now
from titan.errors import RunError
from titan.files.platform import die_with_parent

COLLECTIVE_SECONDS = 60
"""Timeout of a collective between the ranks."""
Measurement = Callable[[int, int, str], "dict[str, float]"]
"""Takes rank, number of ranks and the URL of their rendezvous; what rank 0 returns is the result. It can be pickled."""


def run_together(measure: Measurement, ranks: int, seconds: float, busy: int | None = None) -> dict[str, float]:
    """Return what rank 0 measures with so many ranks on this machine.

    Args:
        measure: runs in each rank.
        seconds: after which ranks that have not finished are ended.
        busy: how many of them compute at the same time; None: all.

    Raises:
        RunError: when a rank fails or does not finish in time; no rank is left behind.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the error says which rank failed
    with tempfile.TemporaryDirectory(prefix="titan-ranks-") as folder:
        arguments = (measure, ranks, folder, os.getpid())
        with set_variables(_build_environment(busy or ranks)):
            context = start_processes(  # type: ignore[no-untyped-call]
                _run_rank, arguments, ranks, join=False, daemon=True, start_method="spawn"
            )
        try:
            _wait_for_ranks(context, ranks, seconds)
        finally:
            _kill_ranks(context)
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
        return result


def _build_environment(ranks: int) -> dict[str, str]:
    """Return the variables with which titan's launcher would start so many ranks: their threads, gloo's interface."""
    variables: dict[str, str] = {}
    divide_cores(variables, ranks)
    use_loopback(variables)
    return {**variables, **{name: os.environ[name] for name in variables if name in os.environ}}


def _wait_for_ranks(context: ProcessContext, ranks: int, seconds: float) -> None:
    """Wait until all ranks have finished; raise RunError for the first that fails."""
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise RunError(
                    f"{ranks} ranks did not finish their measurements within {seconds:g} seconds; end what else runs "
                    "on this machine, and give the same command again."
                )
    except ProcessRaisedException as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(f"rank {error.error_index} of {ranks} failed while it measured: {reason}") from error
    except ProcessExitedException as error:
        ending = error.signal_name or f"exit code {error.exit_code}"
        raise RunError(f"rank {error.error_index} of {ranks} ended with {ending} while it measured.") from error


def _kill_ranks(context: ProcessContext) -> None:
    for process in context.processes:
        if process.is_alive():
            process.kill()
    for process in context.processes:
        process.join()


def _run_rank(rank: int, measure: Measurement, ranks: int, folder: str, parent: int) -> None:
    """Run the measurement in one of the ranks; rank 0 writes the result."""
    die_with_parent(parent)
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)  # what libraries print does not belong between the results; errors come as exceptions
    os.dup2(log, 2)
    result = measure(rank, ranks, f"file://{folder}/rendezvous")
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    exit_now(0)  # threads of a pipeline's groups would abort the process


@contextmanager
def join_process_group(rank: int, ranks: int, init_method: str, device: str) -> Iterator[torch.device]:
    """Yield this rank's device within a process group.

    Args:
        ranks: the number of ranks.
        init_method: the URL of their rendezvous.
        device: "cpu" or "cuda".
    """
    torch_device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield torch_device
    finally:
        dist.destroy_process_group()
