"""What the ranks of `titan.evaluate` are given, and what the first of them leaves. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.files.atomic import write_atomic
from titan.run.attempts import Attempt
from titan.run.run import Run

RESULT = "evaluated.json"


@dataclass(frozen=True)
class EvaluationJob:
    """The input of the ranks.

    Attributes:
        run: the run, with a temporary directory in place of its directory, and with what is to be measured.
        attempt: the last checkpoint, or the weights.
        checkpoints: the folders whose average is measured too, with their steps; none: no average.
        tokenizer: the argument of `load_tokenizer`; None: that of the run's data.
    """

    run: Run
    attempt: Attempt
    checkpoints: tuple[tuple[int, str], ...] = ()
    tokenizer: str | None = None


def write_result(job: EvaluationJob, results: Mapping[str, Any]) -> None:
    """Write what rank 0 has measured."""
    write_atomic(Path(job.run.directory) / RESULT, json.dumps(results))


def read_result(job: EvaluationJob) -> dict[str, Any]:
    """Return what rank 0 has measured."""
    results: dict[str, Any] = json.loads((Path(job.run.directory) / RESULT).read_text())
    return results
