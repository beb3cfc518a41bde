"""How ranks that torchrun or srun started find each other: through a store in rank 0's process.

`RankInfo.init_method` names the store. "meet://FILE" is titan's own: rank 0 listens at a free port and writes it into
FILE, so that no two jobs can collide. Over the store rank 0 then sends the others one message: the run, or an exit
code.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from titan.cluster.rank_info import RankInfo
from titan.config.frozen_json import read_json, write_json
from titan.errors import ConfigError, RunError

JOIN_TIMEOUT = timedelta(minutes=30)  # how long ranks wait until all have joined
PREPARE_TIMEOUT = timedelta(days=7)  # how long they wait for rank 0's message: it prepares the data first
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.1, 5.0
"""The first and the longest pause between two looks for rank 0's address; each pause is twice the one before."""
CONNECTIONS, OPEN_FILES = 3, 1000
"""How many connections each rank may have to rank 0's store, and the files that rank 0 may have open besides."""
LEAVE_SECONDS = 60.0  # how long rank 0 stays until all ranks have read that there is nothing to run


def join(rank_info: RankInfo) -> Any:
    """Return the store that all ranks share."""
    url = rank_info.init_method
    if not url:
        return HashStore()
    if url.startswith("meet://"):
        return _join_by_file(Path(url.removeprefix("meet://")), rank_info)
    if url.startswith("tcp://"):
        _allow_connections(rank_info.world_size if rank_info.rank == 0 else 0)
        url = f"{url}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    store, _, _ = next(rendezvous(url, timeout=JOIN_TIMEOUT))
    return store


def send(store: Any, rank_info: RankInfo, message: Any) -> None:
    """Send rank 0's message; with an exit code stay until all have read it, since the store may be in this process."""
    if not store.check(["titan/word"]):
        store.set("titan/word", write_json(message))
    if isinstance(message, int):
        deadline = time.monotonic() + LEAVE_SECONDS
        while store.add("titan/read", 0) < rank_info.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def receive(store: Any, trusted: Sequence[str] = ()) -> Any:
    """Return rank 0's message, once it is there; only titan's classes and those of trusted packages are imported.

    Raises:
        RunError: for any other message: whoever reaches rank 0's port may have written it.
    """
    store.set_timeout(PREPARE_TIMEOUT)
    try:
        message = read_json(store.get("titan/word"), trusted)
    except ValueError as error:
        raise RunError(f"rank 0's message can't be read: {error}; give all ranks the same command line.") from error
    store.set_timeout(JOIN_TIMEOUT)
    store.add("titan/read", 1)
    return message


def fails_first(store: Any) -> bool:
    """Return whether this rank is the first to fail; a store that is gone went with a rank that failed before."""
    try:
        return int(store.add("titan/failed", 1)) == 1
    except RuntimeError:
        return False


def _join_by_file(file: Path, rank_info: RankInfo) -> Any:
    """Return the store of rank 0, which listens at a free port and writes it into a file.

    The file is written in place: if it exists before the ranks start, no client of a shared folder caches that it is
    missing, and each sees what was written into it when it next looks.
    """
    if rank_info.rank == 0:
        _allow_connections(rank_info.world_size)
        host = _find_host_name()
        store = TCPStore(host, 0, is_master=True, timeout=JOIN_TIMEOUT, wait_for_workers=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{host} {store.port}\n")
        return store
    host, port = _wait_for_address(file)
    return TCPStore(host, int(port), is_master=False, timeout=JOIN_TIMEOUT)


def _allow_connections(ranks: int) -> None:
    """Raise this process's limit of open files so that all ranks can connect to a store in it."""
    needed_files = CONNECTIONS * ranks + OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and needed_files > hard:
        raise ConfigError(
            f"ulimit -n {hard}: rank 0 needs {needed_files:,} open files for connections of {ranks:,} ranks; have the "
            "limit raised on its node."
        )
    if soft != resource.RLIM_INFINITY and needed_files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))


def _wait_for_address(file: Path) -> tuple[str, str]:
    """Return host and port of rank 0, once they are written.

    Thousands of ranks look, so each looks at longer and longer intervals, and at random so that they don't all look at
    once.
    """
    deadline, pause = time.monotonic() + JOIN_TIMEOUT.total_seconds(), LOOK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or empty
            host, port = file.read_text().split()
            return host, port
        time.sleep(pause * random.uniform(0.75, 1))
        pause = min(2 * pause, LONGEST_LOOK_SECONDS)
    raise RunError(f"rank 0 wrote no address into {file}; check that all nodes share this folder.")


def _find_host_name() -> str:
    """Return a name by which other nodes reach this one: $MASTER_ADDR, Slurm's name if it resolves, or the host's."""
    for name in (os.environ.get("MASTER_ADDR"), os.environ.get("SLURMD_NODENAME")):
        with contextlib.suppress(OSError):
            if name:
                socket.gethostbyname(name)
                return name
    return socket.gethostname()
