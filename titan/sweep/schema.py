"""The sweep node: the question that a sweep answers, and what its variants are compared with. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from titan.config.settings import format_value, setting
from titan.config.text_kinds import Label, Output, TextKind
from titan.errors import ConfigError

LAUNCHER_MODULE = "hydra_plugins.titan"
"""Hydra takes launchers only from a module below `hydra_plugins`; `launchers.plugin` puts them there."""


GRID = f"{LAUNCHER_MODULE}.GridSweeper"  # titan's own sweeper
OPTUNA = f"{LAUNCHER_MODULE}.OptunaSweeper"  # titan's sweeper that chooses trials by the results of others
DEFAULT_MARGIN = 0.02
LARGEST_NATS, LARGEST_SHARE = 1e6, 10.0
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Sweep:
    """The description of a named sweep; nothing of it changes a run."""

    question: Label | None = setting(None, "the question that the sweep answers", any_text=True)
    baseline: Mapping[str, Annotated[Any, TextKind.LABEL]] | None = setting(
        None, "the variant that the others are compared with, such as {parallelism:single}; null: the first"
    )
    budget: Literal["steps", "tokens", "flops", "time"] = setting(
        "steps",
        "what all variants get as much of as the baseline: steps; or tokens, FLOPs or device time, by steps of each "
        "variant's own",
    )
    margin: float | Label = setting(
        0.02,
        "equivalence margin: difference in validation loss that counts as none, in nats; or a share of the baseline's "
        "compute, as in 2%",
    )
    target: float | None = setting(None, "validation loss to reach; null: none", above=0)
    objective: Label = setting(
        "validation_loss", "number of result.json that a sweeper which learns gets of each trial"
    )
    direction: Literal["auto", "minimize", "maximize"] = setting(
        "auto", "what the sweeper does with the objective; auto: hydra.sweeper.direction, else minimize"
    )
    sizes: tuple[int, ...] | None = setting(
        None,
        "widths of a ladder, in place of a grid: the largest is predicted from the others before it runs; null: a grid",
        at_least=1,
        unit="powers",
        later=True,
    )
    lengths: tuple[float, ...] = setting(
        (5.0, 10.0, 20.0),
        "of a ladder: the lengths of each size, in tokens per parameter without embeddings",
        above=0,
        cap=1e6,
        later=True,
    )
    seeds: int = setting(
        2,
        "of a ladder: seeds of the smallest size, for the noise of seeds; the others have one",
        at_least=1,
        cap=100,
        later=True,
    )
    lr_rule: Literal["width", "fixed", "tuned"] | None = setting(
        None,
        "of a ladder: width: optimizer.lr times the recipe's width over that of the size; fixed: the same for all; "
        "tuned: at the smallest sizes, and extrapolated; null: fixed where the model scales its learning rates by "
        "size, else width",
        later=True,
    )
    tuned_sizes: int = setting(2, "of lr_rule=tuned: how many of the smallest sizes are tuned", at_least=1, later=True)
    tuned_factors: tuple[float, ...] = setting(
        (0.25, 0.5, 1.0, 2.0),
        "of lr_rule=tuned: multiples of the rate by width that are tried at each tuned size",
        above=0,
        cap=1e3,
        later=True,
    )
    worst: float | None = setting(
        None,
        "objective of a trial that failed; null: none with hydra/sweeper=optuna, else infinity, negative to maximize",
    )

    @property
    def baseline_settings(self) -> dict[str, str]:
        """The baseline's settings, with values as they are typed."""
        return {name: format_value(value) for name, value in (self.baseline or {}).items()}


@dataclass(frozen=True)
class OptunaSearch:
    """The settings of `hydra/sweeper=optuna`, beside `hydra.sweeper.params`."""

    n_trials: int = setting(20, "trials of the study, with those of earlier commands", at_least=1, cap=10**6)
    n_jobs: int = setting(1, "trials that run at the same time", at_least=1, cap=10_000)
    direction: Literal["minimize", "maximize"] | None = setting(
        None, "what to do with sweep.objective; null: sweep.direction, else minimize"
    )
    sampler: Literal["tpe", "random", "cmaes", "grid"] = setting(
        "tpe",
        "how values are chosen; cmaes takes only numbers, grid takes combinations in turn",
    )
    seed: int = setting(0, "seed of the sampler", at_least=0, cap=2**31)
    startup_trials: int = setting(
        10, "trials before tpe, cmaes and median use results: until then values are random", at_least=0, cap=10**6
    )
    pruner: Literal["none", "margin", "median", "successive_halving", "hyperband"] = setting(
        "none", "ends trials early by their validation losses, see evaluation.every; margin: as titan.compare offers it"
    )
    pruner_warmup: int = setting(0, "evaluations of a trial before median may end it", at_least=0, cap=10**6)
    max_failures: int = setting(5, "failed trials in a row after which no more start", at_least=1, cap=10**6)
    storage: Output | None = setting(None, "file of the study; null: study.journal in the sweep's directory")
    study_name: Label | None = setting(None, "the study's name in its file; null: the name of the sweep's directory")


@dataclass(frozen=True)
class LocalLaunch:
    """The settings of `hydra/launcher=local`."""

    at_once: int = setting(1, "trials that run at the same time", at_least=1, cap=10_000)
    verbose: bool = setting(
        False, "show what trials print, where they run one after the other; false: it is in log/console.log of each"
    )


@dataclass(frozen=True)
class SlurmLaunch:
    """The settings of `hydra/launcher=slurm`; a site's own file in conf/hydra/launcher/ extends them."""

    wait: bool = setting(True, "wait until all trials have ended; false: submit and leave")
    dry_run: bool = setting(False, "show the batch scripts and the device-hours, and submit nothing")
    snapshot: bool = setting(True, "copy the code beside the sweep, so that jobs in the queue run what was submitted")
    at_once: int | None = setting(None, "trials of the sweep that may run at the same time; null: all", at_least=1)
    array_size: int | None = setting(None, "trials in one array at most; null: as many as Slurm allows", at_least=1)
    max_jobs: int | None = setting(None, "jobs that you may have in the queue at once; null: no limit", at_least=1)
    poll_seconds: float = setting(10.0, "how often Slurm is asked while waiting", above=0, cap=86400)


LAUNCHERS: Mapping[str, tuple[str, type]] = {
    "local": ("LocalLauncher", LocalLaunch),
    "basic": ("LocalLauncher", LocalLaunch),
    "slurm": ("SlurmLauncher", SlurmLaunch),
}
"""The class and the settings of each launcher by name; `basic` is Hydra's own name of its local launcher."""


@dataclass(frozen=True)
class Margin:
    """A margin in one of two units."""

    nats: float | None  # of validation loss; None where it is a share of compute
    share: float | None = None  # of the baseline's compute, 0.02 for 2 %; None where it is in nats


def parse_margin(value: float | str, name: str = "sweep.margin") -> Margin:
    """Return the margin that a setting states.

    Args:
        value: nats, or a share as text.
        name: of the setting, for the message.

    Raises:
        ConfigError: for another text, and for a margin that is not above 0 or too large.
    """
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        number = float(match[1]) / 100 if match else float(value)
    except ValueError:
        number = math.nan
    typed = f"{name}={value if isinstance(value, str) else f'{value:g}'}"
    if -math.inf < number <= 0:
        raise ConfigError(f"{typed}: must be above 0.")
    if not 0 < number <= (LARGEST_SHARE if match else LARGEST_NATS):
        raise ConfigError(
            f"{typed}: must be a number of nats above 0, such as 0.02, or a share of the baseline's compute, "
            "such as 2%."
        )
    return Margin(None, number) if match else Margin(number)
