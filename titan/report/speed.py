"""Speed of attempts and runs, and the speed ratio of two variants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan.config.modules import list_trusted_packages
from titan.config.settings import build
from titan.errors import ConfigError
from titan.metrics.schema import WARM
from titan.model.schema import Llama
from titan.report.collect import Raw
from titan.report.columns import Steps
from titan.report.findings import Interval, Numbers, Speed, Spread
from titan.report.statistics import Difference, blocks, paired, welch


def timed(raw: Raw) -> dict[int, Steps]:
    """Return the timed lines of each attempt by its number; attempts without any are left out."""
    lines = raw.metrics.steps
    attempts = {
        int(d["attempt"]): lines.at(np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:]) for d in raw.documents
    }
    return {number: steps for number, steps in attempts.items() if len(steps)}


def of_attempts(raw: Raw) -> tuple[Speed, ...]:
    """Return the speed of each attempt with timed steps."""
    still = attentionless(raw)
    return tuple(_speed(steps, still) for steps in timed(raw).values())


def of_run(raw: Raw) -> Speed | None:
    """Return the speed over all attempts with the last one's settings; None where no step was timed."""
    steps = alike(raw)
    return _speed(steps, attentionless(raw)) if len(steps) else None


def alike(raw: Raw) -> Steps:
    """Return the timed lines of all attempts with the last one's settings."""
    lines, same = raw.metrics.steps, [d for d in raw.documents if way(d) == way(raw.last)]
    where = [np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:] for d in same]
    return lines.at(np.concatenate(where))


def way(document: Mapping[str, Any]) -> str:
    """Return the settings that decide an attempt's speed as one text: layout, micro-batches, memory, compilation."""
    config = document["config"]
    return repr(
        [document.get(key) for key in ("layout", "microbatches")] + [config.get(k) for k in ("memory", "compile")]
    )


def model_of(raw: Raw) -> Llama | None:
    """Return the schema of the run's model; None where its class can't be loaded."""
    name = raw.last["science"].get("model")
    settings = dict(raw.config["model"]) | ({"_target_": name} if name else {})
    try:
        model: Llama = build(
            Llama, settings, "model", list_trusted_packages(())
        )  # not what a run's own file would import
    except ConfigError:
        return None
    return model


def attentionless(raw: Raw) -> float | None:
    """Return the model's FLOPs per token without attention; None where its class can't be loaded."""
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
    """Return MFU with half of attention's FLOPs; `still` is FLOPs per token without attention."""
    if mfu is None or not rate or not tflops or still is None:
        return None
    full = tflops * 1e12 / rate
    return mfu * (full + still) / 2 / full


FEW = 3
"""With fewer runs on a side speed is not ranked: a t-interval of two runs is too wide to be useful."""
Rates = Mapping[tuple[int, int], Numbers]
"""Tokens/s per device of each timed step, by seed and repeat of the run; [steps] each."""


def rates(runs: Sequence[Raw]) -> dict[tuple[int, int], Numbers]:
    """Return the rates of a variant's runs with timed steps; of equal seed and repeat the last run counts."""
    found = {(raw.seed, raw.repeat): alike(raw).rate for raw in runs}
    known = {key: rate[np.isfinite(rate) & (rate > 0)] for key, rate in found.items()}
    return {key: rate for key, rate in known.items() if len(rate)}


def of_variant(runs: Rates) -> Interval | None:
    """Return tokens/s per device; the interval is from the runs, or from blocks of steps of few runs."""
    if not runs:
        return None
    logs = _logs(runs)
    middle = math.exp(float(np.mean(logs)))
    return _around(middle, paired(logs) if len(runs) >= FEW else _alone(_blocks(runs)))


def ratio(variant: Rates, baseline: Rates) -> Interval | None:
    """Return the variant's speed as a multiple of the baseline's.

    The interval is on logarithms: from pairs of equal seeds where there are several, else from several runs on both
    sides. With few runs there is none: steps show the variation within a run, not between runs.
    """
    if not variant or not baseline:
        return None
    common = [key for key in variant if key in baseline]
    one, two = ({key: runs[key] for key in common or runs} for runs in (variant, baseline))
    if len(common) >= FEW:
        pairs = paired(np.array(_logs(one)) - np.array(_logs(two)))
        return _around(math.exp(pairs.estimate), pairs)
    if not few(variant, baseline):
        independent = welch(_logs(variant), _logs(baseline))
        return _around(math.exp(independent.estimate), independent)
    return _around(math.exp(float(np.mean(_logs(one)) - np.mean(_logs(two)))), None)


def doubted(found: Interval | None, doubt: str) -> Interval | None:
    """Return the ratio, without its interval where speed is not ranked."""
    return Interval(found.estimate, None, None) if found and doubt else found


def few(variant: Rates, baseline: Rates) -> bool:
    """Return whether a side has too few runs for an interval; False where one has no speed at all."""
    return bool(variant and baseline) and min(len(variant), len(baseline)) < FEW


def _logs(runs: Rates) -> list[float]:
    """Return the logarithm of the median rate of each run."""
    return [math.log(float(np.median(rate))) for rate in runs.values()]


def _blocks(runs: Rates) -> Numbers:
    """Return the log rates of blocks of steps of all runs; empty where a run is too short."""
    cuts = [blocks(np.log(rate)) for rate in runs.values()]
    known = [cut for cut in cuts if cut is not None]
    return np.concatenate(known) if len(known) == len(cuts) else np.zeros(0)


def _alone(values: Numbers) -> Difference | None:
    return paired(values) if len(values) > 1 else None


def _around(middle: float, logs: Difference | None) -> Interval:
    """Return an interval of ratios around `middle`, as wide as that of the logarithms."""
    found = logs.interval() if logs else None
    if found is None or found.low is None or found.high is None:
        return Interval(middle, None, None)
    low, high = found.low - found.estimate, found.high - found.estimate
    return Interval(middle, middle * math.exp(low), middle * math.exp(high))
