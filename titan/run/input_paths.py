"""The files and folders of this machine that a run reads, looked for before it starts or is handed over. Torch-free."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from titan.console.text import is_url
from titan.dataset.schema import Chat, Jsonl, Parquet, Prepared, Text
from titan.run.run import Run

FILE_DATASETS = (Chat, Jsonl, Parquet, Prepared, Text)
"""Datasets whose path is a file, a folder, a glob or a URL."""


def find_missing_input(run: Run) -> str | None:
    """Return the first setting of a run that names no file or folder of this machine, as typed; None where all do."""
    for key, path in _list_inputs(run):
        if path and not is_url(path) and not glob.has_magic(path) and not os.path.exists(os.path.expanduser(path)):
            return f"{key}={path}"
    return None


def _list_inputs(run: Run) -> Iterator[tuple[str, str | None]]:
    """Yield the settings that name an input, with their values."""
    yield "checkpoint.resume", run.checkpoint.resume
    for name, corpus in run.dataset.corpora().items():
        if isinstance(corpus, FILE_DATASETS):
            yield "dataset.path" if corpus is run.dataset else f"dataset.sources.{name}.path", corpus.path
