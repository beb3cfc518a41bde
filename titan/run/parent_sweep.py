"""The sweep that a run is a trial of, from the files of the sweep's directory. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from titan.files import untrusted
from titan.run.run import Run

REPEATS = ("training.seed", "training.repeat")
"""Settings whose values make no other variant."""


class ParentSweep(NamedTuple):
    """What a run is in its sweep.

    Attributes:
        name: of the sweep's directory.
        variant: the settings that the sweep varies, with the run's values as typed, without seed and repeat.
    """

    name: str
    variant: str


def find_parent_sweep(run: Run) -> ParentSweep | None:
    """Return the sweep that started a run; None for a run outside of a sweep."""
    folder = Path(run.directory).parent
    try:
        content = (
            next(iter(untrusted.parse_yaml(untrusted.read_regular_file(folder / "sweep.yaml").decode())), None) or {}
        )
        untrusted.check_type(content, dict[str, object], "it")
        untrusted.check_type(varied := content.get("axes") or {}, dict[str, list[object]], "axes")
    except (OSError, ValueError):
        return None
    names = varied.keys() - set(REPEATS)
    override_values = {override.partition("=")[0].lstrip("+"): override.partition("=")[2] for override in run.overrides}
    return ParentSweep(
        folder.name, " ".join(f"{name}={override_values[name]}" for name in sorted(names & override_values.keys()))
    )
