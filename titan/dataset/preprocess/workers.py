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
from multiprocessing.process import BaseProcess
from pathlib import Path

from titan.cluster.rank_error import name_signal
from titan.dataset.preprocess.encode import Encoder
from titan.dataset.preprocess.shard_job import (
    JobProgress,
    OnProgress,
    ShardJob,
    lock_file,
    read_finished_manifest,
    write_shard,
)
from titan.errors import ConfigError, RunError, describe_user_error
from titan.files import leases
from titan.files.platform import watch_parent

PROGRESS_SECONDS = 0.2
GRACE_SECONDS = 5.0


def run_shard_jobs(
    job: ShardJob, shards: Sequence[int], processes: int, on_progress: OnProgress, idle: Callable[[], None]
) -> None:
    """Run the shard jobs `shards` that no other process runs: in this process, or in several others.

    Args:
        shards: the numbers of the shards, the most urgent first.
        processes: the maximum number of processes; 1: this process.
        idle: called about every half a second while the processes work.

    Raises:
        ConfigError: the first error of any process.
        RunError: when a process died.
    """
    if processes == 1:
        work_on_shards(job, shards, on_progress)
        return
    with _start_workers(job, shards, processes) as children:
        while children:
            for ready in wait([*children, *(child.sentinel for child in children.values())], timeout=0.5):
                if isinstance(ready, Connection):
                    _receive_messages(ready, children, on_progress)
            for pipe in [pipe for pipe, child in children.items() if not child.is_alive()]:
                _receive_messages(pipe, children, on_progress)
            idle()


def work_on_shards(job: ShardJob, shards: Sequence[int], on_progress: OnProgress) -> None:
    """Run those shard jobs of `shards` in this process that are neither finished nor locked."""
    encoder: Encoder | None = None
    for shard in shards:
        lock = lock_file(job.folder, shard)
        with convert_cache_errors(job.folder):
            if read_finished_manifest(job.folder, shard) or not leases.acquire(lock):
                continue
            try:
                if not read_finished_manifest(job.folder, shard):
                    encoder = encoder or job.build_encoder()
                    with _refresh_lock(lock):
                        write_shard(job, encoder, shard, on_progress)
            finally:
                leases.release(lock)


@contextmanager
def convert_cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the cache's folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} can't be used ({error.strerror or error}: {error.filename or folder}): free space, "
            f"correct its permissions, or choose another folder with dataset.cache=FOLDER."
        ) from error


@contextmanager
def _refresh_lock(lock: Path) -> Iterator[None]:
    """Refresh `lock` every few seconds within the context."""
    ended = threading.Event()

    def refresh_until_ended() -> None:
        while not ended.wait(leases.TOUCH_SECONDS):
            leases.refresh(lock)

    thread = threading.Thread(target=refresh_until_ended, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _start_workers(job: ShardJob, shards: Sequence[int], processes: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Start worker processes, with the pipes of their progress; at the end, end them and remove their leftovers."""
    context, children = multiprocessing.get_context("spawn"), dict[Connection, SpawnProcess]()
    try:
        for _ in range(processes):
            pipe, child_pipe = context.Pipe()
            child = context.Process(target=_run_worker, args=(os.getpid(), child_pipe), daemon=True)
            children[pipe] = child
            child.start()
            child_pipe.close()
        for pipe in children:  # not as arguments: `start` would block if a process dies before it has read them
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((job, shards))
        yield children
    finally:
        end_processes(list(children.values()), GRACE_SECONDS)
        with contextlib.suppress(OSError):
            leases.remove_leftovers(job.folder)


def leave_signals_to(parent_pid: int) -> None:
    """Ignore SIGINT and SIGHUP in this process, which the parent handles, and end it when the parent ends."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_parent(parent_pid)


def end_processes(children: Sequence[BaseProcess], grace: float) -> None:
    """End processes, and kill those that have not ended after `grace` seconds."""
    alive = [child for child in children if child.pid is not None]
    for child in alive:
        child.terminate()
    deadline = time.monotonic() + grace
    for child in alive:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _receive_messages(pipe: Connection, children: dict[Connection, SpawnProcess], on_progress: OnProgress) -> None:
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
            raise RunError(_describe_exit(child.exitcode)) from None
        del children[pipe]


def _describe_exit(code: int) -> str:
    subject = "a process that prepares the data"
    if code < 0:
        memory = " (out of memory?)" if -code == signal.SIGKILL else ""
        return (
            f"{subject} was killed by {name_signal(-code)}{memory}; rerun the same command to continue, with fewer "
            f"processes by dataset.workers=N."
        )
    return (
        f"{subject} exited with code {code}; a script that prepares data must do so under "
        f'`if __name__ == "__main__":`, or with dataset.workers=1.'
    )


def _run_worker(parent_pid: int, pipe: Connection) -> None:
    """Run in a worker process."""
    leave_signals_to(parent_pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        job, shards = pipe.recv()
        work_on_shards(job, shards, _throttle_progress(pipe))
    except Exception as error:
        if (user_error := describe_user_error(error)) is None:
            pipe.send(RuntimeError(f"in a process that prepares the data:\n{traceback.format_exc()}"))
        else:
            code, sentence = user_error
            pipe.send(ConfigError(sentence) if code == 2 else RunError(sentence))


def _throttle_progress(pipe: Connection) -> OnProgress:
    """Send progress at most five times a second."""
    last_sent = [0.0]

    def on_progress(progress: JobProgress) -> None:
        current = time.monotonic()
        if current - last_sent[0] >= PROGRESS_SECONDS:
            last_sent[0] = current
            pipe.send(progress)

    return on_progress
