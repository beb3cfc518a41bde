"""Propose random mixtures for a swarm of small runs: a sweep over `dataset.weights`.

    python -m experiments.mixture.propose to=mine/conf/sweep/swarm.yaml "sources=[library,tests,tables]" proxies=24

Weights come from a Dirichlet distribution around a prior, as in RegMix (Liu et al. 2024, arXiv:2407.01492).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import MISSING, setting
from titan.errors import ConfigError

Numbers = NDArray[np.float64]

DIGITS = 4
"""Weights are multiples of 1 / 10,000, as the rows of a mixture are."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.mixture.propose`."""

    sources: tuple[str, ...] = setting(MISSING, "names of the sources, as in dataset.sources")
    to: str = setting(MISSING, "the file of the sweep: NAME.yaml in a folder sweep/ of a search path; it is made")
    proxies: int = setting(32, "number of mixtures", at_least=9, cap=10_000)
    prior: Mapping[str, float] | None = setting(
        None, "the mean of the mixtures, as {books: 0.7, code: 0.3}; null: equal"
    )
    concentration: float = setting(
        1.0, "of the Dirichlet distribution, per source: larger values are nearer to the prior", above=0
    )
    least: float = setting(
        0.01, "the least weight of a source, so that each is learned and evaluated", at_least=10**-DIGITS
    )
    seed: int = setting(0, "of random numbers", at_least=0)


COMMAND = Command(
    "experiments.mixture.propose",
    "Write a sweep over random mixtures of data sources.",
    {"to=conf/sweep/swarm.yaml 'sources=[books,code,web]' proxies=64": "64 mixtures of three sources"},
    Settings,
    notes="Run it with titan.train -m sweep=NAME dataset=... and read it with experiments.mixture.best.",
)


def draw_mixtures(prior: Numbers, proxies: int, concentration: float, least: float, seed: int) -> Numbers:
    """Return weights of mixtures, each row with the sum one; [proxies, sources].

    The first is the prior, what is trained without a better idea, or near it where that has less of a source than
    `least`.

    Args:
        prior: the mean; [sources], with the sum one.
        proxies: number of mixtures.
        concentration: parameter of the Dirichlet distribution, divided by `prior` and the number of sources.
        least: weight below which no source falls.
        seed: of random numbers.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.dirichlet(prior * len(prior) * concentration, size=proxies)
    drawn[0] = prior
    drawn = least + drawn * (1 - least * len(prior))
    if prior.min() >= least:
        drawn[0] = prior
    return drawn


def format_weights(weights: Numbers, sources: Sequence[str]) -> str:
    """Return a value of `dataset.weights` with the sum one, to 1 / 10,000."""
    whole = np.floor(weights * 10**DIGITS + 1e-9).astype(int)
    whole[int(np.argmax(whole))] += 10**DIGITS - int(whole.sum())
    return "{" + ", ".join(f"{name}: {n / 10**DIGITS:g}" for name, n in zip(sources, whole, strict=True)) + "}"


def format_sweep(question: str, values: Sequence[str], baseline: str) -> str:
    """Return a YAML file of a sweep over values of `dataset.weights`."""
    lines = [
        "# @package _global_",
        "sweep:",
        f"  question: {question}",
        f'  baseline: {{dataset.weights: "{baseline}"}}',
        "hydra:",
        "  sweeper:",
        "    params:",
        "      dataset.weights: >-",
    ]
    return "\n".join([*lines, ",\n".join(f"        {value}" for value in values), ""])


def check_sweep_file(to: str) -> Path:
    """Return the file of a sweep that is to be written.

    Raises:
        ConfigError: where it can't be written, or `sweep=NAME` would not find it.
    """
    file = check_output_file(to, (".yaml",), makes_folder=True)
    if file.absolute().parent.name != "sweep":
        raise ConfigError(f"to={to}: sweep=NAME names files in folders sweep/; give a file such as sweep/{file.name}.")
    return file


def read_prior(prior: Mapping[str, float] | None, sources: Sequence[str]) -> Numbers:
    """Return the shares of sources; [sources].

    Raises:
        ConfigError: where it lacks a source, has another one, or a weight that is not above zero.
    """
    if prior is None:
        return np.full(len(sources), 1 / len(sources))
    if set(prior) != set(sources):
        raise ConfigError(f"prior={dict(prior)}: give one weight for each of {', '.join(sources)}.")
    weights = np.array([float(prior[name]) for name in sources])
    if not (weights > 0).all() or not np.isfinite(weights).all():
        raise ConfigError(f"prior={dict(prior)}: weights are numbers above 0.")
    return np.asarray(weights / weights.sum())


def _propose(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = check_sweep_file(settings.to)
    sources = settings.sources
    if len(set(sources)) < max(2, len(sources)):
        raise ConfigError(f"sources={list(sources)}: give two or more names, each once.")
    if settings.least * len(sources) >= 1:
        raise ConfigError(
            f"least={settings.least:g}: {len(sources)} sources exceed 1; give less than {1 / len(sources):g}."
        )
    prior = read_prior(settings.prior, sources)
    mixtures = draw_mixtures(prior, settings.proxies, settings.concentration, settings.least, settings.seed)
    values = [format_weights(weights, sources) for weights in mixtures]
    question = f"Which mixture of {', '.join(sources)} is best?"
    write_output_file(file, format_sweep(question, values, values[0]), makes_folder=True)
    print(f"{settings.proxies} mixtures of {', '.join(sources)}: {file}")
    path = f"hydra.searchpath=[file://{file.absolute().parent.parent},...]"
    print(f'  run them    python -m titan.train -m "{path}" sweep={file.stem} dataset=...')
    return 0


main, cli = COMMAND.bind(_propose)

if __name__ == "__main__":
    cli()
