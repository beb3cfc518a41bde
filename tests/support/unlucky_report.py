"""A/A comparisons whose worst runs diverge.

Two variants draw their final losses from one distribution, and the runs with the largest losses diverge. The other runs
look better than the variant is, so a test of those alone finds "better" far too often. `tests.measure.unlucky_table`
prints how often the comparison finds it, and how often a paired t-test of the other runs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.support.made_runs import Story, make_run
from titan.report import superiority
from titan.report.collect import collect_runs
from titan.report.estimate import Member, build_member
from titan.report.findings import Numbers
from titan.report.statistics import ALPHA, estimate_mean_difference

MARGIN, SPREAD = 0.02, 0.02


@dataclass(frozen=True)
class DivergenceScene:
    """How many seeds there are, and above how many standard deviations runs of the two variants diverge."""

    seeds: int
    variant: float
    baseline: float


SCENES = {
    "none diverges": DivergenceScene(6, np.inf, np.inf),
    "both lose a sixth": DivergenceScene(6, 1.0, 1.0),
    "both lose a half": DivergenceScene(12, 0.0, 0.0),
    "the variant alone loses a half": DivergenceScene(6, 0.0, np.inf),
    "the variant alone loses a sixth": DivergenceScene(12, 1.0, np.inf),
}


@dataclass(frozen=True)
class VerdictShares:
    """Shares of the repetitions in which the variant was called better or worse, or survivors alone look better."""

    better: float
    worse: float
    survivors: float


def make_templates(folder: Path, seeds: int) -> list[Member]:
    """Finished runs, one a seed, whose results are to be replaced."""
    runs = [make_run(folder / str(seed), Story(seed=seed, steps=4, every=0, device={})) for seed in range(seeds)]
    return [build_member(raw, "") for raw in collect_runs(runs).runs]


def simulate_comparisons(
    members: Sequence[Member], scene: DivergenceScene, repetitions: int, seed: int = 0
) -> VerdictShares:
    """Compare equals many times over."""
    random, outcomes = np.random.default_rng(seed), []
    for _ in range(repetitions):
        draws = random.normal(size=(2, scene.seeds))
        variant, baseline = (
            _draw_members(members, d, at) for d, at in zip(draws, (scene.variant, scene.baseline), strict=True)
        )
        ((verdict, *_),) = superiority.correct_comparisons([superiority.compare_variant(variant, baseline)], MARGIN)
        outcomes.append((*_read_verdict(verdict.answer, verdict.text), _survivors_look_better(variant, baseline)))
    return VerdictShares(*(float(share) for share in np.mean(outcomes, axis=0)))


def _draw_members(members: Sequence[Member], draws: Numbers, limit: float) -> list[Member]:
    return [
        replace(m, run=replace(m.run, validation=None, diverged=True, state="failed"))
        if draw > limit
        else replace(m, run=replace(m.run, validation=3 + SPREAD * float(draw)))
        for m, draw in zip(members, draws, strict=False)
    ]


def _read_verdict(verdict: str, text: str) -> tuple[bool, bool]:
    return verdict == "yes" and text.startswith("better"), verdict == "yes" and text.startswith("worse")


def _survivors_look_better(variant: Sequence[Member], baseline: Sequence[Member]) -> bool:
    """Whether a paired t-test of the pairs that are left finds the variant better."""
    ends = [(a.run.validation, b.run.validation) for a, b in zip(variant, baseline, strict=True)]
    differences = [a - b for a, b in ends if a is not None and b is not None]
    estimate = estimate_mean_difference(differences) if len(differences) > 1 else None
    return estimate is not None and estimate.estimate < 0 and (estimate.compute_p_value() or 0) < ALPHA
