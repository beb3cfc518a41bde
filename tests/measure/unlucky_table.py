"""A/A comparisons whose worst runs diverge: `python -m tests.measure.unlucky_table [REPETITIONS]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.unlucky_report import SCENES, make_templates, simulate_comparisons


def main(repetitions: int = 2000) -> None:
    """Print the shares of all scenes."""
    with tempfile.TemporaryDirectory() as folder:
        members = make_templates(Path(folder), max(scene.seeds for scene in SCENES.values()))
        for name, scene in SCENES.items():
            rates = simulate_comparisons(members[: scene.seeds], scene, repetitions)
            print(
                f"{name}, {scene.seeds} seeds: better {rates.better:.1%}, worse {rates.worse:.1%}; "
                f"survivors alone better {rates.survivors:.1%}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
