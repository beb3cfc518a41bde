"""How fast runs went: figures of a life and of a run, and the ratio of two arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan.model.schema import Llama
from titan.report.collect import Raw
from titan.report.columns import Steps
from titan.report.findings import Interval, Numbers, Speed, Spread
from titan.report.statistics import Difference, blocks, paired, welch
from titan.settings import Refusal, build

WARM = 3
"""Steps at the beginning of a life that are not timed: compilation, first allocations; as in result.json."""


def timed(raw: Raw) -> dict[int, Steps]:
    """The lines of each life that count as timed, by its number; lives without any are left out."""
    lines = raw.metrics.steps
    lives = {int(d["life"]): lines.at(np.flatnonzero(lines.life == int(d["life"]))[WARM:]) for d in raw.documents}
    return {number: steps for number, steps in lives.items() if len(steps)}


def of_lives(raw: Raw) -> tuple[Speed, ...]:
    """The speed of each life that timed steps."""
    still = attentionless(raw)
    return tuple(_speed(steps, still) for steps in timed(raw).values())


def of_run(raw: Raw) -> Speed | None:
    """The speed over all lives that had the last one's layout; None where no step was timed."""
    steps = alike(raw)
    return _speed(steps, attentionless(raw)) if len(steps) else None


def alike(raw: Raw) -> Steps:
    """The timed lines of all lives that had the last one's layout."""
    lines, same = raw.metrics.steps, [d for d in raw.documents if d.get("layout") == raw.last.get("layout")]
    where = [np.flatnonzero(lines.life == int(d["life"]))[WARM:] for d in same]
    return lines.at(np.concatenate(where))


def model_of(raw: Raw) -> Llama | None:
    """The shape of the run's model; None where its class can't be loaded."""
    name = raw.last["science"].get("model")
    settings = dict(raw.config["model"]) | ({"_target_": name} if name else {})
    try:
        model: Llama = build(Llama, settings, "model", tuple(raw.config.get("modules") or ()))
    except Refusal:
        return None
    return model


def attentionless(raw: Raw) -> float | None:
    """FLOPs a token of the run's model without attention's; None where its class can't be loaded."""
    model = model_of(raw)
    return model.flops_per_token(0) if model else None


def _speed(steps: Steps, still: float | None) -> Speed:
    low, median, high = np.percentile(steps.seconds, [10, 50, 90])
    rate, tflops, mfu = (_median(column) for column in (steps.rate, steps.tflops, steps.mfu))
    return Speed(
        step_seconds=Spread(float(median), float(low), float(high)),
        tokens_per_second_per_device=rate or 0.0,
        tflops_per_device=tflops,
        mfu=mfu,
        mfu_causal=_causal(mfu, rate, tflops, still),
        memory_gib=float(np.nanmax(steps.memory)) if np.isfinite(steps.memory).any() else None,
        steps=len(steps),
    )


def _median(column: Numbers) -> float | None:
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else None


def _causal(mfu: float | None, rate: float | None, tflops: float | None, still: float | None) -> float | None:
    """MFU with half of attention's FLOPs: of all FLOPs a token, those of attention are what `still` lacks."""
    if mfu is None or not rate or not tflops or still is None:
        return None
    full = tflops * 1e12 / rate
    return mfu * (full + still) / 2 / full


Rates = Mapping[tuple[int, int], Numbers]
"""Tokens a second a device of each timed step, by seed and repeat of the run; [steps] each."""


def rates(runs: Sequence[Raw]) -> dict[tuple[int, int], Numbers]:
    """The rates of an arm's runs; runs without a timed step are left out, of equal ones the last counts."""
    found = {(raw.seed, raw.repeat): alike(raw).rate for raw in runs}
    known = {key: rate[np.isfinite(rate) & (rate > 0)] for key, rate in found.items()}
    return {key: rate for key, rate in known.items() if len(rate)}


def of_arm(runs: Rates) -> Interval | None:
    """Tokens a second a device, of several runs with the interval from runs, of one from blocks of its steps."""
    if not runs:
        return None
    logs = _logs(runs)
    if len(logs) > 1:
        return _exp(paired(list(logs.values())))
    rate = next(iter(runs.values()))
    cut = blocks(np.log(rate))
    return _exp(paired(cut) if cut is not None else None, float(np.median(rate)))


def ratio(arm: Rates, baseline: Rates) -> Interval | None:
    """The arm's speed as a multiple of the baseline's.

    On logarithms: from pairs of equal seeds where there are several, else from several runs on both sides, else from
    blocks of the steps of one run each, which knows nothing of how runs differ from each other.
    """
    if not arm or not baseline:
        return None
    one, two = _logs(arm), _logs(baseline)
    if len(common := [key for key in one if key in two]) > 1:
        return _exp(paired([one[key] - two[key] for key in common]))
    if len(one) > 1 and len(two) > 1:
        return _exp(welch(list(one.values()), list(two.values())))
    return _of_blocks(arm, baseline)


def from_blocks(arm: Rates, baseline: Rates) -> bool:
    """Whether `ratio` has only steps of one run to go by."""
    return len([key for key in arm if key in baseline]) < 2 and min(len(arm), len(baseline)) < 2


def _of_blocks(arm: Rates, baseline: Rates) -> Interval:
    key = next((key for key in arm if key in baseline), None)
    one = arm[key] if key else next(iter(arm.values()))
    two = baseline[key] if key else next(iter(baseline.values()))
    cuts = blocks(np.log(one)), blocks(np.log(two))
    error = None if cuts[0] is None or cuts[1] is None else welch(cuts[0], cuts[1])
    return _exp(error, float(np.median(one) / np.median(two)))


def _logs(runs: Rates) -> dict[tuple[int, int], float]:
    return {key: math.log(float(np.median(rate))) for key, rate in runs.items()}


def _exp(difference: Difference | None, estimate: float | None = None) -> Interval:
    """An interval of logarithms as one of ratios, around `estimate` where that is given."""
    found: Any = difference.interval() if difference else None
    middle = estimate if estimate is not None else math.exp(found.estimate)
    if found is None or found.low is None:
        return Interval(middle, None, None)
    shift = middle / math.exp(found.estimate)
    return Interval(middle, shift * math.exp(found.low), shift * math.exp(found.high))
