"""Runs at trackio, in local files or at a Space of Hugging Face.

trackio knows a run by its name, so the name ends in the run's id, and a resumed attempt continues it. It deletes no
values: the steps that a resumed attempt repeats have two.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan.metrics.schema import TRACKIO_DIRECTORY, Trackio
from titan.metrics.tracker_run import RunDescription, Warn, extract_numbers, extract_scalars, flatten_settings


class TrackioRun:
    """A run at trackio, opened with the run's settings as its configuration."""

    def __init__(self, settings: Trackio, directory: Path, description: RunDescription, warn: Warn) -> None:
        """Create the run, or continue that of an earlier attempt.

        Args:
            directory: the run's directory; trackio/ in it has the files where no folder is named.

        Raises:
            OSError: when the folder can't be written to.
        """
        folder = settings.choose_folder(directory)
        _check_folder(folder)
        trackio = _import_trackio(folder, warn)
        self._step = 0
        self._run: Any = trackio.init(
            project=settings.project,
            name=f"{description.name}-{description.run_id}",
            group=settings.group or description.group_id,
            space_id=settings.space,
            private=settings.private,
            config={**flatten_settings(description.metadata), "titan.run_id": description.run_id},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record at its step; a record without a step is skipped."""
        if "step" in record:
            self._step = int(record["step"])
            self._run.log(extract_scalars(record), step=self._step)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the final result as result/... at the last step, and end the run."""
        if numbers := extract_numbers(result):
            self._run.log({f"result/{name}": value for name, value in numbers.items()}, step=self._step)
        self._run.finish()


def _check_folder(folder: Path) -> None:
    """Create the folder; raise OSError where it can't be written to, for which trackio would only warn each time."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} can't be written to")


def _import_trackio(folder: Path, warn: Warn) -> Any:
    """Return the module, which prints nothing and writes to a folder, unless it was imported for another before."""
    with _set_variable(TRACKIO_DIRECTORY, str(folder)):
        import trackio

    if Path(trackio.TRACKIO_DIR).absolute() != folder:
        warn(f"trackio was imported before with {trackio.TRACKIO_DIR}: it writes there, not to {folder}.")
    for name in ("trackio", "trackio.run", "trackio.utils"):
        vars(sys.modules[name])["print"] = _print_nothing  # its messages would break the progress line
    return trackio


@contextlib.contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a moment: the next run in this process chooses by the user's value."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def _print_nothing(*values: object, **options: object) -> None:
    """Take the place of `print` in trackio's modules."""
