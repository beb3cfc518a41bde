"""Runs at MLflow, in a database of the run's directory or at a server.

A resumed attempt continues the MLflow run that has the run's id as a tag. MLflow changes no parameter once it is
logged, so settings that later attempts change are tags, and it deletes no values: the steps that a resumed attempt
repeats have two.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.config.optional import advise_extra
from titan.config.settings import format_value
from titan.files import locks
from titan.metrics.schema import SQLITE, MLflow
from titan.metrics.tracker_run import (
    RunDescription,
    Warn,
    extract_numbers,
    extract_scalars,
    flatten_settings,
    hide_secrets,
    server_answers,
)

# MLflow's limits of a request, its keys and values; of tags and names those of older servers and of SQL columns
MAX_BATCH_METRICS = 1000
MAX_BATCH_PARAMS = 100
MAX_KEY_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 5000
MAX_NAME_LENGTH = 250

FLUSH_SECONDS = 5.0
"""Seconds for which values are collected, so that short steps need no request each."""
ANSWER_SECONDS = 5.0
"""Seconds in which a server must answer at opening; MLflow itself retries for minutes."""
LOCK_SECONDS = 60.0
"""Seconds that a run waits while others create the tables of its database or open their runs there."""

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Variables that MLflow reads: no usage reports, and no messages that would break the progress line."""
RUN_ID_TAG = "titan.run_id"


class MLflowRun:
    """A run at MLflow, opened with the run's settings as parameters."""

    def __init__(self, settings: MLflow, directory: Path, description: RunDescription, warn: Warn) -> None:
        """Create the run, or find that of an earlier attempt.

        Args:
            directory: the run's directory; mlflow/ in it has the database where no store is named.
        """
        uri = settings.choose_tracking_uri(directory)
        _check_store(uri)
        client_class = _import_client()
        with _lock_store(uri):  # the client itself creates the tables
            self._client = client_class(tracking_uri=uri)
            experiment = _find_or_create_experiment(self._client, settings.experiment, uri)
            self._run_id = self._find_or_create_run(experiment, description)
        self._values: list[Any] = []
        self._next_flush = self._step = 0.0
        self._send(tags=_build_tags(settings, description))
        self._log_params(description)

    def _find_or_create_run(self, experiment: str, description: RunDescription) -> str:
        """Return the id of the MLflow run of this run, open for more values."""
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{description.run_id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        name = description.name[:MAX_NAME_LENGTH]
        run = self._client.create_run(experiment, tags={RUN_ID_TAG: description.run_id}, run_name=name)
        return str(run.info.run_id)

    def _log_params(self, description: RunDescription) -> None:
        """Log settings and facts as parameters, and as tags those that an earlier attempt logged with other values."""
        params = build_params(description.metadata)
        attempt = params.pop("attempt", "")
        logged = self._client.get_run(self._run_id).data.params
        changed = {key: value for key, value in params.items() if logged.get(key, value) != value}
        self._send(
            params={key: value for key, value in params.items() if key not in logged},
            tags={clean_key(f"titan.attempt_{attempt}.{k}"): v[:MAX_TAG_LENGTH] for k, v in changed.items()},
        )

    def _send(self, params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None) -> None:
        """Log parameters and tags."""
        from mlflow.entities import Param, RunTag

        self._log_batches("params", [Param(*item) for item in (params or {}).items()], MAX_BATCH_PARAMS)
        self._log_batches("tags", [RunTag(*item) for item in (tags or {}).items()], MAX_BATCH_PARAMS)

    def _log_batches(self, kind: str, values: Sequence[Any], size: int) -> None:
        """Log values in requests of a size that MLflow accepts."""
        for start in range(0, len(values), size):
            self._client.log_batch(self._run_id, **{kind: values[start : start + size]})

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record at its step; a record without a step is skipped."""
        if "step" in record:
            self._step = int(record["step"])
            self._collect(extract_scalars(record), record.get("time") or time.time())
            if len(self._values) >= MAX_BATCH_METRICS or time.monotonic() >= self._next_flush:
                self._flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the final result as result/... at the last step, and end the run."""
        numbers = extract_numbers(result)
        self._collect({f"result/{name}": value for name, value in numbers.items()}, time.time())
        self._flush()
        self._client.set_terminated(self._run_id, choose_status(result))

    def _collect(self, scalars: Mapping[str, float], seconds: float) -> None:
        """Keep values for the next request; infinities as NaN, since MLflow's databases store 1.8e308 for them."""
        from mlflow.entities import Metric

        for name, value in scalars.items():
            value = value if math.isfinite(value) else math.nan
            self._values.append(Metric(clean_key(name), value, int(1000 * seconds), int(self._step)))

    def _flush(self) -> None:
        self._log_batches("metrics", self._values, MAX_BATCH_METRICS)
        self._values = []
        self._next_flush = time.monotonic() + FLUSH_SECONDS


def choose_status(result: Mapping[str, Any]) -> str:
    """Return MLflow's status for a result: of a run that failed there is none, and one that was stopped has more."""
    if not result:
        return "FAILED"
    return "FINISHED" if result.get("finished") else "KILLED"


def build_params(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return settings and facts as parameters, cut to the lengths that MLflow accepts."""
    return {clean_key(k): format_value(v)[:MAX_PARAM_LENGTH] for k, v in flatten_settings(metadata).items()}


def clean_key(name: str) -> str:
    """Return a name as a key that MLflow accepts: a relative path of letters, digits and _-./: or spaces."""
    parts = re.sub(r"[^/\w.\- :]", "_", name)[:MAX_KEY_LENGTH].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _build_tags(settings: MLflow, description: RunDescription) -> dict[str, str]:
    """Return the user's tags and those that identify the run; group and sweep for searches."""
    tags = {
        **(settings.tags or {}),
        "mlflow.runName": description.name[:MAX_NAME_LENGTH],
        "mlflow.source.git.commit": description.facts.get("commit"),
        "titan.attempt": description.facts.get("attempt"),
        "titan.group": description.group_id,
        "titan.sweep": description.sweep,
    }
    return {clean_key(key): hide_secrets(str(value))[:MAX_TAG_LENGTH] for key, value in tags.items() if value}


def _find_or_create_experiment(client: Any, name: str, uri: str) -> str:
    """Return the id of an experiment; the artifacts of one in a local database lie beside it."""
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is not None:
        return str(experiment.experiment_id)
    database = _find_database(uri)
    artifacts = (database.parent / "artifacts").as_uri() if database else None
    try:
        return str(client.create_experiment(name, artifact_location=artifacts))
    except MlflowException:  # another run may have created it meanwhile
        if (experiment := client.get_experiment_by_name(name)) is None:
            raise
        return str(experiment.experiment_id)


def _import_client() -> Any:
    """Return MLflow's class of clients; it reads `ENVIRONMENT` where the user has set no other values."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient


def _check_store(uri: str) -> None:
    """Raise an error for a store that can't be used, and create the folder of a database."""
    if (database := _find_database(uri)) is not None:
        missing = [name for name in ("sqlalchemy", "alembic") if importlib.util.find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(f"its database needs the package {' '.join(missing)} ({advise_extra('track')})")
        database.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(database if database.exists() else database.parent, os.W_OK):
            raise OSError(f"{database} can't be written to")
    elif uri.startswith(("http://", "https://")) and not server_answers(uri, ANSWER_SECONDS):
        raise OSError(f"{uri} does not answer within {ANSWER_SECONDS:g} s")


def _find_database(uri: str) -> Path | None:
    """Return the absolute path of an sqlite store; None for others."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


@contextlib.contextmanager
def _lock_store(uri: str) -> Iterator[None]:
    """Let one process at a time create the tables of an sqlite store: two at once would fail."""
    database = _find_database(uri)
    if database is None:
        yield
        return
    descriptor = locks.open_lock(database.with_name(f"{database.name}.lock"))
    try:
        locks.acquire(descriptor, str(database), LOCK_SECONDS)
        yield
    finally:
        os.close(descriptor)
