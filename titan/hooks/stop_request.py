"""A hook that ends its run when a file in the run's directory asks for it: on any machine that has the directory.

A sweeper that runs beside the trial writes the file. It stays, so that a run that was killed before it could end does
so when it is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan.files.atomic import write_atomic
from titan.files.run_directory import STOP_REQUEST
from titan.hooks.schema import Hook

if TYPE_CHECKING:
    from titan.hooks.context import Context


def request_stop(directory: Path, reason: str) -> None:
    """Ask the run in a directory to end; `reason` is one line."""
    write_atomic(directory / STOP_REQUEST, f"{reason}\n")


def withdraw_request(directory: Path) -> None:
    """Remove an earlier request."""
    (directory / STOP_REQUEST).unlink(missing_ok=True)


class StopRequestReader:
    """Looks for the file after each step, on rank 0."""

    def on_step_end(self, context: Context) -> None:
        """End the run where there is a request."""
        file = context.directory / STOP_REQUEST
        if context.rank == 0 and file.exists():
            context.stop(file.read_text(errors="replace").strip() or "asked to end")


@dataclass(frozen=True, kw_only=True)
class StopOnRequest(Hook):
    """Settings of the hook: it has none."""

    def build(self) -> StopRequestReader:
        """Return the reader of requests."""
        return StopRequestReader()
