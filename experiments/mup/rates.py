"""The best learning rate of each size in a grid such as `sweep=mup`, and by how much it moves, as a table.

    python -m experiments.mup.rates runs/mup

The best rate is the minimum of a parabola through the lowest loss and its two neighbours over the logarithm of the
rate. A row of transfer "base" is that of the base, where the model is the same with transfer and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from titan import api
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.errors import ConfigError
from titan.report.findings import RunResult

FREE = ("transfer", "dim", "layers", "heads", "kv_heads", "ffn", "expert_ffn", "base_head_dim")
"""Settings of a model in which the runs may differ, beside learning rate and seed."""
ONE_RATE = "or another"
"""What follows the best rate of a size that has one rate; it says nothing on how the best moves."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.mup.rates`."""

    runs: tuple[str, ...] = operand("RUNS", "directories of grids over learning rate and width or depth")


COMMAND = Command(
    "experiments.mup.rates",
    "Show the best learning rate of each width and depth.",
    {"runs/mup": "of a grid", "runs/mup runs/more_seeds": "of two that differ in nothing else"},
    Settings,
    keep_going=False,
)


class Size(NamedTuple):
    """Of a model, and how its learning rate follows the size.

    Attributes:
        transfer: `model.transfer`.
        dim: its width.
        layers: its blocks.
    """

    transfer: str
    dim: int
    layers: int


class BestRate(NamedTuple):
    """The learning rate with the least loss.

    Attributes:
        rate: the minimum of the parabola; where the lowest loss has no neighbour on one side, its rate.
        bound: "or less", "or more" or, of one rate, "or another" there, otherwise empty.
    """

    rate: float
    bound: str = ""


Losses = Mapping[float, float]
"""Validation loss by learning rate."""


def read_losses(folders: Sequence[str]) -> dict[Size, dict[float, dict[int, float]]]:
    """Return the validation loss by size, learning rate and seed of runs that have finished; infinite if diverged.

    Raises:
        ConfigError: where there are none, two are the same, or they differ in anything else.
    """
    results = _select_finished(folders)
    runs = [api.open_run(result.directory) for result in results]
    losses: dict[Size, dict[float, dict[int, float]]] = {}
    seen: set[tuple[Any, ...]] = set()
    for run, result in zip(runs, results, strict=True):
        _check_equal(runs[0], run)
        size, rate = _read_size(run), float(run.config["optimizer"]["lr"])
        key = (size, run.config["model"]["transfer"], rate, result.seed)  # of a base, control and transfer are the same
        if key in seen:
            raise ConfigError(f"{run.directory}: there is another run of this size, learning rate and seed.")
        seen.add(key)
        loss = math.inf if result.diverged or result.validation is None else result.validation
        losses.setdefault(size, {}).setdefault(rate, {})[result.seed] = loss
    return losses


def _select_finished(folders: Sequence[str]) -> list[RunResult]:
    results = [run for variant in api.compare(folders).variants for run in variant.runs]
    finished = [run for run in results if run.diverged or (run.state == "finished" and run.validation is not None)]
    if not finished:
        raise ConfigError(f"{', '.join(folders)}: no run has finished with a validation loss; give a finished grid.")
    return finished


def _read_size(run: api.SavedRun) -> Size:
    model = run.config["model"]
    if "transfer" not in model:
        raise ConfigError(f"{run.directory}: has no model.transfer; give a grid of model=mup_llama, for example.")
    is_base = (model["dim"], model["layers"]) == (model["base_dim"], model["base_layers"])
    return Size("base" if is_base else str(model["transfer"]), int(model["dim"]), int(model["layers"]))


def _check_equal(first: api.SavedRun, other: api.SavedRun) -> None:
    a, b = (run.attempts[-1].document["science"] for run in (first, other))
    free = ("optimizer.lr", "training.seed", *(f"model.{name}" for name in FREE))
    different = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and key not in free)
    if different:
        raise ConfigError(
            f"{other.directory}: differs from {first.directory} in {different[0]}; give one grid at a time."
        )


def average_seeds(by_rate: Mapping[float, Mapping[int, float]]) -> tuple[dict[float, float], int]:
    """Return the mean loss by rate over the same seeds, and how many these are.

    Rates that lack one of the seeds are left out: others have other losses. The seeds are those with which the most
    runs are averaged.
    """
    sets = [frozenset(losses) for losses in by_rate.values()]
    seeds = max(sets, key=lambda seeds: len(seeds) * sum(seeds <= other for other in sets))
    complete = [rate for rate in sorted(by_rate) if seeds <= set(by_rate[rate])]
    return {rate: sum(by_rate[rate][seed] for seed in seeds) / len(seeds) for rate in complete}, len(seeds)


def find_best(losses: Losses) -> BestRate | None:
    """Return the best rate of a size; None where all diverged."""
    rates = sorted(losses)
    if not any(map(math.isfinite, losses.values())):
        return None
    if len(rates) == 1:
        return BestRate(rates[0], ONE_RATE)
    lowest = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if lowest in (0, len(rates) - 1):
        return BestRate(rates[lowest], "or less" if lowest == 0 else "or more")
    x = [math.log(rate) for rate in rates[lowest - 1 : lowest + 2]]
    y = [losses[rate] for rate in rates[lowest - 1 : lowest + 2]]
    if not all(map(math.isfinite, y)):
        return BestRate(rates[lowest])
    left, right = (x[1] - x[0]) * (y[1] - y[2]), (x[1] - x[2]) * (y[1] - y[0])
    return BestRate(math.exp(x[1] - 0.5 * ((x[1] - x[0]) * left - (x[1] - x[2]) * right) / (left - right)))


def compute_shift(best: Sequence[BestRate], step: float) -> str:
    """Return by how many grid steps, of a factor `step`, the best rate of all sizes moves, in words."""
    low, high = min(best, key=lambda found: found.rate), max(best, key=lambda found: found.rate)
    shift = math.log(high.rate / low.rate) / math.log(step)
    if low.bound == "or more" or high.bound == "or less":
        return "an unknown part"
    return f"{'at least ' if low.bound or high.bound else ''}{shift:.1f}"


def format_table(losses: Mapping[Size, Mapping[float, Mapping[int, float]]]) -> Iterator[str]:
    """Yield the lines of the table: a row for each size, then how much each transfer's best rate moves."""
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    yield f"{'transfer':<9} {'width':>6} {'blocks':>7} {'seeds':>6} " + " ".join(f"{r:>8g}" for r in rates) + "  best"
    best: dict[Size, BestRate] = {}
    for size in sorted(losses):
        means, seeds = average_seeds(losses[size])
        cells = " ".join(f"{_format_loss(means.get(rate)):>8}" for rate in rates)
        if (found := find_best(means)) is not None:
            best[size] = found
        words = "-" if found is None else f"{found.rate:.2g} {found.bound}"
        yield f"{size.transfer:<9} {size.dim:>6} {size.layers:>7} {seeds:>6} {cells}  {words}".rstrip()
    if len(rates) > 1:
        yield from _describe_shifts(best, min(b / a for a, b in pairwise(rates)))


def _format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def _describe_shifts(best: Mapping[Size, BestRate], step: float) -> Iterator[str]:
    for transfer in sorted({size.transfer for size in best} - {"base"}):
        sizes = [size for size in best if size.transfer in (transfer, "base")]
        found = [best[size] for size in sizes if best[size].bound != ONE_RATE]
        if len(found) > 1:
            shift = compute_shift(found, step)
            yield f"model.transfer={transfer}: the best rate moves by {shift} of a grid step, a factor of {step:g}"


def _show(command_line: CommandLine[Settings]) -> int:
    print("\n".join(format_table(read_losses(command_line.settings.runs))))
    return 0


main, cli = COMMAND.bind(_show)

if __name__ == "__main__":
    cli()
