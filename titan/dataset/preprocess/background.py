"""Prepare data while a run trains on them, in one process for all incomplete corpora.

The process adds finished shards to the folder that the training reads. When the training ends first, the next attempt
or `python -m titan.prepare` continues the preparation.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from titan.dataset.corpora import Folders, open_corpora
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.preprocess.writer import write_json
from titan.dataset.schema import Dataset
from titan.errors import ConfigError, RunError
from titan.files.platform import watch_parent

NICENESS = 10
WATCH_SECONDS = 0.25
GRACE_SECONDS = 10.0


@contextmanager
def prepared_meanwhile(dataset: Dataset, folders: Folders, log: Path) -> Iterator[None]:
    """Prepare the incomplete corpora of `dataset` in a process that ends with this context."""
    incomplete = [settings for name, settings in dataset.corpora().items() if not open_corpora(folders)[name].complete]
    if not incomplete:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_corpora, args=(incomplete, str(log), os.getpid())
    )
    process.start()
    ended = threading.Event()
    watcher = threading.Thread(target=_record_failure, args=(process, ended, folders), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        process.terminate()
        process.join(GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _record_failure(process: BaseProcess, ended: threading.Event, folders: Folders) -> None:
    """When the process ends early, write failed.json for the ranks that wait for its data."""
    while process.is_alive():
        if ended.wait(WATCH_SECONDS):
            return
    for corpus in open_corpora(folders).values():
        failure_file = corpus.folder / "failed.json"
        if not corpus.complete and not failure_file.exists():
            code = process.exitcode or 0
            outcome = f"was killed by signal {-code}" if code < 0 else "ended"
            write_json(
                failure_file,
                {"error": f"the preparing process {outcome}; see log/prepare.log, and start the run again"},
            )


def _prepare_corpora(datasets: list[Dataset], log: str, parent_pid: int) -> None:
    """Run in the process: ignore SIGINT and SIGHUP, which the parent handles, and exit when the parent does.

    Its priority is lower than the training's.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_parent(parent_pid)
    os.nice(NICENESS)
    with open(log, "a", buffering=1) as file:
        try:
            for dataset in datasets:
                prepare(dataset, lambda line: print(line, file=file))
        except (ConfigError, RunError) as error:
            print(error, file=file)
        except KeyboardInterrupt:
            print("stopped with the training", file=file)
