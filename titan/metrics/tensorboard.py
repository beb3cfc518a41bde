"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.metrics.tracker_run import extract_numbers, extract_scalars, flatten_settings


class TensorBoard:
    """Event files for TensorBoard; a resumed attempt purges the steps that it repeats."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Create the directory; the writer opens with the first record, whose step it needs.

        Args:
            directory: of the event files.
            settings: shown as hyperparameters.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        describe: Any = hparams
        self._start_summary, self._settings_summary, self._end_summary = describe(
            flatten_settings(settings), dict.fromkeys(HPARAM_METRICS, 0.0)
        )
        directory.mkdir(parents=True, exist_ok=True)
        self._open_writer: Callable[[int], Any] = lambda step: SummaryWriter(
            str(directory), purge_step=step, flush_secs=30
        )
        self._writer: Any = None
        self._step = 0

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record at its step; a record without a step is skipped."""
        if "step" not in record:
            return
        self._step = int(record["step"])
        if self._writer is None:
            self._writer = self._open_writer(self._step)
            self._add_summaries(self._start_summary, self._settings_summary)
        for name, value in extract_scalars(record).items():
            self._writer.add_scalar(name, value, self._step, walltime=record.get("time"))

    def _add_summaries(self, *summaries: Any) -> None:
        for summary in summaries:
            self._writer.file_writer.add_summary(summary)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final result as result/... at the last step and close the file."""
        if self._writer is not None:
            for name, value in extract_numbers(result).items():
                self._writer.add_scalar(f"result/{name}", value, self._step)
            if result.get("finished"):
                self._add_summaries(self._end_summary)
            self._writer.close()


HPARAM_METRICS = ("train/loss", "validation/loss", "train/tokens_per_second")
"""What TensorBoard shows beside the hyperparameters."""
