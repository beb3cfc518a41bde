"""Trackers: services that draw what metrics.jsonl records, here TensorBoard and Weights & Biases.

Each tracker works in a thread of its own, fed by a queue: the training thread hands a record over and goes on. What a
tracker raises, at opening or later, drops that tracker with one sentence of warning; a tracker that hangs is left
behind at the end after a bounded wait. So no tracker ends or stalls a run. Warnings are spoken in the training thread,
at its next call.
"""

from __future__ import annotations

import http.client
import importlib.util
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
from pathlib import Path
from typing import Any, Literal, Protocol

from titan.console.text import redact
from titan.metrics.schema import Metrics

Warn = Callable[[str], None]

BACKLOG = 10_000  # records that wait for a slow tracker before it is given up
PATIENCE = 20.0  # seconds that the end of a run waits for its trackers
INIT_SECONDS = 10.0  # wandb fails after about three times this without a network

WANDB_URL = "https://api.wandb.ai"


class Tracker(Protocol):
    """What draws records; may raise and block as it likes."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Take the final figures and close; nothing follows."""


Opener = Callable[[Warn], Tracker]
"""Opens a tracker; gets a function that warns in the training thread."""


class Trackers:
    """Several trackers as one that never raises and never blocks for long."""

    def __init__(self, openers: Mapping[str, Opener], warn: Warn, patience: float = PATIENCE) -> None:
        """Start opening the trackers in the background.

        Args:
            openers: by the name of the setting that asks for the tracker, for warnings.
            warn: speaks a sentence to the user; only called from the thread that calls `log` and `finish`.
            patience: seconds that `finish` waits for all of them together.
        """
        self._warn, self._patience = warn, patience
        self._workers = [_Worker(name, opener) for name, opener in openers.items()]

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand a record to every tracker."""
        for worker in self._workers:
            worker.put(("log", dict(record)))
        self._speak()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand the final figures to every tracker and wait, not for ever, until they have closed."""
        deadline = time.monotonic() + self._patience
        for worker in self._workers:
            worker.put(("finish", dict(result)))
        for worker in self._workers:
            worker.wait(max(0.0, deadline - time.monotonic()), self._patience)
        self._speak()
        self._workers = []

    def _speak(self) -> None:
        for worker in self._workers:
            for sentence in worker.sentences():
                self._warn(sentence)
        self._workers = [worker for worker in self._workers if not worker.failed]


class _Worker:
    """A tracker in its own thread, a daemon so that it can't keep the process alive."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.failed = False
        self._name = name
        self._jobs: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(BACKLOG)
        self._sentences: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(opener,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, job: tuple[str, dict[str, Any]]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._fail(f"{BACKLOG} records wait for it")

    def wait(self, seconds: float, patience: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive() and not self.failed:
            self._fail(f"it is not done {patience:g} s after the end")

    def sentences(self) -> Iterator[str]:
        while not self._sentences.empty():
            yield self._sentences.get()

    def _serve(self, opener: Opener) -> None:
        try:
            tracker, verb = opener(self._sentences.put), ""
            while verb != "finish" and not self.failed:
                verb, values = self._jobs.get()
                getattr(tracker, verb)(values)
        except BaseException as error:  # a SystemExit too must not end the thread in silence
            if not self.failed:
                self._fail(_first_line(error))

    def _fail(self, reason: str) -> None:
        self.failed = True
        self._sentences.put(f"{self._name}: {reason}; the run goes on without it.")


def _first_line(error: BaseException) -> str:
    text = hide_secrets(str(error)).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def open_trackers(
    metrics: Metrics,
    *,
    directory: Path,
    run_id: str,
    group_id: str,
    name: str,
    config: Mapping[str, Any],
    warn: Warn,
) -> Trackers:
    """Open the trackers that the settings ask for.

    Args:
        metrics: the settings.
        directory: the run's directory; trackers write to tensorboard/ and wandb/ in it.
        run_id: the same in every attempt of a run, so that a resumed run goes on in the same place.
        group_id: shared by the seeds of one experiment.
        name: the run's name, for people.
        config: the resolved settings as plain containers; what looks like a secret is left out.
        warn: speaks a sentence to the user.
    """
    wanted: dict[str, tuple[str, Opener]] = {}
    if metrics.tensorboard:
        wanted["metrics.tensorboard=true"] = ("tensorboard", lambda _: TensorBoard(directory / "tensorboard"))
    if metrics.wandb:
        settings = {"id": run_id, "group": group_id, "name": name, "config": without_secrets(config)}
        wanted["metrics.wandb=true"] = ("wandb", lambda tell: WeightsAndBiases(metrics, directory, settings, tell))
    openers = {}
    for setting, (package, opener) in wanted.items():
        if _installed(package):
            openers[setting] = opener
        else:
            warn(f"{setting}: the package {package} is not installed (pip install {package}); going on without it.")
    return Trackers(openers, warn)


def _installed(package: str) -> bool:
    """Whether a real package is there; a mere folder of that name, such as a run's wandb/, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under their names in a tracker: train/loss, validation/loss and so on.

    Lists, texts and truth values are left out, and so is the step, which is the axis.
    """
    validation = "validation_loss" in record and "loss" not in record
    named = {}
    for key, value in record.items():
        if key != "step" and isinstance(value, numbers.Real) and not isinstance(value, bool):
            short = key.removeprefix("validation_")
            group = "validation" if validation or short != key else "train"
            named[f"{group}/{short}"] = float(value)
    return named


class TensorBoard:
    """Event files for TensorBoard; a resumed attempt hides the steps that it repeats."""

    def __init__(self, directory: Path) -> None:
        """Check that files can be written; the writer opens with the first record, whose step it needs."""
        from torch.utils.tensorboard import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._open: Callable[[int], Any] = lambda step: SummaryWriter(str(directory), purge_step=step, flush_secs=30)
        self._writer: Any = None
        self._step = 0

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record at its step; a record without a step has no place and is left out."""
        if "step" not in record:
            return
        self._step = int(record["step"])
        self._writer = self._writer or self._open(self._step)
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, self._step)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final figures as result/... at the last step and close the file."""
        if self._writer is not None:
            for name, value in _figures(result).items():
                self._writer.add_scalar(f"result/{name}", value, self._step)
            self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, or its files for a later `wandb sync`."""

    def __init__(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], tell: Warn) -> None:
        """Open the run; offline, with a sentence, where online is asked for but can't be had.

        Args:
            metrics: project, entity and mode.
            directory: where wandb/ is made.
            settings: id, group, name and config of the run, as wandb.init takes them.
            tell: speaks a sentence to the user.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise OSError(f"{directory} can't be written to")  # wandb would write to /tmp in silence
        run = self._online(metrics, directory, settings, tell) if metrics.wandb_mode == "online" else None
        self._run: Any = run or _start(metrics, directory, settings, "offline")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _online(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], tell: Warn) -> Any:
        """The run online; None, with a sentence, where that can't be."""
        obstacle = online_obstacle()
        if not obstacle:
            try:
                return _start(metrics, directory, settings, "online")
            except Exception as error:
                obstacle = _first_line(error)
                _forget_wandb()
        tell(f"metrics.wandb_mode=online: {obstacle}; W&B stays offline, `wandb sync` sends its files later.")
        return None

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record over the metric `step`."""
        if "step" in record:
            self._run.log({"step": int(record["step"]), **scalars(record)})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Put the final figures into the run's summary and close it."""
        self._run.summary.update({f"result/{name}": value for name, value in _figures(result).items()})
        self._run.finish()


def _start(metrics: Metrics, directory: Path, settings: Mapping[str, Any], mode: Literal["online", "offline"]) -> Any:
    import wandb

    sys.argv[:] = map(hide_secrets, sys.argv)  # which W&B writes down, and nobody reads any more
    options = wandb.Settings(
        init_timeout=INIT_SECONDS,
        finish_timeout=PATIENCE,
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,  # env.json has the commit; a remote's address may hold a password
        disable_job_creation=True,
        x_save_requirements=False,
    )
    # wandb's own error reports go out even offline, and without a network hold up the end of the process for 10 s
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb.setup(wandb.Settings(silent=True))  # else the login speaks before the run's own settings hold
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


def _forget_wandb() -> None:
    """End wandb's background process: it still holds the id of the run that it couldn't start."""
    import wandb

    wandb.teardown()


def _figures(result: Mapping[str, Any]) -> dict[str, float]:
    numeric = ((k, v) for k, v in result.items() if isinstance(v, numbers.Real) and not isinstance(v, bool))
    return {key: float(value) for key, value in numeric}


def online_obstacle(environ: Mapping[str, str] = os.environ, seconds: float = 5.0) -> str:
    """Why wandb can't go online from here, or nothing: no key (a run never asks for one), or no answer."""
    if not has_wandb_key(environ):
        return "there is no key here (`wandb login` stores one)"
    url = environ.get("WANDB_BASE_URL", WANDB_URL)
    return "" if _answers(url, seconds) else f"{url} does not answer within {seconds:g} s"


def _answers(url: str, seconds: float) -> bool:
    """Whether anything at `url` speaks HTTP; wandb itself takes far longer to find out."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb brings its own certificates
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def has_wandb_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether wandb can log in without asking: by WANDB_API_KEY or by the netrc file that `wandb login` writes."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://", "", environ.get("WANDB_BASE_URL", WANDB_URL)).split("/")[0].split(":")[0]
    home = Path(environ.get("HOME", "~")).expanduser()
    files = [Path(environ["NETRC"])] if "NETRC" in environ else [home / ".netrc", home / "_netrc"]
    return any(_in_netrc(file, host) for file in files)


def _in_netrc(file: Path, host: str) -> bool:
    import netrc

    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_SECRET = re.compile(
    r"secret|passw(or)?d|credential|api_?key|access_?key|private_?key|(^|[_.-])(key|token|auth|bearer)$", re.IGNORECASE
)


def without_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A copy of nested settings without keys that look like secrets, and with secrets in texts blotted out."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if not _SECRET.search(str(k))}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        return hide_secrets(value, environ) if isinstance(value, str) else value

    return {key: clean(value) for key, value in config.items() if not _SECRET.search(str(key))}


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without passwords and tokens in URLs and without the values of secret environment variables."""
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return redact(text)
