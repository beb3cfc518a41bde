"""What the ranks of a proof are given, and what each of them leaves. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan.numerics.differences import Samples
from titan.run.attempts import Attempt
from titan.run.run import Run

EXPERTS, ROUTING = "experts", "routing"
"""What ranks record of step 1 beside tensors: its tokens' experts, and how many were given and differ, by router."""


@dataclass(frozen=True)
class ProofJob:
    """One training of three steps.

    Attributes:
        run: the shrunk run, or its one device.
        attempt: where it begins.
        folder: where each rank writes its tensors.
        pinned: the experts of all tokens of step 1, by router, which the routers use; of none: their own.
    """

    run: Run
    attempt: Attempt
    folder: Path
    pinned: Mapping[str, Samples] = field(default_factory=dict)

    def get_file(self, rank: int) -> Path:
        """Return the file of a rank's tensors."""
        return self.folder / f"tensors-{rank}.pt"
