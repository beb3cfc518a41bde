"""What the ranks of a proof are given, and what each of them leaves. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan.run.attempts import Attempt
from titan.run.run import Run


@dataclass(frozen=True)
class ProofJob:
    """One training of three steps.

    Attributes:
        run: the shrunk run, or its one device.
        attempt: where it begins.
        folder: where each rank writes its tensors.
    """

    run: Run
    attempt: Attempt
    folder: Path

    def get_file(self, rank: int) -> Path:
        """Return the file of a rank's tensors."""
        return self.folder / f"tensors-{rank}.pt"
