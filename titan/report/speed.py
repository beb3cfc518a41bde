"""Speed of attempts and runs, and the speed ratio of two variants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan.config.modules import list_trusted_packages
from titan.config.settings import build
from titan.errors import ConfigError
from titan.metrics.columns import StepColumns
from titan.metrics.schema import WARM
from titan.model.schema import Llama
from titan.report.collect import RawRun
from titan.report.findings import Interval, MeasuredSpeed, Numbers, StepPercentiles
from titan.report.statistics import MeanDifference, compare_means, compute_block_medians, estimate_mean_difference


def select_timed_steps(raw: RawRun) -> dict[int, StepColumns]:
    """Return the timed lines of each attempt by its number; attempts without any are left out."""
    lines = raw.metrics.steps
    attempts = {
        int(d["attempt"]): lines.select_lines(np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:])
        for d in raw.documents
    }
    return {number: steps for number, steps in attempts.items() if len(steps)}


def measure_attempts(raw: RawRun) -> tuple[MeasuredSpeed, ...]:
    """Return the speed of each attempt with timed steps."""
    flops_without_attention = compute_flops_without_attention(raw)
    return tuple(_measure_speed(steps, flops_without_attention) for steps in select_timed_steps(raw).values())


def measure_run(raw: RawRun) -> MeasuredSpeed | None:
    """Return the speed over all attempts with the last one's settings; None where no step was timed."""
    steps = select_comparable_steps(raw)
    return _measure_speed(steps, compute_flops_without_attention(raw)) if len(steps) else None


def select_comparable_steps(raw: RawRun) -> StepColumns:
    """Return the timed lines of all attempts with the last one's settings."""
    lines, documents = (
        raw.metrics.steps,
        [d for d in raw.documents if format_speed_settings(d) == format_speed_settings(raw.last_document)],
    )
    indices = [np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:] for d in documents]
    return lines.select_lines(np.concatenate(indices))


def format_speed_settings(document: Mapping[str, Any]) -> str:
    """Return the settings that decide an attempt's speed as one text: layout, micro-batches, memory, compilation."""
    config = document["config"]
    return repr(
        [document.get(key) for key in ("layout", "microbatches")] + [config.get(k) for k in ("memory", "compile")]
    )


def build_model(raw: RawRun) -> Llama | None:
    """Return the schema of the run's model; None where its class can't be loaded."""
    name = raw.last_document["science"].get("model")
    settings = dict(raw.config["model"]) | ({"_target_": name} if name else {})
    try:
        model: Llama = build(
            Llama, settings, "model", list_trusted_packages(())
        )  # not what a run's own file would import
    except ConfigError:
        return None
    return model


def compute_flops_without_attention(raw: RawRun) -> float | None:
    """Return the model's FLOPs per token without attention; None where its class can't be loaded."""
    model = build_model(raw)
    return model.flops_per_token(0) if model else None


def _measure_speed(steps: StepColumns, flops_without_attention: float | None) -> MeasuredSpeed:
    low, median, high = np.percentile(steps.seconds, [10, 50, 90])
    rate, tflops, mfu = (_compute_median(column) for column in (steps.rate, steps.tflops, steps.mfu))
    return MeasuredSpeed(
        step_seconds=StepPercentiles(float(median), float(low), float(high)),
        tokens_per_second_per_device=rate or 0.0,
        tflops_per_device=tflops,
        mfu=mfu,
        mfu_causal=_compute_causal_mfu(mfu, rate, tflops, flops_without_attention),
        memory_gib=float(np.nanmax(steps.memory)) if np.isfinite(steps.memory).any() else None,
        steps=len(steps),
    )


def _compute_median(column: Numbers) -> float | None:
    finite = column[np.isfinite(column)]
    return float(np.median(finite)) if len(finite) else None


def _compute_causal_mfu(
    mfu: float | None, rate: float | None, tflops: float | None, flops_without_attention: float | None
) -> float | None:
    """Return MFU with half of attention's FLOPs; `flops_without_attention` is FLOPs per token without attention."""
    if mfu is None or not rate or not tflops or flops_without_attention is None:
        return None
    flops_per_token = tflops * 1e12 / rate
    return mfu * (flops_per_token + flops_without_attention) / 2 / flops_per_token


LEAST_RUNS = 3
"""With fewer runs on a side speed is not ranked: a t-interval of two runs is too wide to be useful."""
Rates = Mapping[tuple[int, int], Numbers]
"""Tokens/s per device of each timed step, by seed and repeat of the run; [steps] each."""


def collect_rates(runs: Sequence[RawRun]) -> dict[tuple[int, int], Numbers]:
    """Return the rates of a variant's runs with timed steps; of equal seed and repeat the last run counts."""
    rate_by_run = {(raw.seed, raw.repeat): select_comparable_steps(raw).rate for raw in runs}
    finite_rates = {key: rate[np.isfinite(rate) & (rate > 0)] for key, rate in rate_by_run.items()}
    return {key: rate for key, rate in finite_rates.items() if len(rate)}


def estimate_speed(runs: Rates) -> Interval | None:
    """Return tokens/s per device; the interval is from the runs, or from blocks of steps of few runs."""
    if not runs:
        return None
    logs = _compute_log_medians(runs)
    center = math.exp(float(np.mean(logs)))
    return _build_ratio_interval(
        center, estimate_mean_difference(logs) if len(runs) >= LEAST_RUNS else _estimate_mean(_compute_block_logs(runs))
    )


def estimate_ratio(variant: Rates, baseline: Rates) -> Interval | None:
    """Return the variant's speed as a multiple of the baseline's.

    The interval is on logarithms: from pairs of equal seeds where there are several, else from several runs on both
    sides. With few runs there is none: steps show the variation within a run, not between runs.
    """
    if not variant or not baseline:
        return None
    common = [key for key in variant if key in baseline]
    variant_rates, baseline_rates = ({key: runs[key] for key in common or runs} for runs in (variant, baseline))
    if len(common) >= LEAST_RUNS:
        pairs = estimate_mean_difference(
            np.array(_compute_log_medians(variant_rates)) - np.array(_compute_log_medians(baseline_rates))
        )
        return _build_ratio_interval(math.exp(pairs.estimate), pairs)
    if not has_few_runs(variant, baseline):
        independent = compare_means(_compute_log_medians(variant), _compute_log_medians(baseline))
        return _build_ratio_interval(math.exp(independent.estimate), independent)
    return _build_ratio_interval(
        math.exp(float(np.mean(_compute_log_medians(variant_rates)) - np.mean(_compute_log_medians(baseline_rates)))),
        None,
    )


def drop_doubted_interval(interval: Interval | None, doubt: str) -> Interval | None:
    """Return the ratio, without its interval where speed is not ranked."""
    return Interval(interval.estimate, None, None) if interval and doubt else interval


def has_few_runs(variant: Rates, baseline: Rates) -> bool:
    """Return whether a side has too few runs for an interval; False where one has no speed at all."""
    return bool(variant and baseline) and min(len(variant), len(baseline)) < LEAST_RUNS


def _compute_log_medians(runs: Rates) -> list[float]:
    """Return the logarithm of the median rate of each run."""
    return [math.log(float(np.median(rate))) for rate in runs.values()]


def _compute_block_logs(runs: Rates) -> Numbers:
    """Return the log rates of blocks of steps of all runs; empty where a run is too short."""
    cuts = [compute_block_medians(np.log(rate)) for rate in runs.values()]
    block_medians = [cut for cut in cuts if cut is not None]
    return np.concatenate(block_medians) if len(block_medians) == len(cuts) else np.zeros(0)


def _estimate_mean(values: Numbers) -> MeanDifference | None:
    return estimate_mean_difference(values) if len(values) > 1 else None


def _build_ratio_interval(center: float, logs: MeanDifference | None) -> Interval:
    """Return an interval of ratios around `center`, as wide as that of the logarithms."""
    log_interval = logs.compute_interval() if logs else None
    if log_interval is None or log_interval.low is None or log_interval.high is None:
        return Interval(center, None, None)
    low, high = log_interval.low - log_interval.estimate, log_interval.high - log_interval.estimate
    return Interval(center, center * math.exp(low), center * math.exp(high))
