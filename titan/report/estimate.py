"""Estimates from the files of runs: results and speed of each run, then means, ratios and outcomes over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan.estimate.plan import PredictedValue
from titan.hooks.schema import METRIC_PREFIX
from titan.metrics.columns import StepColumns
from titan.metrics.schema import WARM
from titan.report.align import RunGroup, find_common_measure, label_runs
from titan.report.collect import RawRun
from titan.report.findings import (
    FailedRun,
    Interval,
    MeasuredSpeed,
    Numbers,
    Outcomes,
    RunPrediction,
    RunResult,
    State,
    StepPercentiles,
    TimeToTarget,
)
from titan.report.history import History, find_spikes, has_diverged
from titan.report.statistics import (
    MeanDifference,
    compare_means,
    estimate_mean_difference,
    estimate_mean_interval,
    estimate_median_time,
)
from titan.run.prediction import parse_document
from titan.run.step_interval import LEAST_RUNS, compute_block_medians

LAST_STEPS, LAST_SHARE = 10, 0.02
"""The loss of training is the mean over the last share of the steps, and over so many at least."""
EXPERTS = ("expert_load_max", "expert_entropy", "expert_dropped")
PREDICTION_LEVEL = 0.9
"""Of a prediction's interval."""
OUTLIER_DEVIATIONS = 10.0
"""An outlier is so many times the median absolute deviation away: 6.7 standard deviations of a normal."""
FEWEST_SEEDS = 3
"""Seeds of a variant from which its outliers can be found."""
OUTCOME_KINDS = ("diverged", "ended", "failed", "waiting")
"""Of several repeats of a seed, the first of these outcomes counts."""
Rates = Mapping[tuple[int, int], Numbers]
"""Tokens/s per device of each timed step, by seed and repeat of the run; [steps] each."""


@dataclass(frozen=True)
class Member:
    """A run of a variant.

    Attributes:
        raw: its files.
        history: its lines that count.
        run: its results.
    """

    raw: RawRun
    history: History
    run: RunResult


MeasureFunction = Callable[[Member], float | None]
"""Returns the compared value of a run; None where it has none."""


def build_members(
    groups: Sequence[RunGroup], shared_directories: Collection[Path], margin: float
) -> list[list[Member]]:
    """Return the runs of each variant with their results.

    Args:
        shared_directories: of runs whose machine another run used at the same time.
        margin: equivalence margin, in nats: a smaller distance makes no outlier.
    """
    labels = [label_runs(group, groups) for group in groups]
    members = [
        [
            build_member(raw, label, raw.directory in shared_directories)
            for raw, label in zip(group.runs, group_labels, strict=True)
        ]
        for group, group_labels in zip(groups, labels, strict=True)
    ]
    return mark_outliers(members, margin)


@dataclass(frozen=True)
class VariantEstimates:
    """Estimates over the runs of a variant; the attributes are those of `Variant`.

    Attributes:
        speed: tokens/s per device.
        speed_ratio: its multiple of the baseline's, without interval where it is not ranked; None for the baseline.
        few: whether a side has too few runs to rank speed.
        speed_doubt: why speed is not ranked; empty where it is.
        validation: mean final validation loss over seeds, in nats per token.
        bits: the same in bits per byte.
        outcomes: of its seeds.
        reached: when it reached the target loss; None without a target, or where losses are not comparable in nats.
    """

    speed: Interval | None
    speed_ratio: Interval | None
    few: bool
    speed_doubt: str
    validation: Interval | None
    bits: Interval | None
    outcomes: Outcomes
    reached: TimeToTarget | None


def estimate_variant(
    members: Sequence[Member], missing: Sequence[FailedRun], baseline: Sequence[Member], target: float | None
) -> VariantEstimates:
    """Return the estimates of a variant, and its speed as a multiple of the baseline's.

    Args:
        baseline: runs of the baseline, the same for the baseline itself.
        target: the target loss.
    """
    rates, baseline_rates = (collect_rates([m.raw for m in side]) for side in (members, baseline))
    ratio = None if members is baseline else estimate_ratio(rates, baseline_rates)
    few = ratio is not None and _has_few_runs(rates, baseline_rates)
    doubt = "" if ratio is None else _explain_doubt((*members, *baseline), few)
    is_in_nats = find_common_measure(members[0].raw, baseline[0].raw) == "validation loss"
    return VariantEstimates(
        speed=estimate_speed(rates),
        speed_ratio=Interval(ratio.estimate, None, None) if ratio and doubt else ratio,
        few=few,
        speed_doubt=doubt,
        validation=_estimate_seed_mean(members, lambda m: m.run.validation),
        bits=_estimate_seed_mean(members, lambda m: m.run.bits),
        outcomes=count_outcomes(members, missing),
        reached=estimate_time_to_target(members, target) if is_in_nats else None,
    )


def _explain_doubt(members: Iterable[Member], few: bool) -> str:
    """Return why speed is not ranked; empty where it is."""
    if any(m.run.shared for m in members):
        return "trials ran on one machine at the same time"
    return f"fewer than {LEAST_RUNS} runs of a variant" if few else ""


def build_member(raw: RawRun, label: str, shared: bool = False) -> Member:
    """Return a run with its results.

    Args:
        label: what distinguishes it from the others.
        shared: whether another run used its machine at the same time.
    """
    history = History(raw)
    last_step = int(history.steps.step[-1]) if len(history.steps) else 0
    final, measured_speed = history.final_validation, measure_run(raw)
    run = RunResult(
        label=label,
        directory=str(raw.directory),
        science_id=raw.last_document["ids"]["science"],
        group_id=raw.last_document["ids"]["group"],
        execution_id=raw.last_document["ids"]["execution"],
        code_id=raw.last_document["ids"]["code"],
        seed=raw.seed,
        state=raw.state,
        reason=raw.reason,
        step=last_step,
        steps=raw.planned_steps,
        tokens=int(history.steps.tokens[-1]) if last_step and math.isfinite(history.steps.tokens[-1]) else 0,
        devices=raw.devices,
        hardware=raw.hardware,
        decayed=raw.state == "finished",
        loss=compute_last_loss(history),
        validation=_read_number(final.get("validation_loss")),
        bits=_read_number(final.get("bits_per_byte")),
        bits_by_source=select_by_prefix(final, "bits_per_byte/"),
        speed=measured_speed,
        speed_by_attempt=measure_attempts(raw),
        cost=history.compute_cost(),
        curves=history.build_curves(),
        repeat=raw.repeat,
        diverged=has_diverged(history),
        spikes=find_spikes(history),
        shared=shared,
        predicted=build_prediction(raw, measured_speed),
        own={METRIC_PREFIX + name: value for name, value in select_by_prefix(raw.result, METRIC_PREFIX).items()},
        figures=_select_figures(final),
        experts=average_expert_load(history),
    )
    return Member(raw, history, run)


def compute_last_loss(history: History) -> float | None:
    """Return the mean training loss of the last finite steps; None where there are none."""
    return _average_last(history, history.steps.loss)


def average_expert_load(history: History) -> dict[str, float]:
    """Return the mean load of experts over the last steps; empty for a model without experts."""
    loads = {name: _average_last(history, getattr(history.steps, name)) for name in EXPERTS}
    return {name: value for name, value in loads.items() if value is not None}


def _average_last(history: History, values: Numbers) -> float | None:
    """Return the mean of the finite values of the last steps; None where there are none."""
    last = values[-max(LAST_STEPS, round(LAST_SHARE * len(history.steps))) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def select_by_prefix(final: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the metrics of each source of a mixture, by its name."""
    metrics = {key.removeprefix(prefix): _read_number(value) for key, value in final.items() if key.startswith(prefix)}
    return {name: value for name, value in metrics.items() if value is not None}


def _select_figures(final: Mapping[str, Any]) -> dict[str, float]:
    """Return what was measured of files, tasks and averaged weights; intervals are over seeds here, not over items."""
    names = [key for key in final if key.startswith(("evaluation/", "ema/")) and not key.endswith(("_low", "_high"))]
    figures = {name: _read_number(final[name]) for name in names}
    return {name: value for name, value in figures.items() if value is not None}


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


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
    lines = raw.metrics.steps
    documents = [d for d in raw.documents if format_speed_settings(d) == format_speed_settings(raw.last_document)]
    indices = [np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:] for d in documents]
    return lines.select_lines(np.concatenate(indices))


def format_speed_settings(document: Mapping[str, Any]) -> str:
    """Return the settings that decide an attempt's speed as one text: layout, micro-batches, memory, compilation."""
    config = document["config"]
    return repr(
        [document.get(key) for key in ("layout", "microbatches")] + [config.get(k) for k in ("memory", "compile")]
    )


def compute_flops_without_attention(raw: RawRun) -> float | None:
    """Return the model's FLOPs per token without attention; None where its class can't be loaded."""
    return raw.model.flops_per_token(0) if raw.model else None


def _measure_speed(steps: StepColumns, flops_without_attention: float | None) -> MeasuredSpeed:
    low, median, high = np.percentile(steps.step_seconds, [10, 50, 90])
    rate, tflops, mfu = (
        _compute_median(column) for column in (steps.tokens_per_second_per_device, steps.tflops_per_device, steps.mfu)
    )
    return MeasuredSpeed(
        step_seconds=StepPercentiles(float(median), float(low), float(high)),
        tokens_per_second_per_device=rate or 0.0,
        tflops_per_device=tflops,
        mfu=mfu,
        mfu_causal=_compute_causal_mfu(mfu, rate, tflops, flops_without_attention),
        memory_gib=float(np.nanmax(steps.memory_gib)) if np.isfinite(steps.memory_gib).any() else None,
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


def collect_rates(runs: Sequence[RawRun]) -> dict[tuple[int, int], Numbers]:
    """Return the rates of a variant's runs with timed steps; of equal seed and repeat the last run counts."""
    rate_by_run = {(raw.seed, raw.repeat): select_comparable_steps(raw).tokens_per_second_per_device for raw in runs}
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
    if not _has_few_runs(variant, baseline):
        independent = compare_means(_compute_log_medians(variant), _compute_log_medians(baseline))
        return _build_ratio_interval(math.exp(independent.estimate), independent)
    return _build_ratio_interval(
        math.exp(float(np.mean(_compute_log_medians(variant_rates)) - np.mean(_compute_log_medians(baseline_rates)))),
        None,
    )


def _has_few_runs(variant: Rates, baseline: Rates) -> bool:
    """Return whether a side has too few runs for an interval; False where one has no speed at all."""
    return bool(variant and baseline) and min(len(variant), len(baseline)) < LEAST_RUNS


def _compute_log_medians(runs: Rates) -> list[float]:
    """Return the logarithm of the median rate of each run."""
    return [math.log(float(np.median(rate))) for rate in runs.values()]


def _compute_block_logs(runs: Rates) -> Numbers:
    """Return the log rates of blocks of steps of all runs; empty where a run is too short."""
    block_medians = [compute_block_medians(np.log(rate).tolist()) for rate in runs.values()]
    return np.concatenate(block_medians) if block_medians and all(block_medians) else np.zeros(0)


def _estimate_mean(values: Numbers) -> MeanDifference | None:
    return estimate_mean_difference(values) if len(values) > 1 else None


def _build_ratio_interval(center: float, logs: MeanDifference | None) -> Interval:
    """Return an interval of ratios around `center`, as wide as that of the logarithms."""
    log_interval = logs.compute_interval() if logs else None
    if log_interval is None or log_interval.low is None or log_interval.high is None:
        return Interval(center, None, None)
    low, high = log_interval.low - log_interval.estimate, log_interval.high - log_interval.estimate
    return Interval(center, center * math.exp(low), center * math.exp(high))


def build_prediction(raw: RawRun, measured: MeasuredSpeed | None) -> RunPrediction | None:
    """Return the prediction of a run's last attempt beside its measured speed; None where it has none."""
    prediction = parse_document(raw.last_document)
    if prediction is None:
        return None
    steps = select_comparable_steps(raw)
    return RunPrediction(
        step_seconds=_build_prediction_interval(prediction.step_seconds),
        memory_gib=_build_prediction_interval(prediction.rank0_memory_gib),
        step_parts=prediction.step_parts,
        memory_parts=prediction.memory_parts,
        constants=prediction.constants,
        step_error=_compute_error(prediction.step_seconds, measured.step_seconds.median if measured else None),
        memory_error=_compute_error(prediction.rank0_memory_gib, measured.memory_gib if measured else None),
        work_seconds=_drop_nonfinite(np.nanmedian(steps.step_seconds - np.nan_to_num(steps.data_seconds)))
        if len(steps)
        else None,
        data_seconds=_drop_nonfinite(np.nanmean(steps.data_seconds)) if np.isfinite(steps.data_seconds).any() else None,
        evaluation_seconds=_average_per_step(sum_evaluation_seconds(raw), raw),
        checkpoint_seconds=_average_per_step(raw.metrics.stall_seconds, raw),
    )


def _build_prediction_interval(figure: PredictedValue) -> Interval:
    """Return a figure with its interval; a plan of modules of one's own has none."""
    low, high = (figure.low, figure.high) if figure.low < figure.high else (None, None)
    return Interval(figure.value, low, high, PREDICTION_LEVEL)


def _compute_error(predicted: PredictedValue, measured: float | None) -> float | None:
    return predicted.value / measured - 1 if measured else None


def _drop_nonfinite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _average_per_step(seconds: float, raw: RawRun) -> float | None:
    """Return a sum over all attempts as an average per step; None where there is nothing to show."""
    steps = len(raw.metrics.steps)
    return seconds / steps if seconds and steps else None


def sum_evaluation_seconds(raw: RawRun) -> float:
    """Return the time of the evaluations during training: each line follows the one of its step.

    The last evaluation is left out: the last checkpoint is saved between its line and the one of its step.
    """
    lines = raw.metrics.steps
    ends = dict(zip(zip(lines.attempt.tolist(), lines.step.tolist(), strict=True), lines.time.tolist(), strict=True))
    total_seconds = 0.0
    for record in raw.metrics.validations:
        end, time = ends.get((record["attempt"], record["step"]), np.nan), record.get("time")
        if record["step"] < raw.planned_steps and isinstance(time, (int, float)) and time >= end:
            total_seconds += time - end
    return total_seconds


def mark_outliers(groups: Sequence[Sequence[Member]], margin: float) -> list[list[Member]]:
    """Return the members of all variants, with outliers of the final loss marked.

    An outlier is further from its variant's median than the margin, and than `OUTLIER_DEVIATIONS` times the lower
    median of all such
    distances in all variants: three seeds alone hardly show a spread, all seeds of a sweep do.
    """
    finals = [[m.run.validation for m in members if m.run.validation is not None] for members in groups]
    medians = [float(np.median(values)) if len(values) >= FEWEST_SEEDS else None for values in finals]
    distances = [
        d for values, c in zip(finals, medians, strict=True) if c is not None for d in _compute_distances(values, c)
    ]
    limit = (
        max(margin, OUTLIER_DEVIATIONS * float(np.quantile(distances, 0.5, method="lower"))) if distances else np.inf
    )
    return [[_mark_outlier(m, median, limit) for m in members] for members, median in zip(groups, medians, strict=True)]


def _compute_distances(values: Sequence[float], median: float) -> list[float]:
    """Return the distances; of an odd number of values without the median's own, which is always 0."""
    return sorted(abs(value - median) for value in values)[len(values) % 2 :]


def _mark_outlier(member: Member, median: float | None, limit: float) -> Member:
    value = member.run.validation
    if value is None or median is None or abs(value - median) <= limit:
        return member
    return replace(member, run=replace(member.run, outlier=True))


def count_outcomes(members: Sequence[Member], missing: Iterable[FailedRun] = ()) -> Outcomes:
    """Return the number of seeds with each outcome."""
    seeds: dict[Any, list[str]] = {}
    for m in members:
        seeds.setdefault(m.raw.seed, []).append(_classify_run(m.run))
    for index, trial in enumerate(missing):
        seeds[_parse_seed(trial.overrides, f"missing {index}")] = [classify_unfinished(trial.state)]
    seed_outcomes = [next(kind for kind in OUTCOME_KINDS if kind in kinds) for kinds in seeds.values()]
    return Outcomes(**{kind: seed_outcomes.count(kind) for kind in OUTCOME_KINDS})


def _classify_run(run: RunResult) -> str:
    if run.diverged:
        return "diverged"
    return "ended" if run.state == "finished" else classify_unfinished(run.state)


def classify_unfinished(state: State) -> str:
    """Return the outcome of a run that neither finished nor diverged: "failed" or "waiting"."""
    return "failed" if state in ("failed", "stopped") else "waiting"


def _parse_seed(overrides: Sequence[str], default: str) -> Any:
    seeds = [o.partition("=")[2] for o in overrides if o.lstrip("+~").startswith("training.seed=")]
    return int(seeds[-1]) if seeds and seeds[-1].isdecimal() else default


def _estimate_seed_mean(members: Sequence[Member], measure: MeasureFunction) -> Interval | None:
    """Return the mean over seeds with its interval; None without values."""
    return estimate_mean_interval(list(average_by_seed(members, measure).values()))


def collect_outcomes(members: Sequence[Member], measure: MeasureFunction) -> dict[int, float]:
    """Return the mean over the repeats of each seed; infinite where one diverged, without unknown seeds."""
    diverged = {m.raw.seed: math.inf for m in members if m.run.diverged}
    return average_by_seed(members, measure) | diverged


def average_by_seed(members: Sequence[Member], measure: MeasureFunction) -> dict[int, float]:
    """Return the mean over the repeats of each seed, without unknown and NaN values."""
    values: dict[int, list[float]] = {}
    for m in members:
        value = measure(m)
        if value is not None and not math.isnan(value):
            values.setdefault(m.raw.seed, []).append(value)
    return {seed: float(np.mean(seed_values)) for seed, seed_values in values.items()}


def estimate_time_to_target(members: Sequence[Member], target: float | None) -> TimeToTarget | None:
    """Return when the runs reached the target; others are censored, and failed ones never reach it."""
    validated = [m for m in members if len(m.run.curves.validation)]
    if target is None or not validated:
        return None
    times: list[tuple[float, float, bool]] = []
    for m in validated:
        curves, hours = m.run.curves, build_hour_axis(m)
        tokens = find_crossing(curves.validation_tokens, curves.validation, target)
        if tokens is not None:
            times.append((tokens, find_crossing(hours, curves.validation, target) or 0.0, True))
        elif m.run.state == "failed" or m.run.diverged:  # leaving it out would bias the median
            times.append((math.inf, math.inf, False))
        else:
            times.append((float(curves.validation_tokens[-1]), float(hours[-1]), False))
    tokens_spent, hours_spent, reached = (list(column) for column in zip(*times, strict=True))
    return TimeToTarget(
        runs=len(times),
        reached=sum(reached),
        median_tokens=estimate_median_time(tokens_spent, reached),
        median_device_hours=estimate_median_time(hours_spent, reached),
        at_first=sum(bool(m.run.curves.validation[0] <= target) for m in validated),
    )


def find_crossing(axis: Numbers, values: Numbers, target: float) -> float | None:
    """Return where on the axis the values first reach the target, interpolated linearly; None where they don't."""
    below = np.flatnonzero(values <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0 or not np.isfinite(values[at - 1]):
        return float(axis[at])
    share = (values[at - 1] - target) / (values[at - 1] - values[at])
    return float(axis[at - 1] + share * (axis[at] - axis[at - 1]))


def build_hour_axis(member: Member) -> Numbers:
    """Return the device-hours at each validation of a run; [validations]."""
    curves = member.run.curves
    if not len(curves.steps):
        return np.zeros(0)
    indices = np.searchsorted(curves.steps, curves.validation_steps)
    return curves.device_hours[np.minimum(indices, len(curves.steps) - 1)]
