"""A sweep's directory: what it asks (`sweep.yaml`), and the ledger of its points (`ledger.jsonl`). Free of torch.

The ledger is only ever added to, a line an event, under a lock, so that a launcher that was killed leaves a ledger that
the next one goes on with. A point is known by its id, which follows from its settings, never by a job's number: the
same command finds what it has begun, and a grid that grew keeps what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["planned", "queued", "running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Asked:
    """What a sweep is for: the content of `sweep.yaml`.

    Attributes:
        question: in words; None for a grid without a name.
        axes: the settings that vary, with their values as typed.
        baseline: of these settings, the values of the arm that the others are held against; may be empty.
        margin: difference in validation loss, nats, that counts as none.
        target: the validation loss to come to; None: there is none.
    """

    question: str | None = None
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Mapping[str, str] = field(default_factory=dict)
    margin: float = 0.02
    target: float | None = None


@dataclass(frozen=True)
class Point:
    """A point of the grid and how it stands.

    Attributes:
        id: follows from its settings.
        directory: its run's directory, absolute.
        overrides: what the command line says of this point alone, such as ("parallelism=fsdp", "training.seed=1").
        state: how it stands.
        job: what Slurm calls its last job, such as "123_4"; None where it has none.
        reason: of a failed or stopped one: why.
        submissions: how often it was submitted or started.
    """

    id: str
    directory: str
    overrides: tuple[str, ...]
    state: State
    job: str | None = None
    reason: str | None = None
    submissions: int = 0


@dataclass(frozen=True)
class Sweep:
    """What a sweep's directory says."""

    directory: Path
    asked: Asked
    points: tuple[Point, ...]


def read(directory: Path) -> Sweep | None:
    """The sweep in `directory`, as its ledger and its runs' directories tell, without asking Slurm; None: no sweep."""
    raise NotImplementedError
