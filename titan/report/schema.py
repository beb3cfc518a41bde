"""The settings of titan.compare."""

from __future__ import annotations

import os
from dataclasses import dataclass

from titan.config.arguments import operand
from titan.config.settings import setting
from titan.config.text_kinds import Input, Label, Output
from titan.errors import ConfigError
from titan.sweep.schema import parse_margin

PAGE = "compare.html"
"""The page that is written without `to`."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.compare`."""

    directories: tuple[Input, ...] = operand("DIR", "directories of runs or sweeps, such as runs/grid")
    baseline: Label | None = setting(
        None,
        "variant that the others are compared with: its settings, as in parallelism=ddp,lr=0.001, or a run's directory",
    )
    margin: float | Label | None = setting(
        None,
        "equivalence margin, in nats of validation loss, or a share of the baseline's compute, as in 2%; null: that of "
        "the sweep, else 0.02",
    )
    target: float | None = setting(None, "validation loss to reach; null: that of the sweep", above=0)
    to: Output | tuple[Output, ...] | None = setting(
        None, f"files to write: .html, .md, .csv or .json; null: {PAGE} in the first directory; []: none"
    )

    def check(self) -> None:
        """Raise ConfigError for a margin that is none, and for directories that are not there."""
        if self.margin is not None:
            parse_margin(self.margin, "margin")
        for name in self.directories:
            if not os.path.isdir(name):  # Path.is_dir raises for a name that is too long
                problem = "is a file, not a directory" if os.path.exists(name) else "there is no such directory"
                raise ConfigError(f"{name}: {problem}; correct the path.")
