"""modded-nanogpt, track 3: runs of 124M by many optimizers, each tuned to end at a loss of 3.28 in the fewest steps.

The logs have no learning rates. The benchmark's baseline decays its rate linearly to zero over the last 70% of its
steps, and other recipes decay over 40% or more: the replay takes the baseline's schedule for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from tests.measure.published_tables import FigureCheck, read_table
from titan.scaling.early_stopping import Trajectory, examine_position, find_decay, find_stop

TARGET = 3.28
"""The loss that recipes are to reach."""
NATS_PER_STEP = 0.0045 / 100
"""What a step is worth near the end, by the benchmark's README."""
COOLDOWN = 0.7
"""The share of its steps over which the baseline's learning rate falls to zero."""
SEED_DEVIATION = 0.00117


def compute_deviation(by_length: bool = False) -> tuple[float, int, int]:
    """Return the pooled standard deviation of a seed, and the number of recipes and of runs.

    Args:
        by_length: whether runs of a recipe with other numbers of steps are another recipe.
    """
    ends: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in read_table("track3_ends.csv"):
        ends[run["recipe"], run["steps"] if by_length else ""].append(float(run["loss"]))
    repeated = [losses for losses in ends.values() if len(losses) > 1]
    squares = sum(float(np.var(losses)) * len(losses) for losses in repeated)
    runs = sum(map(len, repeated))
    return float(np.sqrt(squares / (runs - len(repeated)))), len(repeated), runs


def read_trajectories() -> list[Trajectory]:
    """Return the recipes with two runs or more; their end is the number of steps to a loss of 3.28."""
    recipes: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read_table("track3_curves.csv"):
        if int(row["runs"]) > 1:
            recipes[row["recipe"]].append(row)
    return [_build_trajectory(name, rows) for name, rows in recipes.items()]


def _build_trajectory(name: str, rows: list[dict[str, str]]) -> Trajectory:
    losses = {int(row["step"]): float(row["loss"]) for row in rows}
    length = int(rows[0]["steps"])
    decayed_from = find_decay(list(losses), [min(1.0, (1 - step / length) / COOLDOWN) for step in losses])
    return Trajectory(name, losses, length, length + (losses[length] - TARGET) / NATS_PER_STEP, decayed_from)


def check_track3() -> Iterator[FigureCheck]:
    """Yield the standard deviation of a seed, and what stopping early would have lost and saved."""
    deviation, recipes, runs = compute_deviation()
    error = deviation / SEED_DEVIATION - 1
    what = f"standard deviation of a seed, {runs} runs of {recipes} recipes"
    yield FigureCheck("track 3", what, f"{SEED_DEVIATION} nats", f"{deviation:.5f} nats", abs(error) < 0.01)
    variants = read_trajectories()
    # each recipe in turn is the new one: after all others, and after those that end worse, of which it is then the best
    stops = [(v, find_stop(v, [other for other in variants if other is not v])) for v in variants]
    saved = [v.length - stop.position for v, stop in stops if stop is not None]
    lost = sum(find_stop(v, [other for other in variants if other.end > v.end]) is not None for v in variants)
    counts = (f"{number} of {len(variants)}" for number in (0, lost))
    yield FigureCheck("track 3", "replays that stop the best recipe so far", *counts, not lost)
    share = f"{sum(saved) / sum(v.length for v in variants):.1%} ({len(saved)} recipes stopped)"
    yield FigureCheck("track 3", "steps saved in those replays", "stated", share, bool(saved))
    early, late = (examine_position(variants, step, same_shape=True).correlation for step in (1000, 2625))
    what = "rank correlation of losses with the ends, step 1000 and 2625"
    yield FigureCheck("track 3", what, "stated", f"{early:.2f} and {late:.2f}", early < late)
