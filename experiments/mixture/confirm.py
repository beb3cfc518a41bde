"""Are mixtures at a larger size in the order that small runs predict?

python -m experiments.mixture.confirm runs/confirm swarm=runs/swarm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments.mixture.best import fit_prediction
from experiments.mixture.swarm import read_shares, read_swarm
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.settings import MISSING, setting
from titan.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.mixture.confirm`."""

    runs: str = operand("RUNS", "directory of larger runs on two or more mixtures")
    swarm: str = setting(MISSING, "directory of the small runs")
    target: Mapping[str, float] | None = setting(None, "as of experiments.mixture.best")


COMMAND = Command(
    "experiments.mixture.confirm",
    "Compare larger runs on mixtures with what small runs predict.",
    {"runs/confirm swarm=runs/swarm": "the best mixture and the baseline"},
    Settings,
)


def _confirm(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    small, large = read_swarm(settings.swarm), read_swarm(settings.runs)
    if small.sources != large.sources:
        raise ConfigError(f"{settings.runs}: has the sources {', '.join(large.sources)}, {settings.swarm} others.")
    if len(large.weights) < 2:
        raise ConfigError(f"{settings.runs}: has one mixture; give runs on two or more.")
    target = read_shares("target", settings.target or dict.fromkeys(small.sources, 1.0), small.sources)
    predicted = fit_prediction(small, target).predict(large.weights)
    measured = large.measure(target)
    print(f"  {'mixture':<60} {'small runs':>12} {'these runs':>12}")
    for i in np.argsort(measured):
        mixture = ", ".join(f"{name} {w:.3f}" for name, w in zip(large.sources, large.weights[i], strict=True))
        print(f"  {mixture:<60} {predicted[i]:>12.4f} {measured[i]:>12.4f}")
    confirmed = int(np.argmin(predicted)) == int(np.argmin(measured))
    print(f"\nthe mixture that small runs predict to be the best {'is' if confirmed else 'is not'} the best here")
    return 0


main, cli = COMMAND.bind(_confirm)

if __name__ == "__main__":
    cli()
