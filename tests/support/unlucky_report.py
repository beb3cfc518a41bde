"""A/A comparisons whose worst runs diverge: `python -m tests.support.unlucky_report [REPETITIONS]`.

Two variants draw their final losses from one distribution, and the runs with the largest losses diverge. The other runs
look better than the variant is, so a test of those alone finds "better" far too often. The command prints how often the
comparison finds it, and how often a paired t-test of the other runs does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.support.made_runs import Story, made
from titan.report import superiority
from titan.report.collect import collect_runs
from titan.report.estimate import Member, build_member
from titan.report.findings import Numbers
from titan.report.statistics import ALPHA, estimate_mean_difference

MARGIN, SPREAD = 0.02, 0.02


@dataclass(frozen=True)
class Scene:
    """How many seeds there are, and above how many standard deviations runs of the two variants diverge."""

    seeds: int
    variant: float
    baseline: float


SCENES = {
    "none diverges": Scene(6, np.inf, np.inf),
    "both lose a sixth": Scene(6, 1.0, 1.0),
    "both lose a half": Scene(12, 0.0, 0.0),
    "the variant alone loses a half": Scene(6, 0.0, np.inf),
    "the variant alone loses a sixth": Scene(12, 1.0, np.inf),
}


@dataclass(frozen=True)
class Rates:
    """Shares of the repetitions in which the variant was called better or worse, or survivors alone look better."""

    better: float
    worse: float
    survivors: float


def templates(folder: Path, seeds: int) -> list[Member]:
    """Finished runs, one a seed, whose results are to be replaced."""
    runs = [made(folder / str(seed), Story(seed=seed, steps=4, every=0, device={})) for seed in range(seeds)]
    return [build_member(raw, "") for raw in collect_runs(runs).runs]


def simulated(members: Sequence[Member], scene: Scene, repetitions: int, seed: int = 0) -> Rates:
    """Compare equals many times over."""
    random, found = np.random.default_rng(seed), []
    for _ in range(repetitions):
        draws = random.normal(size=(2, scene.seeds))
        variant, baseline = (
            _drawn(members, d, at) for d, at in zip(draws, (scene.variant, scene.baseline), strict=True)
        )
        ((told, *_),) = superiority.correct_comparisons([superiority.compare_variant(variant, baseline)], MARGIN)
        found.append((*_said(told.answer, told.text), _survivors(variant, baseline)))
    return Rates(*(float(share) for share in np.mean(found, axis=0)))


def _drawn(members: Sequence[Member], draws: Numbers, limit: float) -> list[Member]:
    return [
        replace(m, run=replace(m.run, validation=None, diverged=True, state="failed"))
        if draw > limit
        else replace(m, run=replace(m.run, validation=3 + SPREAD * float(draw)))
        for m, draw in zip(members, draws, strict=False)
    ]


def _said(answer: str, text: str) -> tuple[bool, bool]:
    return answer == "yes" and text.startswith("better"), answer == "yes" and text.startswith("worse")


def _survivors(variant: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Whether a paired t-test of the pairs that are left finds the variant better."""
    ends = [(a.run.validation, b.run.validation) for a, b in zip(variant, baseline, strict=True)]
    left = [a - b for a, b in ends if a is not None and b is not None]
    found = estimate_mean_difference(left) if len(left) > 1 else None
    return found is not None and found.estimate < 0 and (found.compute_p_value() or 0) < ALPHA


def main(repetitions: int = 2000) -> None:
    """Print the shares of all scenes."""
    with tempfile.TemporaryDirectory() as folder:
        members = templates(Path(folder), max(scene.seeds for scene in SCENES.values()))
        for name, scene in SCENES.items():
            rates = simulated(members[: scene.seeds], scene, repetitions)
            print(
                f"{name}, {scene.seeds} seeds: better {rates.better:.1%}, worse {rates.worse:.1%}; "
                f"survivors alone better {rates.survivors:.1%}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
