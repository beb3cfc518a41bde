"""The worker processes of a preparation: each runs shard jobs that no other process has locked, until all are done."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from titan.dataset.preprocess.encode import Encoder
from titan.dataset.preprocess.shard_job import Job, JobProgress, OnProgress, finished, lock_file, make
from titan.errors import ConfigError, RunError
from titan.files import leases

PROGRESS_SECONDS = 0.2
WATCH_SECONDS = 0.25
GRACE_SECONDS = 5.0


def run(job: Job, units: Sequence[int], processes: int, on_progress: OnProgress, idle: Callable[[], None]) -> None:
    """Run the shard jobs `units` that no other process runs: in this process, or in several others.

    Args:
        job: the input of the shard jobs.
        units: the numbers of the shards, the most urgent first.
        processes: the maximum number of processes; 1: this process.
        on_progress: called with the progress of each shard job.
        idle: called about every half a second while the processes work.

    Raises:
        ConfigError: the first error of any process.
        RunError: when a process died.
    """
    if processes == 1:
        work(job, units, on_progress)
        return
    with _started(job, units, processes) as children:
        while children:
            for ready in wait([*children, *(child.sentinel for child in children.values())], timeout=0.5):
                if isinstance(ready, Connection):
                    _receive(ready, children, on_progress)
            for pipe in [pipe for pipe, child in children.items() if not child.is_alive()]:
                _receive(pipe, children, on_progress)
            idle()


def work(job: Job, units: Sequence[int], on_progress: OnProgress) -> None:
    """Run those shard jobs of `units` in this process that are neither finished nor locked.

    Raises:
        ConfigError: when the source can't be read or the folder can't be written.
    """
    encoder: Encoder | None = None
    for shard in units:
        lock = lock_file(job.folder, shard)
        with cache_errors(job.folder):
            if finished(job.folder, shard) or not leases.acquire(lock):
                continue
            try:
                if not finished(job.folder, shard):
                    encoder = encoder or job.encoder()
                    with _refreshed(lock):
                        make(job, encoder, shard, on_progress)
            finally:
                leases.release(lock)


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the cache's folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} can't be used ({error.strerror or error}: {error.filename or folder}): free space, "
            f"correct its permissions, or choose another folder with dataset.cache=FOLDER."
        ) from error


@contextmanager
def _refreshed(lock: Path) -> Iterator[None]:
    """Refresh `lock` every few seconds within the context."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(leases.TOUCH_SECONDS):
            leases.refresh(lock)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _started(job: Job, units: Sequence[int], processes: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Start worker processes, with the pipes of their progress; at the end, end them and remove their leftovers."""
    context, children = multiprocessing.get_context("spawn"), dict[Connection, SpawnProcess]()
    try:
        for _ in range(processes):
            pipe, end = context.Pipe()
            child = context.Process(target=_child, args=(os.getpid(), end), daemon=True)
            children[pipe] = child
            child.start()
            end.close()
        for pipe in children:  # not as arguments: `start` would block if a process dies before it has read them
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((job, units))
        yield children
    finally:
        _end(list(children.values()))
        with contextlib.suppress(OSError):
            leases.remove_leftovers(job.folder)


def _end(children: Sequence[SpawnProcess]) -> None:
    alive = [child for child in children if child.pid is not None]
    for child in alive:
        child.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for child in alive:
        child.join(max(0.0, until - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _receive(pipe: Connection, children: dict[Connection, SpawnProcess], on_progress: OnProgress) -> None:
    """Receive a process's messages; raise its error, and forget it once it has exited with code 0."""
    try:
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, JobProgress):
                on_progress(message)
            else:
                raise message
    except (EOFError, ConnectionResetError):
        child = children[pipe]
        child.join()
        if child.exitcode:
            raise RunError(_death(child.exitcode)) from None
        del children[pipe]


def _death(code: int) -> str:
    what = "a process that prepares the data"
    if code < 0:
        memory = " (out of memory?)" if -code == signal.SIGKILL else ""
        name = signal.Signals(-code).name
        return (
            f"{what} was killed by {name}{memory}; rerun the same command to continue, with fewer processes by "
            f"dataset.workers=N."
        )
    return (
        f"{what} exited with code {code}; a script that prepares data must do so under "
        f'`if __name__ == "__main__":`, or with dataset.workers=1.'
    )


def _child(parent: int, pipe: Connection) -> None:
    """Run in a worker process: ignore SIGINT and SIGHUP, which the parent handles, and exit when the parent does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        job, units = pipe.recv()
        work(job, units, _throttled(pipe))
    except (ConfigError, RunError) as error:
        pipe.send(type(error)(str(error)))
    except Exception:
        pipe.send(RuntimeError(f"in a process that prepares the data:\n{traceback.format_exc()}"))


def _throttled(pipe: Connection) -> OnProgress:
    """Send progress at most five times a second."""
    sent = [0.0]

    def on_progress(progress: JobProgress) -> None:
        now = time.monotonic()
        if now - sent[0] >= PROGRESS_SECONDS:
            sent[0] = now
            pipe.send(progress)

    return on_progress


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
