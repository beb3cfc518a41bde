"""Estimates from the files of runs: results and speed of each run, then means, ratios and outcomes over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan.estimate.plan import PredictedValue
from titan.metrics.columns import StepColumns
from titan.metrics.reader import METRIC_PREFIX
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
from titan.run.measured import LEAST_RUNS, compute_block_medians
from titan.run.prediction import parse_document
from titan.sweep.ledger import State

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
Speeds = Mapping[tuple[int, int], Numbers]
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
    labelled = [zip(group.runs, label_runs(group, groups), strict=True) for group in groups]
    members = [[build_member(raw, label, raw.directory in shared_directories) for raw, label in g] for g in labelled]
    return mark_outliers(members, margin)


def compare_speeds(
    members: Sequence[Member], baseline: Sequence[Member]
) -> tuple[Interval | None, Interval | None, bool, str]:
    """Return a variant's tokens/s per device, and how it compares with the baseline's.

    Returns:
        the speed; its multiple of the baseline's, without interval where it is not ranked, None for the baseline
        itself; whether a side has too few runs to rank speed; and why speed is not ranked, empty where it is.
    """
    speeds, baseline_speeds = (collect_speeds([m.raw for m in side]) for side in (members, baseline))
    speed, ratio = estimate_speed(speeds), None if members is baseline else estimate_ratio(speeds, baseline_speeds)
    if ratio is None:
        return speed, None, False, ""
    few = _has_few_runs(speeds, baseline_speeds)
    doubt = f"fewer than {LEAST_RUNS} runs of a variant" if few else ""
    if any(m.run.shared for m in (*members, *baseline)):
        doubt = "trials ran on one machine at the same time"
    return speed, Interval(ratio.estimate, None, None) if doubt else ratio, few, doubt


def build_member(raw: RawRun, label: str, shared: bool = False) -> Member:
    """Return a run with its results.

    Args:
        label: what distinguishes it from the others.
        shared: whether another run used its machine at the same time.
    """
    history = History(raw)
    steps, final, measured_speed = history.steps, history.final_validation, measure_run(raw)
    last_step = int(steps.step[-1]) if len(steps) else 0
    loads = {name: _average_last(history, getattr(steps, name)) for name in EXPERTS}
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
        tokens=int(steps.tokens[-1]) if last_step and math.isfinite(steps.tokens[-1]) else 0,
        devices=raw.devices,
        hardware=raw.hardware,
        decayed=raw.state == "finished",
        loss=_average_last(history, steps.loss),
        validation=_read_number(final.get("validation_loss")),
        bits=_read_number(final.get("bits_per_byte")),
        bits_by_source={
            name.removeprefix("bits_per_byte/"): value
            for name, value in _select_numbers(final, "bits_per_byte/").items()
        },
        speed=measured_speed,
        speed_by_attempt=measure_attempts(raw),
        cost=history.compute_cost(),
        curves=history.build_curves(),
        repeat=raw.repeat,
        diverged=has_diverged(history),
        spikes=find_spikes(history),
        shared=shared,
        predicted=_build_prediction(raw, measured_speed),
        own=_select_numbers(raw.result, METRIC_PREFIX),
        figures=_select_numbers(final, "evaluation/", "ema/", without=("_low", "_high")),
        experts={name: load for name, load in loads.items() if load is not None},
    )
    return Member(raw, history, run)


def _average_last(history: History, values: Numbers) -> float | None:
    """Return the mean of the finite values of the last steps; None where there are none."""
    last = values[-max(LAST_STEPS, round(LAST_SHARE * len(history.steps))) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def _select_numbers(record: Mapping[str, Any], *prefixes: str, without: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the finite numbers of a record whose keys begin with a prefix, and do not end with one of `without`."""
    keys = [key for key in record if key.startswith(prefixes) and not (without and key.endswith(without))]
    numbers = {key: _read_number(record[key]) for key in keys}
    return {key: value for key, value in numbers.items() if value is not None}


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def measure_attempts(raw: RawRun) -> tuple[MeasuredSpeed, ...]:
    """Return the speed of each attempt with timed steps."""
    attempts = [_select_timed_steps(raw, [document]) for document in raw.documents]
    return tuple(_measure_speed(steps, raw) for steps in attempts if len(steps))


def measure_run(raw: RawRun) -> MeasuredSpeed | None:
    """Return the speed over all attempts with the last one's settings; None where no step was timed."""
    steps = _select_comparable_steps(raw)
    return _measure_speed(steps, raw) if len(steps) else None


def _select_timed_steps(raw: RawRun, documents: Iterable[Mapping[str, Any]]) -> StepColumns:
    """Return the timed lines of attempts, without the first ones of each."""
    lines = raw.metrics.steps
    return lines.select_lines(
        np.concatenate([np.flatnonzero(lines.attempt == int(d["attempt"]))[WARM:] for d in documents])
    )


def _select_comparable_steps(raw: RawRun) -> StepColumns:
    """Return the timed lines of all attempts with the last one's settings."""
    last = format_speed_settings(raw.last_document)
    return _select_timed_steps(raw, [d for d in raw.documents if format_speed_settings(d) == last])


def format_speed_settings(document: Mapping[str, Any]) -> str:
    """Return the settings that decide an attempt's speed as one text: layout, micro-batches, memory, compilation."""
    config = document["config"]
    return repr(
        [document.get(key) for key in ("layout", "microbatches")] + [config.get(k) for k in ("memory", "compile")]
    )


def _measure_speed(steps: StepColumns, raw: RawRun) -> MeasuredSpeed:
    low, median, high = np.percentile(steps.step_seconds, [10, 50, 90])
    columns = (steps.tokens_per_second_per_device, steps.tflops_per_device, steps.mfu)
    speed, tflops, mfu = map(_compute_median, columns)
    mfu_causal = None
    if mfu is not None and speed and tflops and raw.model:  # a model whose class can't be loaded has no FLOPs
        flops_per_token = tflops * 1e12 / speed
        mfu_causal = mfu * (flops_per_token + raw.model.flops_per_token(0)) / 2 / flops_per_token
    return MeasuredSpeed(
        step_seconds=StepPercentiles(float(median), float(low), float(high)),
        tokens_per_second_per_device=speed or 0.0,
        tflops_per_device=tflops,
        mfu=mfu,
        mfu_causal=mfu_causal,
        memory_gib=float(np.nanmax(steps.memory_gib)) if np.isfinite(steps.memory_gib).any() else None,
        steps=len(steps),
    )


def _compute_median(column: Numbers) -> float | None:
    finite = column[np.isfinite(column)]
    return float(np.median(finite)) if len(finite) else None


def collect_speeds(runs: Sequence[RawRun]) -> dict[tuple[int, int], Numbers]:
    """Return the speeds of a variant's runs with timed steps; of equal seed and repeat the last run counts."""
    by_run = {(raw.seed, raw.repeat): _select_comparable_steps(raw).tokens_per_second_per_device for raw in runs}
    finite = {key: speeds[np.isfinite(speeds) & (speeds > 0)] for key, speeds in by_run.items()}
    return {key: speeds for key, speeds in finite.items() if len(speeds)}


def estimate_speed(runs: Speeds) -> Interval | None:
    """Return tokens/s per device; the interval is from the runs, or from blocks of steps of few runs."""
    if not runs:
        return None
    values = logs = _compute_log_medians(runs)
    if len(runs) < LEAST_RUNS:
        blocks = [compute_block_medians(np.log(speeds).tolist()) for speeds in runs.values()]
        values = [value for block in blocks for value in block] if all(blocks) else []
    return _build_ratio_interval(
        math.exp(float(np.mean(logs))), estimate_mean_difference(values) if len(values) > 1 else None
    )


def estimate_ratio(variant: Speeds, baseline: Speeds) -> Interval | None:
    """Return the variant's speed as a multiple of the baseline's.

    The interval is on logarithms: from pairs of equal seeds where there are several, else from several runs on both
    sides. With few runs there is none: steps show the variation within a run, not between runs.
    """
    if not variant or not baseline:
        return None
    common = [key for key in variant if key in baseline]
    logs, baseline_logs = (_compute_log_medians({k: runs[k] for k in common or runs}) for runs in (variant, baseline))
    difference = None
    if len(common) >= LEAST_RUNS:
        difference = estimate_mean_difference(np.array(logs) - np.array(baseline_logs))
    elif not _has_few_runs(variant, baseline):
        difference = compare_means(_compute_log_medians(variant), _compute_log_medians(baseline))
    estimate = difference.estimate if difference else float(np.mean(logs) - np.mean(baseline_logs))
    return _build_ratio_interval(math.exp(estimate), difference)


def _has_few_runs(variant: Speeds, baseline: Speeds) -> bool:
    """Return whether a side has too few runs for an interval; False where one has no speed at all."""
    return bool(variant and baseline) and min(len(variant), len(baseline)) < LEAST_RUNS


def _compute_log_medians(runs: Speeds) -> list[float]:
    """Return the logarithm of the median speed of each run."""
    return [math.log(float(np.median(speeds))) for speeds in runs.values()]


def _build_ratio_interval(center: float, logs: MeanDifference | None) -> Interval:
    """Return an interval of ratios around `center`, as wide as that of the logarithms."""
    log_interval = logs.compute_interval() if logs else None
    if log_interval is None or log_interval.low is None or log_interval.high is None:
        return Interval(center, None, None)
    low, high = log_interval.low - log_interval.estimate, log_interval.high - log_interval.estimate
    return Interval(center, center * math.exp(low), center * math.exp(high))


def _build_prediction(raw: RawRun, measured: MeasuredSpeed | None) -> RunPrediction | None:
    """Return the prediction of a run's last attempt beside its measured speed; None where it has none."""
    prediction = parse_document(raw.last_document)
    if prediction is None:
        return None
    steps, data = _select_comparable_steps(raw), None
    work = _read_number(np.nanmedian(steps.step_seconds - np.nan_to_num(steps.data_seconds))) if len(steps) else None
    if np.isfinite(steps.data_seconds).any():
        data = float(np.nanmean(steps.data_seconds))
    seconds = [value / max(1, len(raw.metrics.steps)) for value in (_sum_evaluations(raw), raw.metrics.stall_seconds)]
    evaluation, checkpoint = (value if value and len(raw.metrics.steps) else None for value in seconds)
    step, memory = prediction.step_seconds, prediction.rank0_memory_gib
    return RunPrediction(
        step_seconds=_build_prediction_interval(step),
        memory_gib=_build_prediction_interval(memory),
        step_parts=prediction.step_parts,
        memory_parts=prediction.memory_parts,
        constants=prediction.constants,
        step_error=step.value / measured.step_seconds.median - 1 if measured and measured.step_seconds.median else None,
        memory_error=memory.value / measured.memory_gib - 1 if measured and measured.memory_gib else None,
        work_seconds=work,
        data_seconds=data,
        evaluation_seconds=evaluation,
        checkpoint_seconds=checkpoint,
    )


def _build_prediction_interval(figure: PredictedValue) -> Interval:
    """Return a figure with its interval; a plan of modules of one's own has none."""
    low, high = (figure.low, figure.high) if figure.low < figure.high else (None, None)
    return Interval(figure.value, low, high, PREDICTION_LEVEL)


def _sum_evaluations(raw: RawRun) -> float:
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
    median of all such distances in all variants: three seeds alone hardly show a spread, all seeds of a sweep do.
    """
    finals = [[m.run.validation for m in members if m.run.validation is not None] for members in groups]
    medians = [float(np.median(values)) if len(values) >= FEWEST_SEEDS else None for values in finals]
    distances: list[float] = []
    for values, median in zip(finals, medians, strict=True):
        if median is not None:  # of an odd number of values without the median's own distance, which is always 0
            distances += sorted(abs(value - median) for value in values)[len(values) % 2 :]
    usual = float(np.quantile(distances, 0.5, method="lower")) if distances else np.inf
    limit = max(margin, OUTLIER_DEVIATIONS * usual)

    def mark(m: Member, median: float | None) -> Member:
        value = m.run.validation
        is_outlier = value is not None and median is not None and abs(value - median) > limit
        return replace(m, run=replace(m.run, outlier=True)) if is_outlier else m

    return [[mark(m, median) for m in members] for members, median in zip(groups, medians, strict=True)]


def count_outcomes(members: Sequence[Member], missing: Iterable[FailedRun] = ()) -> Outcomes:
    """Return the number of seeds with each outcome."""
    seeds: dict[Any, list[str]] = {}
    for m in members:
        outcome = "ended" if m.run.state == "finished" else classify_unfinished(m.run.state)
        seeds.setdefault(m.raw.seed, []).append("diverged" if m.run.diverged else outcome)
    for index, trial in enumerate(missing):
        typed = [o.partition("=")[2] for o in trial.overrides if o.lstrip("+~").startswith("training.seed=")]
        seed = int(typed[-1]) if typed and typed[-1].isdecimal() else f"missing {index}"
        seeds[seed] = [classify_unfinished(trial.state)]
    outcomes = [next(kind for kind in OUTCOME_KINDS if kind in kinds) for kinds in seeds.values()]
    return Outcomes(**{kind: outcomes.count(kind) for kind in OUTCOME_KINDS})


def classify_unfinished(state: State) -> str:
    """Return the outcome of a run that neither finished nor diverged: "failed" or "waiting"."""
    return "failed" if state in ("failed", "stopped") else "waiting"


def estimate_seed_mean(members: Sequence[Member], measure: MeasureFunction) -> Interval | None:
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


def estimate_time_to_target(
    members: Sequence[Member], baseline: Sequence[Member], target: float | None
) -> TimeToTarget | None:
    """Return when the runs reached the target; others are censored, and failed ones never reach it.

    None without a target, and where losses are not comparable with the baseline's in nats.
    """
    validated = [m for m in members if len(m.run.curves.validation)]
    is_in_nats = find_common_measure(members[0].raw, baseline[0].raw) == "validation loss"
    if target is None or not validated or not is_in_nats:
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
