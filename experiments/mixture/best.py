"""The best mixture by a regression on a swarm of small runs, with an interval.

    python -m experiments.mixture.best runs/swarm "target={books: 1}" to=conf/sweep/confirm.yaml

The loss on each source is regressed on the weights and their logarithms (`experiments.mixture.regression`). The best
mixture is searched among those whose weights lie within the range of the swarm's, where the regression has seen runs.
Its interval repeats regression and search on resampled runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.mixture.propose import check_sweep_file, format_sweep, format_weights
from experiments.mixture.regression import FEWEST_PROXIES, MixtureModel, fit_mixture
from experiments.mixture.swarm import Swarm, read_shares, read_swarm
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.output_files import write_output_file
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.scaling.early_stopping import correlate_ranks

Numbers = NDArray[np.float64]

CANDIDATES = 1_000
"""Mixtures that each round of a search looks at."""
ROUNDS = 20
"""Of a search: each looks nearer to the best one so far."""
NEARER = 1.4
"""By what factor a round looks nearer than the one before."""
SPARSENESS = 0.2
"""Of the Dirichlet distribution of steps, which so move the weight of few sources, also where there are many."""
FEWEST_MIXTURES = FEWEST_PROXIES + 1
"""Each mixture is predicted from all others too."""
LEVEL = 0.9
"""Of intervals."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.mixture.best`."""

    runs: str = operand("RUNS", "directory of a sweep over dataset.weights")
    target: Mapping[str, float] | None = setting(
        None, "shares of the sources' losses in what is minimised, as {books: 1}; null: equal"
    )
    baseline: Mapping[str, float] | None = setting(
        None, "the mixture that the best is compared with; null: equal weights"
    )
    replicates: int = setting(200, "resampled swarms, for intervals", at_least=20, cap=100_000)
    seed: int = setting(0, "of random numbers", at_least=0)
    to: str | None = setting(None, "file of a sweep that trains the best mixture and the baseline; null: none")


COMMAND = Command(
    "experiments.mixture.best",
    "Find the best mixture of data sources from a sweep of small runs.",
    {
        "runs/swarm": "for the mean loss of all sources",
        "runs/swarm 'target={books: 1, code: 1}' to=sweep/confirm.yaml": "for two of them, and runs to confirm it",
    },
    Settings,
    notes="Needs nine mixtures. What carries over to larger runs is the order of mixtures; confirm it by two of them.",
)


@dataclass(frozen=True)
class Prediction:
    """Regressions of all sources' losses, joined by the shares of a target.

    Attributes:
        models: one for each source with a share.
        target: shares of the sources' losses; [sources].
    """

    models: tuple[MixtureModel | None, ...]
    target: Numbers

    def predict(self, weights: Numbers) -> Numbers:
        """Return the target's loss of mixtures; [n, sources] to [n]."""
        pairs = zip(self.models, self.target, strict=True)
        losses = [share * model.predict(weights) for model, share in pairs if model is not None]
        return np.asarray(np.sum(losses, 0))

    def compute_gain(self, baseline: Numbers, weights: Numbers) -> float:
        """Return the predicted loss of a mixture less that of another; [sources] each."""
        first, second = self.predict(np.vstack([baseline, weights]))
        return float(first - second)


@dataclass(frozen=True)
class BestMixture:
    """The outcome of a search.

    Attributes:
        weights: of the best mixture; [sources].
        interval: of each weight over resampled swarms; [2, sources].
        loss: the target's, predicted.
        baseline: weights of the mixture that it is compared with; [sources].
        gain: predicted loss of the baseline less that of the best, corrected for having chosen the best by it.
        gain_interval: of the gain, from resampled swarms.
        correlation: rank correlation of measured losses with predictions that leave each mixture out.
        error: root of their mean squared difference, nats per token.
    """

    weights: Numbers
    interval: Numbers
    loss: float
    baseline: Numbers
    gain: float
    gain_interval: tuple[float, float]
    correlation: float
    error: float


def fit_prediction(swarm: Swarm, target: Numbers) -> Prediction:
    """Return regressions of the losses on the sources that `target` [sources] has a share of."""
    models = [
        fit_mixture(swarm.weights, losses) if share > 0 else None
        for losses, share in zip(swarm.losses.T, target, strict=True)
    ]
    return Prediction(tuple(models), target)


def search_best(prediction: Prediction, low: Numbers, high: Numbers, generator: np.random.Generator) -> Numbers:
    """Return the mixture with the least predicted loss among those with weights from `low` to `high`; [sources]."""
    sparse = np.full(len(low), SPARSENESS)
    best = fit_into_range(np.full((1, len(low)), 1 / len(low)), low, high)
    for number in range(ROUNDS):
        first, second = (generator.dirichlet(sparse, size=CANDIDATES) for _ in range(2))
        near = fit_into_range(best + (first - second) / NEARER**number, low, high)
        candidates = np.vstack([best, near])
        best = candidates[[int(np.argmin(prediction.predict(candidates)))]]
    return np.asarray(best[0])


def fit_into_range(weights: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Return mixtures near `weights` [n, sources], with the sum one and weights from `low` to `high` [sources].

    What a mixture lacks after its weights are cut to the range is divided over the sources by the room that they have.
    """
    cut = np.clip(weights, low, high)
    missing = 1 - cut.sum(1, keepdims=True)
    room = np.where(missing > 0, high - cut, cut - low)
    shares = room / np.maximum(room.sum(1, keepdims=True), 1e-12)
    return np.asarray(np.clip(cut + missing * shares, low, high))


def find_best(swarm: Swarm, target: Numbers, baseline: Numbers, replicates: int = 200, seed: int = 0) -> BestMixture:
    """Return the best mixture of a swarm, with its intervals.

    Args:
        swarm: the runs.
        target: shares of the sources' losses in what is minimised; [sources].
        baseline: the mixture to compare with; [sources].
        replicates: resampled swarms.
        seed: of random numbers.

    Raises:
        ConfigError: for too few mixtures.
    """
    if (count := len(swarm.weights)) < FEWEST_MIXTURES:
        raise ConfigError(f"{count} mixtures have finished, too few for a regression; give at least {FEWEST_MIXTURES}.")
    generator = np.random.default_rng(seed)
    low, high = swarm.weights.min(0), swarm.weights.max(0)
    prediction = fit_prediction(swarm, target)
    best = search_best(prediction, low, high, generator)
    repeated = [fit_prediction(other, target) for other in _resample(swarm, replicates, generator)]
    weights = np.array([search_best(each, low, high, generator) for each in repeated])
    gain = prediction.compute_gain(baseline, best)
    # what a choice by resampled runs promises beyond what it gains in the original regression, as best does in truth
    excess = [
        each.compute_gain(baseline, w) - prediction.compute_gain(baseline, w)
        for each, w in zip(repeated, weights, strict=True)
    ]
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low_excess, high_excess = np.quantile(excess, tails)
    left_out, measured = predict_left_out(swarm, target), swarm.measure(target)
    return BestMixture(
        best, np.quantile(weights, tails, axis=0), float(prediction.predict(best[None])[0]), baseline,
        gain - float(np.mean(excess)), (gain - float(high_excess), gain - float(low_excess)),
        correlate_ranks(left_out, measured), float(np.sqrt(np.mean((left_out - measured) ** 2))),
    )  # fmt: skip


def predict_left_out(swarm: Swarm, target: Numbers) -> Numbers:
    """Return the target's loss of each mixture, predicted from all others; [mixtures]."""
    predictions = []
    for index in range(len(swarm.weights)):
        others = np.arange(len(swarm.weights)) != index
        rest = Swarm(swarm.sources, swarm.weights[others], swarm.losses[others])
        predictions.append(float(fit_prediction(rest, target).predict(swarm.weights[index : index + 1])[0]))
    return np.array(predictions)


def _resample(swarm: Swarm, replicates: int, generator: np.random.Generator) -> Iterator[Swarm]:
    """Yield swarms of as many mixtures, drawn with replacement."""
    count = len(swarm.weights)
    for _ in range(replicates):
        chosen = generator.integers(count, size=count)
        yield Swarm(swarm.sources, swarm.weights[chosen], swarm.losses[chosen])


def format_best(swarm: Swarm, best: BestMixture, target: Numbers) -> str:
    """Return what the command prints."""
    shares = ", ".join(f"{s:.0%} {name}" for name, s in zip(swarm.sources, target, strict=True) if s > 0)
    lines = [
        f"{len(swarm.weights)} mixtures of {len(swarm.sources)} sources; what is minimised: the loss on {shares}",
        *([f"{len(swarm.skipped)} runs have not finished and do not count"] if swarm.skipped else []),
        "",
        f"  {'source':<20} {'best weight':>12} {'90% interval':>18} {'baseline':>10} {'in the runs':>16}",
    ]
    low, high = swarm.weights.min(0), swarm.weights.max(0)
    for i, name in enumerate(swarm.sources):
        interval = f"{best.interval[0, i]:.3f} to {best.interval[1, i]:.3f}"
        seen = f"{low[i]:.3f} to {high[i]:.3f}"
        lines.append(f"  {name:<20} {best.weights[i]:>12.3f} {interval:>18} {best.baseline[i]:>10.3f} {seen:>16}")
    gains = f"{best.gain_interval[0]:.4f} to {best.gain_interval[1]:.4f}"
    verdict = "better" if best.gain_interval[0] > 0 else "not shown to be better"
    lines += [
        "",
        f"predicted loss {best.loss:.4f}, gain over the baseline {best.gain:.4f} [{gains}]: {verdict} at this size",
        f"predictions that leave a mixture out: rank correlation {best.correlation:.3f}, error {best.error:.4f} nats",
    ]
    return "\n".join(lines)


def _find(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = check_sweep_file(settings.to) if settings.to else None
    swarm = read_swarm(settings.runs)
    target = read_shares("target", settings.target or dict.fromkeys(swarm.sources, 1.0), swarm.sources)
    baseline = read_shares("baseline", settings.baseline or dict.fromkeys(swarm.sources, 1.0), swarm.sources)
    best = find_best(swarm, target, baseline, settings.replicates, settings.seed)
    print(format_best(swarm, best, target))
    if file is not None:
        values = [format_weights(weights, swarm.sources) for weights in (best.baseline, best.weights)]
        sweep = format_sweep("Is the mixture of the small runs better here too?", values, values[0])
        write_output_file(file, sweep, makes_folder=True)
        print(f"the runs that confirm it: sweep={file.stem}, {file}")
    return 0


main, cli = COMMAND.bind(_find)

if __name__ == "__main__":
    cli()
