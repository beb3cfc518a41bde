"""What sweepers that learn print: set-up of other packages' is left out, and the best trial is one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from titan.console.numbers import format_fixed
from titan.files import untrusted
from titan.run import summary
from titan.sweep.labels import format_label
from titan.sweep.schema import GRID

RESULTS = "optimization_results.yaml"
"""The file in a sweep's directory that names the best trial."""
LOGGERS = ("alembic", "hydra_plugins")
"""Loggers of sweepers, and of the databases that they may use."""


def silence_sweeper(cfg: DictConfig) -> None:
    """Leave out a sweeper's lines of set-up, unless `hydra.verbose` asks for all."""
    sweeper = str(cfg.hydra.sweeper.get("_target_"))
    if sweeper == GRID or cfg.hydra.verbose:
        return
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def describe_best(root: Path, objective: str) -> str:
    """Return the line on the best trial that a sweeper has found; empty where it names none.

    Args:
        objective: the number that the sweeper gets of each trial.
    """
    try:
        content: Any = next(iter(untrusted.parse_yaml((root / RESULTS).read_text())), None)
        untrusted.check_type(content["best_params"], dict[str, Any], "best_params")
        untrusted.check_type(content["best_value"], float, "best_value")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    label = format_label([f"{name}={value}" for name, value in content["best_params"].items()])
    file = summary.shorten_path(str(root / RESULTS))
    return f"best: {label}, {objective} {format_fixed(content['best_value'])}; see {file}\n"
