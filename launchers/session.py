"""A sweep's way through Hydra: what the command asks for, and what became of it, in one object.

Hydra's sweeper makes the launcher and returns nothing of it. But it passes on the task function that a command hands
over, and titan's launcher runs trials by itself: so the session is that function.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from omegaconf import DictConfig

from launchers.trials import Trial
from titan.console.numbers import format_fixed
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.run_directory import shorten_path
from titan.run.run import Run
from titan.sweep import ledger
from titan.sweep.labels import format_label
from titan.sweep.schema import GRID


class TrialPlans(NamedTuple):
    """What a dry run prints about trials beside their scripts, and the predicted device-hours of each, if known."""

    text: str
    device_hours: tuple[float | None, ...]


Describe = Callable[[Sequence[Trial]], TrialPlans]  # returns the plans of trials, for a dry run
Planner = Callable[[Sequence[Trial]], list[int]]
"""Takes the trials of a sweep in place of a launch; returns their exit codes."""


def describe_nothing(trials: Sequence[Trial]) -> TrialPlans:
    """Return no text: what a dry run prints beside scripts where the command has nothing to add."""
    return TrialPlans("", (None,) * len(trials))


class TrialSource(Protocol):
    """Chooses trials while others run; a launcher runs them until none is left."""

    def ask(self) -> Sequence[Trial]:
        """Return checked trials to start now; called again and again."""

    def tell(self, trial: Trial, code: int) -> None:
        """Take the exit code of a trial that has ended."""


@dataclass
class SweepSession:
    """One command line with -m, from the command to the launcher and back."""

    trusted: tuple[str, ...] = ()  # packages that trials may import
    planner: Planner | None = None  # takes the trials in place of a launch, if any
    describe: Describe = describe_nothing  # returns what a dry run prints about trials
    is_dry_run: bool = False  # whether no trial is to start; the launcher sets it when it is set up
    codes: list[int] = field(default_factory=list)  # the exit codes of the trials; the launcher adds them
    # folders that the sweep creates, innermost first; the launcher sets them
    new_folders: list[Path] = field(default_factory=list)
    directory: Path | None = None  # the sweep's; the launcher sets it
    given_overrides: Sequence[Sequence[str]] = ()  # of each trial, in place of those of a grid; empty: a grid's
    fixed_settings: frozenset[str] = frozenset()  # those that are no part of the trials' names then
    # the run of each trial and its exit code, in order; the launcher adds them
    outcomes: list[tuple[Run, int]] = field(default_factory=list)

    def __call__(self, cfg: DictConfig) -> None:
        """Be Hydra's task function, which only a launcher that is not titan's calls."""
        raise ConfigError("hydra/launcher: this launcher is not titan's; choose hydra/launcher=local.")

    def find_exit_code(self) -> int:
        """Return the exit code of the sweep: 0 when every trial succeeded."""
        if not self.codes:
            raise ConfigError("-m: the sweep has no trials; give values, such as optimizer.lr=1e-3,3e-3.")
        return next((code for code in self.codes if code), 0)

    def remove_unused(self) -> None:
        """Remove the folders and files that the sweeper wrote, where no trial was started."""
        if not self.new_folders or (self.codes and not self.is_dry_run):
            return
        if (self.new_folders[0] / ledger.LEDGER).exists():  # it was begun, and failed
            return
        (self.new_folders[0] / "multirun.yaml").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in self.new_folders:
                folder.rmdir()


RESULTS = "optimization_results.yaml"  # the file in a sweep's directory that names the best trial
LOGGERS = ("alembic", "hydra_plugins")  # loggers of sweepers, and of the databases that they may use


def silence_sweeper(cfg: DictConfig) -> None:
    """Leave out a sweeper's lines of set-up, unless `hydra.verbose` asks for all."""
    sweeper = str(cfg.hydra.sweeper.get("_target_"))
    if sweeper == GRID or cfg.hydra.verbose:
        return
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def describe_best(root: Path, objective: str) -> str:
    """Return the line on the best trial that a sweeper has found; empty where it names none."""
    try:
        content: Any = next(iter(untrusted.parse_yaml((root / RESULTS).read_text())), None)
        untrusted.check_type(content["best_params"], dict[str, Any], "best_params")
        untrusted.check_type(content["best_value"], float, "best_value")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    label = format_label([f"{name}={value}" for name, value in content["best_params"].items()])
    file = shorten_path(str(root / RESULTS))
    return f"best: {label}, {objective} {format_fixed(content['best_value'])}; see {file}\n"
