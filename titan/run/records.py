"""Write what an attempt is into its run's directory: run.yaml, Hydra's own files, env.json. Free of torch."""

from __future__ import annotations

import json
import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from titan.console.text import redact_nested
from titan.files.atomic import write_atomic
from titan.files.run_directory import RUN
from titan.run import certificate, evaluated, hydra_private, identity, own_code, prediction
from titan.run.directory import ENVIRONMENT, read_attempts
from titan.run.lock import build_write_error
from titan.run.run import Run, as_config

if TYPE_CHECKING:
    from titan.run.attempts import Attempt


def list_hydra_folders(run: Run) -> set[str]:
    """Return the names of the folders of Hydra's own files in a run's directory: `hydra.output_subdir`."""
    return {file.partition("/")[0] for file in run.hydra}


def record_attempt(run: Run, attempt: Attempt, science: Mapping[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Write an attempt's document into run.yaml, after those of `earlier` attempts, and the files beside it.

    Raises:
        ConfigError: when the directory can't be written to.
    """
    directory = Path(run.directory)
    try:
        for name, content in run.hydra.items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_atomic(directory / name, hydra_private.dump_yaml(content))
        write_atomic(directory / ENVIRONMENT, json.dumps(redact_nested(_describe_environment(run)), indent=1))
        # last: what fails before it leaves the run as it was
        write_attempts(directory, [*earlier, redact_nested(_build_document(run, attempt, science))])
    except OSError as error:
        if not earlier:
            clear_attempt(run)
        raise build_write_error(directory, error) from error


def _build_document(run: Run, attempt: Attempt, science: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "kind": attempt.kind,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": run.name,
        "parent": attempt.parent,
        "from_step": attempt.step,
        "notes": list(attempt.notes),
        "ids": asdict(attempt.ids),
        "overrides": list(run.overrides),
        "options": list(run.options),
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "expert": run.layout.expert,
        "microbatches": run.microbatches,
        "config": as_config(run),
        "science": dict(science),
        **({own_code.KEY: digests} if (digests := own_code.compute_digests(run)) else {}),
        **({evaluated.KEY: dict(attempt.evaluated)} if attempt.evaluated else {}),
        **({prediction.KEY: prediction.to_document(attempt.prediction)} if attempt.prediction else {}),
        **({certificate.KEY: found.summarize()} if (found := certificate.find(run)) else {}),
        "run_id": attempt.run_id,  # last, because it is required: a file that was cut lacks it
    }


def _describe_environment(run: Run) -> dict[str, Any]:
    return {
        "code": identity.describe_code(run),
        "diff": identity.read_git_diff(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": asdict(run.machine),
    }


def correct_start(directory: Path, attempt: Attempt) -> None:
    """Replace the start and the notes in the last document of run.yaml by those of `attempt`.

    Raises:
        ConfigError: when the directory can't be written to.
    """
    *earlier, document = read_attempts(directory)
    changed = redact_nested({"from_step": attempt.step, "notes": list(attempt.notes)})
    try:
        write_attempts(directory, [*earlier, document | changed])
    except OSError as error:
        raise build_write_error(directory, error) from error


def write_attempts(directory: Path, documents: list[dict[str, Any]]) -> None:
    """Replace run.yaml in one step, so that a kill leaves no half of it."""
    text = "".join("---\n" + yaml.safe_dump(document, sort_keys=False) for document in documents)
    write_atomic(directory / RUN, text, sync=True)


def clear_attempt(run: Run) -> None:
    """Remove what an attempt wrote that is not recorded."""
    directory = Path(run.directory)
    for name in (RUN, ENVIRONMENT):
        (directory / name).unlink(missing_ok=True)
    for name in ("log", "debug", "profile", *list_hydra_folders(run)):
        shutil.rmtree(directory / name, ignore_errors=True)
