"""Campaigns of useless and of real ideas: `python -m tests.measure.campaign_table [campaigns=2000] [pairs=12]`."""

from __future__ import annotations

import sys

import numpy as np

from tests.support.campaigns import NOISES, follow_running_best, measure_power, simulate


def main() -> None:
    """Print the table of a simulation."""
    given = dict(word.split("=") for word in sys.argv[1:])
    campaigns, pairs, ideas = int(given.get("campaigns", 2000)), int(given.get("pairs", 12)), 100
    rng = np.random.default_rng(0)
    kept, deceived = follow_running_best(rng, campaigns, ideas)
    print(f"{campaigns:,} campaigns of {ideas} useless ideas")
    print(f"running best: keeps {kept:.2f} on average, believes itself {deceived:.2f} standard deviations better")
    for name, noise in NOISES.items():
        outcome = simulate(rng, campaigns, np.zeros(ideas), noise, pairs=pairs)
        print(f"titan, {name} noise: {outcome.share_with_any:.2%} keep any; {outcome.pairs.mean():.1f} pairs an idea")
    print("\npower, and mean pairs, for an effect in standard deviations of a seed")
    print(f"{'effect':>6}  {'first idea':>16}  {'after 20 useless':>16}  {'after 99 useless':>16}")
    for effect in (-1.0, 0.5, 1.0, 2.0, 3.0):
        cells = [measure_power(rng, campaigns, effect, before, pairs) for before in (0, 20, 99)]
        print(f"{effect:6.1f}  " + "  ".join(f"{power:8.1%} {used:7.1f}" for power, used in cells))


if __name__ == "__main__":
    main()
