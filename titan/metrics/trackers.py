"""Trackers: services that show what metrics.jsonl records, here TensorBoard and Weights & Biases.

Each tracker runs in its own thread, fed by a queue: the training thread only puts records into the queue. When a
tracker raises, at opening or later, it is dropped with one warning; a tracker that hangs is abandoned at the end after
a bounded wait. So no tracker ends or stalls a run. Warnings are shown from the training thread, at its next call.

The trackers' own asynchrony does not replace this thread: while the disk hangs, TensorBoard's writer blocks at opening
and once its queue of ten events is full, and wandb, which sends in another process, blocks in `init` and `finish` while
its server does not answer.
"""

from __future__ import annotations

import http.client
import importlib.util
import netrc
import numbers
import os
import queue
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from titan.config.settings import format_value
from titan.console.text import redact
from titan.hooks.schema import METRIC_PREFIX
from titan.metrics.schema import Metrics

Warn = Callable[[str], None]

MAX_QUEUED_RECORDS = 10_000
"""The number of records in a slow tracker's queue at which it is dropped."""
PATIENCE_SECONDS = 20.0
"""Seconds that the end of a run waits for its trackers; W&B may take longer where the run is finished."""
NOTICE_SECONDS = 5.0
"""Seconds of waiting after which the user is warned."""
MAX_TAG_LENGTH = 64
"""Characters of a tag that W&B accepts."""
INIT_SECONDS = 10.0
"""wandb's timeout for starting a run; without a network it fails after about three times this."""

WANDB_URL = "https://api.wandb.ai"


class Tracker(Protocol):
    """Shows records; it may raise and block."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Take the final result and close; nothing follows."""


Opener = Callable[[Warn], Tracker]
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
            worker.wait_or_fail(start + patience, patience)
        self._show_warnings()
        self._workers = []

    def _show_warnings(self) -> None:
        """Show the workers' warnings, and drop those that failed."""
        for worker in self._workers:
            for warning in worker.take_warnings():
                self._warn(warning)
        self._workers = [worker for worker in self._workers if not worker.failed]


class _TrackerThread:
    """A tracker in its own thread, a daemon thread so that it can't keep the process alive."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.failed = False
        self.name = name
        self._calls: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MAX_QUEUED_RECORDS)
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, args=(opener,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put_call(self, call: tuple[str, dict[str, Any]]) -> None:
        """Queue a call: the tracker's method and its argument."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop_tracker(f"its queue is full ({MAX_QUEUED_RECORDS} records)")

    def join_until(self, deadline: float) -> bool:
        """Wait for the thread's end until a time of the monotonic clock; return whether it came, or a failure."""
        if not self.failed:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.failed or not self._thread.is_alive()

    def wait_or_fail(self, deadline: float, patience: float) -> None:
        """Wait for the thread's end; a tracker that is still busy at the deadline has failed."""
        if not self.join_until(deadline):
            self._drop_tracker(f"it did not close within {patience:g} s of the end of the run")

    def take_warnings(self) -> Iterator[str]:
        """Yield the warnings since the last call."""
        while not self._warnings.empty():
            yield self._warnings.get()

    def _run_calls(self, opener: Opener) -> None:
        try:
            tracker, method = opener(self._warnings.put), ""
            while method != "finish" and not self.failed:
                method, argument = self._calls.get()
                getattr(tracker, method)(argument)
        except BaseException as error:  # SystemExit too must be reported
            if not self.failed:
                self._drop_tracker(_summarise_error(error))

    def _drop_tracker(self, reason: str) -> None:
        self.failed = True
        self._warnings.put(f"{self.name}: {reason}; the run continues without it.")


def _summarise_error(error: BaseException) -> str:
    text = hide_secrets(str(error)).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What trackers show of a run beside its records.

    Attributes:
        run_id: the same in every attempt of a run, so that a resumed run continues the same tracker run.
        group_id: shared by the seeds of one experiment.
        name: the run's display name.
        config: the resolved settings as plain containers; values that look like secrets are left out.
        facts: what identifies the run: choices, kinds, ids, commit, data, parameters, sweep and variant.
        sweep: the name of its sweep, if any.
    """

    run_id: str
    group_id: str
    name: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """Settings and facts, without secrets."""
        return remove_secrets({**self.config, **self.facts})


def open_trackers(metrics: Metrics, *, directory: Path, description: RunDescription, warn: Warn) -> Trackers:
    """Open the trackers that the settings ask for.

    Args:
        metrics: the settings.
        directory: the run's directory; trackers write to tensorboard/ and wandb/ in it.
        description: the run.
        warn: shows a sentence to the user.
    """
    requested: dict[str, tuple[str, Opener]] = {}
    if metrics.tensorboard:
        requested["metrics.tensorboard=true"] = (
            "tensorboard",
            lambda _: TensorBoard(directory / "tensorboard", description.metadata),
        )
    if metrics.wandb:
        requested["metrics.wandb=true"] = (
            "wandb", lambda show: WeightsAndBiases(metrics, directory, build_wandb_options(metrics, description), show),
        )  # fmt: skip
    openers = {}
    for setting, (package, opener) in requested.items():
        if _is_installed(package):
            openers[setting] = opener
        else:
            warn(f"{setting}: the package {package} is not installed (pip install {package}); continuing without it.")
    return Trackers(openers, warn, longer_patience={"metrics.wandb=true": 60 * metrics.wandb_finish_minutes})


def build_wandb_options(metrics: Metrics, description: RunDescription) -> dict[str, Any]:
    """Return what describes a run to wandb.init."""
    tags = dict.fromkeys([*metrics.wandb_tags, *([description.sweep] if description.sweep else [])])
    return {
        "id": description.run_id,
        "group": metrics.wandb_group or description.group_id,
        "name": description.name,
        "tags": [tag[:MAX_TAG_LENGTH] for tag in tags],
        "config": description.metadata,
    }


def _is_installed(package: str) -> bool:
    """Whether a package is installed; a namespace folder of that name, such as a run's wandb/, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


NO_CURVES = ("step", "time", "attempt")
"""Numbers of a record that are no measurements."""


def extract_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under their names in a tracker: train/loss, validation/loss, hooks/NAME/METRIC.

    Lists, strings and booleans are left out, and so are the step, which is the axis, the attempt, which is no
    measurement, and the time, which trackers record themselves: TensorBoard's values are fp32, in which a time is known
    to two minutes.
    """
    validation = "validation_loss" in record and "loss" not in record
    scalars = {}
    for key, value in record.items():
        if key not in NO_CURVES and isinstance(value, numbers.Real) and not isinstance(value, bool):
            short_name = key.removeprefix("validation_")
            group = "validation" if validation or short_name != key else "train"
            scalars[key if key.startswith(METRIC_PREFIX) else f"{group}/{short_name}"] = float(value)
    return scalars


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
            for name, value in _extract_numbers(result).items():
                self._writer.add_scalar(f"result/{name}", value, self._step)
            if result.get("finished"):
                self._add_summaries(self._end_summary)
            self._writer.close()


HPARAM_METRICS = ("train/loss", "validation/loss", "train/tokens_per_second")
"""What TensorBoard shows beside the hyperparameters."""


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings by dotted names, values that are no scalars as text."""
    flat_settings: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat_settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat_settings[f"{prefix}{key}"] = (
                value if isinstance(value, (bool, int, float, str)) else format_value(value)
            )
    return flat_settings


class WeightsAndBiases:
    """A run at Weights & Biases, or its files for a later `wandb sync`."""

    def __init__(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], warn: Warn) -> None:
        """Open the run; offline, with a warning, where online was asked for but is not possible.

        Args:
            metrics: project, entity and mode.
            directory: where wandb/ is created.
            settings: see `build_wandb_options`.
            warn: shows a sentence to the user.

        Raises:
            OSError: when the directory can't be written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise OSError(f"{directory} can't be written to")  # wandb would silently write to /tmp
        run = self._start_online(metrics, directory, settings, warn) if metrics.wandb_mode == "online" else None
        self._run: Any = run or _start_wandb(metrics, directory, settings, "offline")
        self._run.config.update(settings["config"], allow_val_change=True)  # a resumed run has its first attempt's
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _start_online(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], warn: Warn) -> Any:
        """Return the online run; None, with a warning, where that is not possible."""
        obstacle = find_online_obstacle()
        if not obstacle:
            try:
                return _start_wandb(metrics, directory, settings, "online")
            except Exception as error:
                obstacle = _summarise_error(error)
                _tear_down_wandb()
        warn(f"metrics.wandb_mode=online: {obstacle}; W&B stays offline, `wandb sync` sends its files later.")
        return None

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record over the metric `step`."""
        if "step" in record:
            self._run.log({"step": int(record["step"]), **extract_scalars(record)})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final result into the run's summary and close it."""
        self._run.summary.update({f"result/{name}": value for name, value in _extract_numbers(result).items()})
        self._run.finish()


def _start_wandb(
    metrics: Metrics, directory: Path, settings: Mapping[str, Any], mode: Literal["online", "offline"]
) -> Any:
    import wandb

    sys.argv[:] = map(hide_secrets, sys.argv)  # W&B records it; nothing reads it any more
    options = wandb.Settings(
        init_timeout=INIT_SECONDS,
        finish_timeout=60 * metrics.wandb_finish_minutes,
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,  # env.json has the commit; a remote's URL may contain a password
        disable_job_creation=True,
        x_save_requirements=False,
    )
    # wandb sends its own error reports even offline, and without a network they delay the process's end by 10 s
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb.setup(wandb.Settings(silent=True))  # else the login prints before the run's settings apply
    return wandb.init(
        project=metrics.wandb_project,
        entity=metrics.wandb_entity,
        dir=str(directory),
        mode=mode,
        resume="allow",
        reinit="create_new",
        save_code=False,
        settings=options,
        **settings,
    )


def _tear_down_wandb() -> None:
    """End wandb's background process: it has the id of the run that it failed to start."""
    import wandb

    wandb.teardown()


def _extract_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    numeric = ((k, v) for k, v in result.items() if isinstance(v, numbers.Real) and not isinstance(v, bool))
    return {key: float(value) for key, value in numeric}


def find_online_obstacle(environ: Mapping[str, str] = os.environ, seconds: float = 5.0) -> str:
    """Return why wandb can't go online, or "": no API key (a run never prompts for one), or no answer."""
    if not has_wandb_key(environ):
        return "no API key is stored (`wandb login` stores one)"
    url = environ.get("WANDB_BASE_URL", WANDB_URL)
    return "" if _server_answers(url, seconds) else f"{url} does not answer within {seconds:g} s"


def _server_answers(url: str, seconds: float) -> bool:
    """Whether an HTTP server answers at `url`; wandb's own timeout is far longer."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb has its own certificates
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def has_wandb_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether wandb can log in without a prompt: by WANDB_API_KEY or by the netrc file that `wandb login` writes."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://", "", environ.get("WANDB_BASE_URL", WANDB_URL)).split("/")[0].split(":")[0]
    home = Path(environ.get("HOME", "~")).expanduser()
    files = [Path(environ["NETRC"])] if "NETRC" in environ else [home / ".netrc", home / "_netrc"]
    return any(_has_netrc_entry(file, host) for file in files)


def _has_netrc_entry(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_SECRET = re.compile(
    r"secret|passw(or)?d|credential|api_?key|access_?key|private_?key|(^|[_.-])(key|token|auth|bearer)$", re.IGNORECASE
)


def remove_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a copy of nested settings without keys that look like secrets, and with secrets in strings masked."""

    def clean_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean_value(v) for k, v in value.items() if not _SECRET.search(str(k))}
        if isinstance(value, (list, tuple)):
            return [clean_value(v) for v in value]
        return hide_secrets(value, environ) if isinstance(value, str) else value

    return {key: clean_value(value) for key, value in config.items() if not _SECRET.search(str(key))}


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords and tokens in URLs and without the values of secret environment variables."""
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return redact(text)
