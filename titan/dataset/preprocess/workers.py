"""The processes of a preparation: each takes units that no one else has claimed, until there are none left."""

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
from titan.dataset.preprocess.shard_job import Job, Tell, Told, claim_file, finished, make
from titan.errors import ConfigError, RunError
from titan.files import leases

TELL_SECONDS = 0.2
WATCH_SECONDS = 0.25
GRACE_SECONDS = 5.0


def run(job: Job, units: Sequence[int], processes: int, tell: Tell, idle: Callable[[], None]) -> None:
    """Work on those of `units` that no one else does: in this process, or in several others.

    Args:
        job: what is prepared.
        units: which are wanted, the most urgent first.
        processes: how many at most; one is this one.
        tell: hears how far each unit is.
        idle: called every half a second or so while others work.

    Raises:
        ConfigError: the first one of any process.
        RunError: when a process died.
    """
    if processes == 1:
        work(job, units, tell)
        return
    with _started(job, units, processes) as children:
        while children:
            for ready in wait([*children, *(child.sentinel for child in children.values())], timeout=0.5):
                if isinstance(ready, Connection):
                    _hear(ready, children, tell)
            for pipe in [pipe for pipe, child in children.items() if not child.is_alive()]:
                _hear(pipe, children, tell)
            idle()


def work(job: Job, units: Sequence[int], tell: Tell) -> None:
    """Make those of `units` that are not finished and not claimed, in this process.

    Raises:
        ConfigError: when the source can't be read or the folder can't be written.
    """
    encoder: Encoder | None = None
    for unit in units:
        claim = claim_file(job.folder, unit)
        with cache_errors(job.folder):
            if finished(job.folder, unit) or not leases.acquire(claim):
                continue
            try:
                if not finished(job.folder, unit):
                    encoder = encoder or job.encoder()
                    with _touched(claim):
                        make(job, encoder, unit, tell)
            finally:
                leases.release(claim)


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Say of a folder that can't be written that it can't."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} can't be used ({error.strerror or error}: {error.filename or folder}): free space or "
            f"mend its permissions, or name another folder with dataset.cache=FOLDER."
        ) from error


@contextmanager
def _touched(claim: Path) -> Iterator[None]:
    """Touch `claim` every few seconds meanwhile."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(leases.TOUCH_SECONDS):
            leases.refresh(claim)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _started(job: Job, units: Sequence[int], processes: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Processes that work, with the pipes that they tell through; in the end there are none, nor anything of theirs."""
    context, children = multiprocessing.get_context("spawn"), dict[Connection, SpawnProcess]()
    try:
        for _ in range(processes):
            pipe, end = context.Pipe()
            child = context.Process(target=_child, args=(os.getpid(), end), daemon=True)
            children[pipe] = child
            child.start()
            end.close()
        for pipe in children:  # not as arguments: of these `start` would wait for a process that is dead to read more
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


def _hear(pipe: Connection, children: dict[Connection, SpawnProcess], tell: Tell) -> None:
    """Take what a process has told, and let go of one that has ended well."""
    try:
        while pipe.poll():
            word = pipe.recv()
            if isinstance(word, Told):
                tell(word)
            else:
                raise word
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
            f"{what} was killed by {name}{memory}; the same command goes on where it was, with fewer processes by "
            f"dataset.workers=N."
        )
    return (
        f"{what} ended with exit code {code}; a script that prepares data must do so below "
        f'`if __name__ == "__main__":`, or with dataset.workers=1.'
    )


def _child(parent: int, pipe: Connection) -> None:
    """The body of a process. Ctrl-C, or a terminal that hangs up, is for its parent, without which it doesn't go on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        job, units = pipe.recv()
        work(job, units, _seldom(pipe))
    except (ConfigError, RunError) as sentence:
        pipe.send(type(sentence)(str(sentence)))
    except Exception:
        pipe.send(RuntimeError(f"in a process that prepares the data:\n{traceback.format_exc()}"))


def _seldom(pipe: Connection) -> Tell:
    """Send a few times a second only."""
    told = [0.0]

    def tell(word: Told) -> None:
        now = time.monotonic()
        if now - told[0] >= TELL_SECONDS:
            told[0] = now
            pipe.send(word)

    return tell


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
