"""The tables of a comparison as data: results, own metrics, sources, and what runs were predicted to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

from titan.console.numbers import (
    format_fixed,
    format_interval,
    format_plural,
    format_ratio,
    format_rounded,
    format_tokens,
)
from titan.estimate.step_time import COMMUNICATION, COMPUTATION, IDLE, sum_groups
from titan.metrics.reader import METRIC_PREFIX
from titan.report import rank, statistics
from titan.report.findings import Comparison, Interval, MeasuredSpeed, Quality, RunPrediction, RunResult, Variant
from titan.report.render.document import Cell, Column, Mood, Table

LOAD = {
    "expert_load_max": ("largest load", "load of the most used expert of any layer, relative to an even load"),
    "expert_entropy": ("entropy", "entropy of the choice of experts, relative to an even load"),
    "expert_dropped": ("dropped", "share of chosen experts that a capacity dropped"),
}
PREFERRED = ("acc_norm", "acc", "bits_per_byte", "perplexity", "loss", "validation_loss")
"""The figure that stands for a file, a task or averaged weights: the first of these; all are in the CSV and JSON."""
MOST_METRICS = 20
"""Own metrics that a table shows; CSV and JSON have all."""
PredictedRuns = Sequence[tuple[RunResult, RunPrediction]]
"""The runs of a variant that have a prediction."""


def build_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns with a value for any variant; a single variant has no comparison columns."""
    variants = comparison.variants
    columns = [
        Column(name, unit, meaning, tuple(map(show, variants)), weight)
        for name, unit, meaning, weight, show in _COLUMNS
    ]
    for key, (unit, meaning) in LOAD.items():
        loads = (_average(run.experts.get(key) for run in variant.runs) for variant in variants)
        cells = tuple(_show(load, format_rounded) for load in loads)
        if key != "expert_dropped" or any(cell.main not in ("", "0") for cell in cells):
            columns.append(Column("experts", unit, f"{meaning}; mean over the last steps and the runs", cells, 5))
    keys = dict.fromkeys(key for variant in variants for run in variant.runs for key in run.figures)
    for key in keys:  # one for each file, task and average of weights that runs measured at their end
        owner, _, figure = key.rpartition("/")
        preferred = [name for name in PREFERRED if f"{owner}/{name}" in keys] or [figure]
        if figure == preferred[0]:
            name, meaning = owner.replace("evaluation/", "") or figure, f"{key} at the end; 95% interval over seeds"
            values = [[run.figures[key] for run in variant.runs if key in run.figures] for variant in variants]
            cells = tuple(_format_estimate(statistics.estimate_mean_interval(side)) for side in values)
            columns.append(Column(name, figure, meaning, cells, 4))
    needless = {"tokens"} if len(rank.list_token_counts(variants)) < 2 else set()
    needless |= {"speed", "answer"} if len(variants) < 2 else set()
    return tuple(c for c in columns if any(cell.main for cell in c.cells) and c.name not in needless)


def _average(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _show(value: float | None, show: Callable[[float], str] = format_fixed) -> Cell:
    """Return a cell for a value; an empty one where it is not known."""
    return Cell() if value is None else Cell(show(value))


def format_answer(variant: Variant) -> Cell:
    """Return the answer for a variant in a few words."""
    if variant.baseline:
        return Cell("baseline", _format_diverged(variant))
    if variant.same_science and variant.learning is not None:
        words = {"yes": Cell("same", mood="good"), "no": Cell("not the same", mood="bad")}
        return words.get(variant.learning.answer, Cell("inconclusive", _format_diverged(variant), "open"))
    if variant.untuned:
        wins, _, lost = variant.against_best.partition(", ")
        return Cell(wins or "not ranked", ", ".join(filter(None, (lost, "another lr is best"))))
    quality = rank.select_verdict(variant)
    return Cell("not ranked", _format_diverged(variant), "open") if quality is None else _format_quality(quality)


def _format_diverged(variant: Variant) -> str:
    """Return how many of its seeds diverged; empty where none did."""
    return f"{variant.outcomes.diverged} of {variant.outcomes.known} diverged" if variant.outcomes.diverged else ""


def _format_quality(quality: Quality) -> Cell:
    position = "" if quality.at == "the end" else f"at {quality.at}"
    is_better = quality.better > quality.worse
    if quality.diverged or quality.baseline_diverged:
        wins, lost = format_wins(quality), format_lost_seeds(quality)
        if quality.answer != "yes":  # plain "better" or "worse" only where it is significant over all seeds
            return Cell(wins, lost, "bad" if quality.diverged else "open")
        return Cell("better" if is_better else "worse", f"{wins}, {lost}", "good" if is_better else "bad")
    if quality.answer == "undecided":
        return Cell("inconclusive", position, "open")
    if quality.answer == "no" or quality.difference is None:
        return Cell("no difference" if quality.answer == "no" else "differs", position)
    if quality.difference.estimate < 0:
        return Cell("better", position, "good")
    return Cell("worse", position, "bad")


def format_wins(quality: Quality) -> str:
    """Return on how many seeds the variant did better than the baseline."""
    return f"better on {quality.better} of {quality.pairs} seeds"


def format_lost_seeds(quality: Quality) -> str:
    """Return how many seeds of both sides diverged, or never reached the target."""
    event = "did not reach the target" if quality.at == "the target" else "diverged"
    parts = [f"{quality.diverged} {event}"] if quality.diverged else []
    return ", ".join(parts + [f"baseline: {quality.baseline_diverged} {event}"] * bool(quality.baseline_diverged))


def _format_estimate(interval: Interval | None, show: Callable[[float], str] = format_fixed) -> Cell:
    """Return an estimate with its interval."""
    if interval is None:
        return Cell()
    return Cell(show(interval.estimate), format_interval(interval.low, interval.high, show))


def _list_speeds(variant: Variant) -> list[MeasuredSpeed]:
    """Return the speeds of the variant's runs that have one."""
    return [run.speed for run in variant.runs if run.speed is not None]


def compute_step_ms(variant: Variant) -> tuple[float, float, float] | None:
    """Return median, p10 and p90 of the step time in ms, each the median over runs; None without timed steps."""
    spreads = [speed.step_seconds for speed in _list_speeds(variant)]
    if not spreads:
        return None
    middle, fast, slow = (1e3 * median(getattr(s, name) for s in spreads) for name in ("median", "p10", "p90"))
    return middle, fast, slow


def find_peak_memory(variant: Variant) -> float | None:
    """Return the peak memory of its runs in GiB; None where unknown."""
    return max((speed.memory_gib for speed in _list_speeds(variant) if speed.memory_gib is not None), default=None)


def _format_runs(variant: Variant) -> Cell:
    """Return the number of runs, and of each state but finished how many there are and how far they are."""
    seeds = len({run.seed for run in variant.runs})
    details = [format_plural(seeds, "seed")] if seeds != len(variant.runs) else []
    states = ["diverged" if run.diverged else run.state for run in variant.runs]
    for state, count in sorted(Counter(states).items()):
        if state != "finished":
            runs = [run for run, own in zip(variant.runs, states, strict=True) if own == state]
            progress = median(run.step / max(1, run.steps) for run in runs)
            details.append(f"{f'{count} ' if len(variant.runs) > 1 else ''}{state} at {progress:.0%}")
    return Cell(str(len(variant.runs)), f"({', '.join(details)})" if details else "")


def _format_step(variant: Variant) -> Cell:
    times = list(map(format_rounded, compute_step_ms(variant) or ()))
    return Cell(times[0], f"({times[1]}-{times[2]})") if times else Cell()


def _format_validation(variant: Variant) -> Cell:
    """Return the mean, with the number of diverged runs, which it excludes, and of outliers, which it includes."""
    outlier_count, cell = sum(run.outlier for run in variant.runs), _format_estimate(variant.validation)
    remarks = [f"without {variant.outcomes.diverged} diverged"] if variant.outcomes.diverged and cell.main else []
    remarks += [format_plural(outlier_count, "outlier")] if outlier_count else []
    return Cell(cell.main, " ".join(filter(None, [cell.detail, ", ".join(remarks)])))


def _format_ratio(variant: Variant) -> Cell:
    if variant.speed_ratio is None or variant.baseline:
        return Cell("1" if variant.baseline and variant.speed else "")
    cell = _format_estimate(variant.speed_ratio, format_ratio)
    return replace(cell, detail="not ranked") if variant.speed_doubt else cell


def _format_mfu(variant: Variant) -> Cell:
    full = _show_share(speed.mfu for speed in _list_speeds(variant)).main
    causal = _show_share(speed.mfu_causal for speed in _list_speeds(variant)).main
    return Cell(full, f"({causal})" if full and causal else "")


def _show_share(values: Iterable[float | None]) -> Cell:
    """Return a cell for the median of shares."""
    return _show(_compute_median(values), "{:.1%}".format)


def _format_gib(value: float) -> str:
    return format_fixed(value, 2 if value < 100 else 1)


def _format_reached(variant: Variant) -> Cell:
    if variant.reached is None:
        return Cell()
    tokens = variant.reached.median_tokens
    words = "" if tokens is None else f"({format_tokens(tokens)} tokens)"
    return Cell(f"{variant.reached.reached} of {variant.reached.runs}", words)


def _compute_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without any."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


_COLUMNS: tuple[tuple[str, str, str, int, Callable[[Variant], Cell]], ...] = (
    ("answer", "", "result of the comparison with the baseline", 0, format_answer),
    ("validation", "nats", "final validation loss in nats per token; 95% interval", 0, _format_validation),
    ("tokens", "seen", "tokens that finished runs saw, where variants differ", 0,
     lambda v: Cell(" ".join(f"{count:,}" for count in rank.list_token_counts([v])))),
    ("runs", "", "number of runs, and the state of unfinished ones", 3, _format_runs),
    ("speed", "of baseline", "tokens/s per device as a multiple of the baseline's; 95% interval", 0, _format_ratio),
    ("tokens/s", "per device", "at the median step", 1, lambda v: Cell(_format_estimate(v.speed, format_rounded).main)),
    ("step time", "ms", "median over steps (p10-p90), without the warm-up of each attempt", 2, _format_step),
    ("memory", "GiB", "peak memory of rank 0 over all runs", 1, lambda v: _show(find_peak_memory(v), _format_gib)),
    ("MFU", "(causal)", "model FLOPs utilization with full attention, and with causal attention", 6, _format_mfu),
    ("bits", "per byte", "final validation loss in bits per byte of text; 95% interval", 5,
     lambda v: _format_estimate(v.bits)),
    ("reached", "target", "runs that reached the target loss; median tokens to reach it", 4, _format_reached),
    ("device-hours", "per run", "devices times hours of all attempts, mean over runs", 8,
     lambda v: _show(_average(run.cost.device_hours for run in v.runs) or None, format_rounded)),
    ("goodput", "", "share of the attempts' time spent in steps that count", 7,
     lambda v: _show_share(run.cost.goodput for run in v.runs)),
    ("loss", "training", "mean over the last steps and the runs, in nats per token", 9,
     lambda v: _show(_average(run.loss for run in v.runs))),
)  # fmt: skip
"""Name, unit, meaning, weight, and what makes the cell of a variant."""


def tabulate_own_metrics(comparison: Comparison) -> Table:
    """Return the last value of each metric of hooks, as the mean over a variant's runs; rows may be none."""
    names = sorted({name for variant in comparison.variants for run in variant.runs for name in run.own})
    rows = []
    for name in names:
        values = [[run.own[name] for run in variant.runs if name in run.own] for variant in comparison.variants]
        rows.append([name.removeprefix(METRIC_PREFIX), *(f"{fmean(own):.4g}" if own else "" for own in values)])
    if len(rows) > MOST_METRICS:
        remainder = [f"and {len(rows) - MOST_METRICS} more, in CSV and JSON", *[""] * len(comparison.variants)]
        rows = [*rows[:MOST_METRICS], remainder]
    return Table(rows, ["last value of", *(variant.label for variant in comparison.variants)])


def tabulate_sources(comparison: Comparison) -> Table:
    """Return the differences for each source of a mixture; no rows where there are none."""
    qualities = [(variant.label, q) for variant in comparison.variants for q in variant.quality if q.by_source]
    sources = sorted({source for _, quality in qualities for source in quality.by_source})
    rows = []
    for label, quality in qualities:
        cells = [_format_estimate(quality.by_source.get(source), "{:+.4f}".format).main for source in sources]
        bounds = [_format_estimate(quality.by_source.get(source)).detail for source in sources]
        texts = [" ".join(parts).strip() for parts in zip(cells, bounds, strict=True)]
        rows.append([label, f"{quality.measure} at {quality.at}", *texts])
    return Table(rows, ["variant", "difference in", *sources], words=2)


# ---- predicted and measured ----


def list_predicted(comparison: Comparison) -> list[int]:
    """Return the indices of the variants with a prediction, in the order of the main table."""
    return [i for i in rank.rank_variants(comparison.variants) if _list_predicted_runs(comparison.variants[i])]


def build_predicted_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return predicted and measured step time and memory: the columns with a value for any of `list_predicted`."""
    runs = [_list_predicted_runs(comparison.variants[i]) for i in list_predicted(comparison)]
    columns = [
        Column(name, unit, meaning, tuple(map(show, runs)), weight)
        for name, unit, meaning, weight, show in _PREDICTED_COLUMNS
    ]
    return tuple(column for column in columns if any(cell.main for cell in column.cells))


def summarize_intervals(comparison: Comparison) -> str:
    """Return how many runs were measured within the predicted intervals; empty where none was predicted."""
    runs = [pair for variant in comparison.variants for pair in _list_predicted_runs(variant)]
    judged = (("step time", _check_intervals(runs, _pair_step)), ("memory", _check_intervals(runs, _pair_memory)))
    parts = [f"{name} of {sum(within)} of {len(within)} runs" for name, within in judged if within]
    return f"Measured within the predicted interval: {', '.join(parts)}." if parts else ""


def _list_predicted_runs(variant: Variant) -> PredictedRuns:
    return [(run, run.predicted) for run in variant.runs if run.predicted is not None]


def _pair_step(run: RunResult, predicted: RunPrediction) -> tuple[Interval, float | None]:
    return predicted.step_seconds, run.speed.step_seconds.median if run.speed else None


def _pair_memory(run: RunResult, predicted: RunPrediction) -> tuple[Interval, float | None]:
    return predicted.memory_gib, run.speed.memory_gib if run.speed else None


PairValues = Callable[[RunResult, RunPrediction], tuple[Interval, float | None]]
"""Returns a predicted and a measured value."""


def _check_intervals(runs: PredictedRuns, pair_values: PairValues) -> list[bool]:
    """Return for each run with a measured value whether it lies within the predicted interval."""
    pairs = [pair_values(*run) for run in runs]
    return [i.low <= x <= (i.high or 0.0) for i, x in pairs if x is not None and i.low is not None]


def _format_ms(seconds: float) -> str:
    return format_rounded(1e3 * seconds)


def _show_prediction(pair_values: PairValues, show: Callable[[float], str]) -> Callable[[PredictedRuns], Cell]:
    """Return a cell for the prediction of the last run."""
    return lambda runs: _format_estimate(pair_values(*runs[-1])[0], show)


def _show_median(
    read: Callable[[RunResult, RunPrediction], float | None], show: Callable[[float], str] = _format_ms
) -> Callable[[PredictedRuns], Cell]:
    """Return a cell for the median of a measured value over the runs."""
    return lambda runs: _show(_compute_median(read(*run) for run in runs), show)


def _show_error(pair_values: PairValues, name: str) -> Callable[[PredictedRuns], Cell]:
    """Return a cell for the median error, and whether a run was outside of its interval."""

    def format_cell(runs: PredictedRuns) -> Cell:
        middle = _compute_median(getattr(prediction, name) for _, prediction in runs)
        if middle is None:
            return Cell()
        if name == "step_error" and any(run.shared for run, _ in runs):
            return Cell(f"{middle:+.1%}", "shared machine")
        mood: Mood = "good" if all(_check_intervals(runs, pair_values)) else "bad"
        return Cell(f"{middle:+.1%}", "" if mood == "good" else "outside", mood)  # not by colour alone

    return format_cell


def _show_group(name: str) -> Callable[[PredictedRuns], Cell]:
    """Return a cell for the predicted time of a group of causes; empty where it has none."""
    return lambda runs: _show(sum_groups(runs[-1][1].step_parts)[name] or None, _format_ms)


_ERROR = "predicted over measured, minus 1; outside: of the interval"
_COMPUTATION = "matmuls, attention, memory-bound work, optimizer, host"
_PREDICTED_COLUMNS: tuple[tuple[str, str, str, int, Callable[[PredictedRuns], Cell]], ...] = (
    ("step", "ms predicted", "step time; the interval covers 90 % of published runs", 0,
     _show_prediction(_pair_step, _format_ms)),
    ("step", "ms measured", "median step, without the warm-up of each attempt", 0,
     _show_median(lambda *run: _pair_step(*run)[1])),
    ("error", "of the step", _ERROR, 0, _show_error(_pair_step, "step_error")),
    ("memory", "GiB predicted", "of rank 0; on GPUs live tensors", 4, _show_prediction(_pair_memory, _format_gib)),
    ("memory", "GiB measured", "peak of rank 0", 5, _show_median(lambda *run: _pair_memory(*run)[1], _format_gib)),
    ("error", "of memory", _ERROR, 0, _show_error(_pair_memory, "memory_error")),
    (COMPUTATION, "ms predicted", _COMPUTATION, 1, _show_group(COMPUTATION)),
    (COMMUNICATION, "ms predicted", "exposed communication of all dimensions", 1, _show_group(COMMUNICATION)),
    (IDLE, "ms predicted", "pipeline ranks that wait for each other", 1, _show_group(IDLE)),
    ("work", "ms measured", "median step without waiting for data", 1, _show_median(lambda _, p: p.work_seconds)),
    ("data", "ms measured", "waiting for data within a step, mean; not predicted", 2,
     _show_median(lambda _, p: p.data_seconds)),
    ("evaluation", "ms measured", "between steps, per step; not predicted", 3,
     _show_median(lambda _, p: p.evaluation_seconds)),
    ("checkpoints", "ms measured", "waiting for them, per step; not predicted", 3,
     _show_median(lambda _, p: p.checkpoint_seconds)),
)  # fmt: skip
