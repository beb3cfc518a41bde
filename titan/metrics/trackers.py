"""Trackers: services that show what metrics.jsonl records.

`metrics.tensorboard` and `metrics.wandb` ask for two of them, `metrics.trackers` for those of other classes
(`titan.metrics.schema.Tracker`), among them MLflow, trackio and a user's own.

Each tracker runs in its own thread, fed by a queue: the training thread only puts records into the queue. When a
tracker raises, at opening or later, it is dropped with one warning; a tracker that hangs is abandoned at the end after
a bounded wait. So no tracker ends or stalls a run. Warnings are shown from the training thread, at its next call.

The trackers' own asynchrony does not replace this thread: while the disk hangs, TensorBoard's writer blocks at opening
and once its queue of ten events is full, and wandb, which sends in another process, blocks in `init` and `finish` while
its server does not answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from titan.files.environment import set_variables
from titan.metrics.mlflow import MLflowRun
from titan.metrics.schema import TRACKIO_DIRECTORY, Metrics, MLflow, Tracker, Trackio
from titan.metrics.tracker_run import (
    RunDescription,
    TrackerRun,
    Warn,
    check_writable,
    extract_numbers,
    extract_scalars,
    flatten_settings,
    hide_in_labels,
    summarise_error,
)
from titan.metrics.wandb import WeightsAndBiases, build_wandb_options


class TrackioRun:
    """A run at trackio, in local files or at a Space, opened with the run's settings as its configuration.

    trackio knows a run by its name, so the name ends in the run's id, and a resumed attempt continues it. It deletes no
    values: the steps that a resumed attempt repeats have two.
    """

    def __init__(self, settings: Trackio, directory: Path, description: RunDescription, warn: Warn) -> None:
        """Create the run, or continue that of an earlier attempt.

        Args:
            directory: the run's directory; trackio/ in it has the files where no folder is named.
        """
        folder = settings.choose_folder(directory)
        check_writable(folder)  # trackio would only warn each time
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


def _import_trackio(folder: Path, warn: Warn) -> Any:
    """Return the module, which prints nothing and writes to a folder, unless it was imported for another before."""
    with set_variables({TRACKIO_DIRECTORY: str(folder)}):  # the next run in this process chooses by the user's value
        import trackio

    if Path(trackio.TRACKIO_DIR).absolute() != folder:
        warn(f"trackio was imported before with {trackio.TRACKIO_DIR}: it writes there, not to {folder}.")
    for name in ("trackio", "trackio.run", "trackio.utils"):
        # its messages would break the progress line
        vars(sys.modules[name])["print"] = lambda *values, **options: None
    return trackio


MAX_QUEUED_RECORDS = 10_000
"""The number of records in a slow tracker's queue at which it is dropped."""
PATIENCE_SECONDS = 20.0
"""Seconds that the end of a run waits for its trackers; W&B may take longer where the run is finished."""
NOTICE_SECONDS = 5.0
"""Seconds of waiting after which the user is warned."""

Opener = Callable[[Warn], TrackerRun]
"""Opens a tracker; its argument shows a warning from the training thread."""


class Trackers:
    """Several trackers as one that never raises and never blocks for long."""

    def __init__(
        self,
        openers: Mapping[str, Opener],
        warn: Warn,
        patience: float = PATIENCE_SECONDS,
        longer_patience: Mapping[str, float] | None = None,
    ) -> None:
        """Start opening the trackers in the background.

        Args:
            openers: by the setting that asks for the tracker, for warnings.
            warn: shows a sentence to the user; only called from the thread that calls `log` and `finish`.
            patience: seconds that `finish` waits for a tracker.
            longer_patience: the same for single trackers, unless in a hurry.
        """
        self._warn, self._patience, self._longer_patience = warn, patience, longer_patience or {}
        self._workers = [_TrackerThread(name, opener) for name, opener in openers.items()]

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a record for every tracker."""
        for worker in self._workers:
            worker.put_call(("log", dict(record)))
        self._show_warnings()

    def finish(self, result: Mapping[str, Any], *, hurry: bool = False) -> None:
        """Queue the final result for every tracker, and wait for a limited time until they have closed.

        Args:
            result: the content of result.json.
            hurry: whether a signal or an error ended the run, so that none may take longer.
        """
        start = time.monotonic()
        for worker in self._workers:
            worker.put_call(("finish", dict(result)))
        for worker in self._workers:
            patience = self._patience if hurry else self._longer_patience.get(worker.name, self._patience)
            if patience > NOTICE_SECONDS and not worker.join_until(start + NOTICE_SECONDS):
                self._warn(f"{worker.name}: it is still sending; the run waits {patience:g} s at most.")
            if not worker.join_until(start + patience):
                worker.drop_tracker(f"it did not close within {patience:g} s of the end of the run")
        self._show_warnings()
        self._workers = []

    def _show_warnings(self) -> None:
        """Show the workers' warnings, and drop those that failed."""
        for worker in self._workers:
            while not worker.warnings.empty():
                self._warn(worker.warnings.get())
        self._workers = [worker for worker in self._workers if not worker.failed]


class _TrackerThread:
    """A tracker in its own thread, a daemon thread so that it can't keep the process alive."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.failed = False
        self.name = name
        self._calls: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MAX_QUEUED_RECORDS)
        self.warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, args=(opener,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put_call(self, call: tuple[str, dict[str, Any]]) -> None:
        """Queue a call: the tracker's method and its argument."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.drop_tracker(f"its queue is full ({MAX_QUEUED_RECORDS} records)")

    def join_until(self, deadline: float) -> bool:
        """Wait for the thread's end until a time of the monotonic clock; return whether it came, or a failure."""
        if not self.failed:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.failed or not self._thread.is_alive()

    def _run_calls(self, opener: Opener) -> None:
        try:
            tracker, method = opener(self.warnings.put), ""
            while method != "finish" and not self.failed:
                method, argument = self._calls.get()
                getattr(tracker, method)(argument)
        except BaseException as error:  # SystemExit too must be reported
            if not self.failed:
                self.drop_tracker(summarise_error(error))

    def drop_tracker(self, reason: str) -> None:
        """Leave the tracker out from now on, with a warning."""
        self.failed = True
        self.warnings.put(f"{self.name}: {reason}; the run continues without it.")


def open_trackers(metrics: Metrics, *, directory: Path, description: RunDescription, warn: Warn) -> Trackers:
    """Open the trackers that the settings ask for.

    Args:
        directory: the run's directory; trackers write to folders in it, such as tensorboard/ and wandb/.
    """
    openers, longer_patience = dict[str, Opener](), dict[str, float]()
    metrics = hide_in_labels(metrics)

    def add_opener(setting: str, packages: Mapping[str, str], finish_minutes: float | None, opener: Opener) -> None:
        if missing := _list_missing(packages):
            names = " ".join(missing)
            warn(f"{setting}: the package {names} is not installed (pip install {names}); continuing without it.")
            return
        openers[setting] = opener
        if finish_minutes is not None:
            longer_patience[setting] = 60 * finish_minutes

    if metrics.tensorboard:
        folder = directory / "tensorboard"
        packages = {"tensorboard": "tensorboard"}
        add_opener("metrics.tensorboard=true", packages, None, lambda _: TensorBoard(folder, description.metadata))
    if metrics.wandb:
        add_opener(
            "metrics.wandb=true",
            {"wandb": "wandb"},
            metrics.wandb_finish_minutes,
            lambda warn: WeightsAndBiases(metrics, directory, build_wandb_options(metrics, description), warn),
        )
    for name, tracker in (metrics.trackers or {}).items():
        open_run = partial(_open_run, hide_in_labels(tracker), directory, description)
        add_opener(f"metrics.trackers.{name}", tracker.packages, tracker.finish_minutes, open_run)
    return Trackers(openers, warn, longer_patience=longer_patience)


def _open_run(tracker: Tracker, directory: Path, description: RunDescription, warn: Warn) -> TrackerRun:
    own: Callable[..., TrackerRun] = type(tracker).build  # a class that derives from MLflow may have another one
    openers: dict[Any, Callable[..., TrackerRun]] = {MLflow.build: MLflowRun, Trackio.build: TrackioRun}
    return openers.get(own, own)(tracker, directory, description, warn)


def find_viewers(metrics: Metrics, directory: Path) -> dict[str, str]:
    """Return the commands that show, or send, what trackers have written."""
    viewers: dict[str, str | None] = {}
    if metrics.tensorboard and _is_installed("tensorboard"):
        viewers["tensorboard"] = f"tensorboard --logdir {shlex.quote(str(directory / 'tensorboard'))}"
    if metrics.wandb and metrics.wandb_mode == "offline" and _is_installed("wandb"):
        viewers["wandb"] = f"wandb sync {shlex.quote(str(directory / 'wandb'))}/offline-run-*"
    for name, tracker in (metrics.trackers or {}).items():
        with contextlib.suppress(Exception):  # a user's code, at the end of a run that has succeeded
            viewers[name] = None if _list_missing(tracker.packages) else tracker.find_viewer(directory)
    return {name: command for name, command in viewers.items() if command is not None}


def _list_missing(packages: Mapping[str, str]) -> list[str]:
    """Return what pip would install: the packages that this Python lacks."""
    return [name for package, name in packages.items() if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    """Whether a package is installed; a namespace folder of that name, such as a run's wandb/, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


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
        *self._start, self._end = describe(flatten_settings(settings), dict.fromkeys(HPARAM_METRICS, 0.0))
        directory.mkdir(parents=True, exist_ok=True)
        self._open_writer: Any = partial(SummaryWriter, str(directory), flush_secs=30)
        self._writer: Any = None
        self._step = 0

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record at its step; a record without a step is skipped."""
        if "step" not in record:
            return
        self._step = int(record["step"])
        if self._writer is None:
            self._writer = self._open_writer(purge_step=self._step)
            for summary in self._start:
                self._writer.file_writer.add_summary(summary)
        for name, value in extract_scalars(record).items():
            self._writer.add_scalar(name, value, self._step, walltime=record.get("time"))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final result as result/... at the last step and close the file."""
        if self._writer is not None:
            for name, value in extract_numbers(result).items():
                self._writer.add_scalar(f"result/{name}", value, self._step)
            if result.get("finished"):
                self._writer.file_writer.add_summary(self._end)
            self._writer.close()


HPARAM_METRICS = ("train/loss", "validation/loss", "train/tokens_per_second")
"""What TensorBoard shows beside the hyperparameters."""
