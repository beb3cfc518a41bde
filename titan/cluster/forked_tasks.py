"""Calls of a function on many inputs, each in a separate process that is forked from this one, a few at a time.

A pool of `multiprocessing` with one task per process can't do this. Its handler thread forks the later processes; the
kernel kills those when that thread ends (`die_with_parent` counts threads), and one killed while it holds the pool's
lock blocks the pool's end for ever. A pool also waits for ever for a task whose process was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from titan.files.platform import START_METHOD, die_with_parent

T = TypeVar("T")


class ForkedTaskError(Exception):
    """A process ended without a result, or the time was over."""


def map_in_forks(
    function: Callable[..., T], inputs: Sequence[tuple[Any, ...]], workers: int, timeout: float
) -> list[T]:
    """Return `function(*input)` of each input, in order. No process outlives the call or this process.

    Args:
        function: called in a forked process; its result and its exceptions are pickled.
        timeout: seconds for all of them together.

    Raises:
        ForkedTaskError: a process was killed, or the time was over.
        Exception: what the first failed call raised.
    """
    deadline, waiting = time.monotonic() + timeout, list(enumerate(inputs))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    results: dict[int, T] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                index, arguments = waiting.pop(0)
                reader, process = _start(function, arguments)
                running[reader] = index, process
            ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ForkedTaskError(f"no result within {timeout:g} s")
            for reader in [reader for reader in running if reader in ready]:
                index, process = running.pop(reader)
                results[index] = _receive(reader, process)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return [results[index] for index in range(len(inputs))]


def _start(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    context: Any = multiprocessing.get_context(START_METHOD)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_be_task, args=(function, arguments, writer, os.getpid()), daemon=True)
    process.start()
    writer.close()  # so that the reader sees the end of a killed process
    return reader, process


def _receive(reader: Connection, process: BaseProcess) -> Any:
    try:
        error, result = reader.recv()
    except EOFError:
        process.join()
        raise ForkedTaskError(f"the process ended with code {process.exitcode}") from None
    finally:
        reader.close()
    process.join()
    if error is not None:
        raise error
    return result


def _be_task(function: Callable[..., Any], arguments: tuple[Any, ...], writer: Connection, parent: int) -> None:
    """Call the function with one thread, and send its result or its exception."""
    import torch

    die_with_parent(parent)
    torch.set_num_threads(1)
    error, result = None, None
    try:
        result = function(*arguments)
    except Exception as raised:
        error = raised
    writer.send((error, result))
    writer.close()
