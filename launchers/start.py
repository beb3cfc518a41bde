"""From a checked Run to training ranks: prepare the data, decide what the directory means, start or join the ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from launchers.supervisor import log_line, run_ranks
from titan.cluster.environment import within
from titan.cluster.rank_info import RankInfo
from titan.console.progress import progress_line
from titan.errors import ConfigError, RunError, machine_error
from titan.run import attempts, summary
from titan.run.lock import locked
from titan.run.run import Run

MEETING = timedelta(minutes=30)
"""How long ranks wait until all have come."""
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.1, 5.0
"""How soon a rank looks again for rank 0's address; twice as late each time, up to the longest."""
CONNECTIONS, OPEN_FILES = 3, 1000
"""How many connections each rank may have to rank 0's store, and the files that rank 0 may have open besides."""
PREPARING = timedelta(days=7)
"""How long they may wait for rank 0's word: it prepares the data first."""
LOST_SECONDS = 180.0
"""How long after a node was lost a file system may take to notice, and to free the lock that it held."""


def run_local(run: Run, apart: bool = False) -> int:
    """Run on this machine, in this process where one rank is enough.

    Args:
        run: the checked run.
        apart: start a process even for one rank, so that nothing of it stays in this one.

    Returns:
        The exit code.
    """
    with within(run.cluster.environment), locked(Path(run.directory)):
        for restart in range(run.cluster.restarts + 1):
            attempt = _begin(run)
            if isinstance(attempt, attempts.FinishedRun):
                summary.show_finished(attempt)
                return 0
            code = _lived(run, attempt, partial(_ranks, run, attempt, apart or run.cluster.restarts > 0))
            if code != 1 or restart == run.cluster.restarts:
                return code
            log_line(Path(run.directory), f"restart {restart + 1} of {run.cluster.restarts}")
    return 1


def _begin(run: Run) -> attempts.Attempt | attempts.FinishedRun:
    with progress_line() as show:
        return attempts.begin_attempt(run, show)


def _lived(run: Run, attempt: attempts.Attempt, train: Callable[[], int]) -> int:
    """Train, with the data that are prepared meanwhile; an attempt that is refused before its first step is taken
    back."""
    try:
        with _data(run, attempt):
            code = train()
    except ConfigError:
        attempts.withdraw_attempt(run, attempt)
        raise
    if code == 2:
        attempts.withdraw_attempt(run, attempt)
    return code


def _data(run: Run, attempt: attempts.Attempt) -> AbstractContextManager[None]:
    """Within it, data that a run reads while they are prepared are prepared."""
    if not run.dataset.stream:
        return nullcontext()
    from titan.dataset.preprocess.background import prepared_meanwhile

    return prepared_meanwhile(run.dataset, attempt.corpora, Path(run.directory) / "log" / "prepare.log")


def _ranks(run: Run, attempt: attempts.Attempt, apart: bool) -> int:
    if run.layout.devices > 1 or apart:
        return run_ranks((run, attempt), run.layout.devices, Path(run.directory))
    from titan.training.worker import work

    return work(run, attempt, RankInfo())


def run_rank0(run: Run, rank_info: RankInfo) -> int:
    """Rank 0 under torchrun or srun: decide, tell the other ranks, train."""
    from titan.training.worker import work

    store = _meet(rank_info)
    try:
        patience = LOST_SECONDS if rank_info.scheduled else 2.0
        with within(run.cluster.environment), locked(Path(run.directory), patience):
            attempt = _begin(run)
            if isinstance(attempt, attempts.FinishedRun):
                summary.show_finished(attempt)
                _send(store, rank_info, 0)
                return 0
            _send(store, rank_info, (run, attempt))
            return _lived(run, attempt, partial(_guarded, store, rank_info, run, attempt, work))
    except BaseException as error:
        _send(store, rank_info, 2 if isinstance(error, ConfigError) else 1)
        raise


def dismiss(rank_info: RankInfo, code: int) -> None:
    """Rank 0 under torchrun or srun, when there is nothing to run: let the other ranks end with `code`."""
    _send(_meet(rank_info), rank_info, code)


def run_worker(rank_info: RankInfo) -> int:
    """Any other rank under torchrun or srun: wait for rank 0's word, then train or end."""
    from titan.training.worker import work

    store = _meet(rank_info)
    store.set_timeout(PREPARING)
    word = pickle.loads(store.get("titan/word"))
    store.set_timeout(MEETING)
    store.add("titan/read", 1)
    if isinstance(word, int):
        return word
    run, attempt = word
    with within(run.cluster.environment):
        return _guarded(store, rank_info, run, attempt, work)


def _guarded(store: Any, rank_info: RankInfo, run: Run, attempt: attempts.Attempt, work: Any) -> int:
    """Train; of an error that several ranks see, only the first to fail speaks."""
    first: list[bool] = []
    try:
        return int(work(run, attempt, rank_info, store, lambda error: first.append(_first(store))))
    except Exception as error:
        if not (first[0] if first else _first(store)):
            return 2 if isinstance(error, ConfigError) else 1
        if not isinstance(error, (ConfigError, RunError)) and not machine_error(error):
            print(f"titan: rank {rank_info.rank} failed:", file=sys.stderr)
        raise


def _first(store: Any) -> bool:
    """Whether this rank is the first to fail; a store that is gone went with a rank that failed before."""
    try:
        return int(store.add("titan/failed", 1)) == 1
    except RuntimeError:
        return False


def _send(store: Any, rank_info: RankInfo, word: Any) -> None:
    """Leave rank 0's word, and stay until all have read it: the store may live in this process."""
    if not store.check(["titan/word"]):
        store.set("titan/word", pickle.dumps(word))
    if isinstance(word, int):
        deadline = time.monotonic() + 60
        while store.add("titan/read", 0) < rank_info.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def _meet(rank_info: RankInfo) -> Any:
    """The store that all ranks share."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    url = rank_info.init_method
    if not url:
        return HashStore()
    if url.startswith("meet://"):
        return _meet_at(Path(url.removeprefix("meet://")), rank_info)
    if url.startswith("tcp://"):
        _allow_connections(rank_info.world_size if rank_info.rank == 0 else 0)
        url = f"{url}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    store, _, _ = next(rendezvous(url, timeout=MEETING))
    return store


def _meet_at(file: Path, rank_info: RankInfo) -> Any:
    """The store of rank 0, which listens at a port that is free and says so in a file: no two jobs can collide.

    The file is written in place: where it is there before the ranks start, no shared folder's client takes it for
    missing, and each sees at its next look what was written into it.

    Raises:
        RunError: when rank 0 said nothing in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if rank_info.rank == 0:
        _allow_connections(rank_info.world_size)
        host = _own_name()
        store = TCPStore(host, 0, is_master=True, timeout=MEETING, wait_for_workers=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{host} {store.port}\n")
        return store
    host, port = _told(file)
    return TCPStore(host, int(port), is_master=False, timeout=MEETING)


def _allow_connections(ranks: int) -> None:
    """Let this process have so many open files that all ranks can connect to a store in it.

    Raises:
        ConfigError: when the system's limit forbids that.
    """
    wanted = CONNECTIONS * ranks + OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and wanted > hard:
        raise ConfigError(
            f"ulimit -n {hard}: rank 0 needs {wanted:,} open files for connections of {ranks:,} ranks; have the limit "
            "raised on its node."
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _told(file: Path) -> tuple[str, str]:
    """Host and port of rank 0, once they are there; thousands of ranks look, so each looks at longer and longer times.

    Each waits another while, so that they don't all look at once.
    """
    deadline, pause = time.monotonic() + MEETING.total_seconds(), LOOK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or empty
            host, port = file.read_text().split()
            return host, port
        time.sleep(pause * random.uniform(0.75, 1))
        pause = min(2 * pause, LONGEST_LOOK_SECONDS)
    raise RunError(f"rank 0 did not say in {file} where it listens; is this folder shared by all nodes?")


def _own_name() -> str:
    """A name by which other nodes reach this one: $MASTER_ADDR, Slurm's name of it where that resolves, or its own."""
    for name in (os.environ.get("MASTER_ADDR"), os.environ.get("SLURMD_NODENAME")):
        with contextlib.suppress(OSError):
            if name:
                socket.gethostbyname(name)
                return name
    return socket.gethostname()
