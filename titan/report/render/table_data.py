"""The tables of a comparison as data: results, own metrics, sources; terminal, Markdown and HTML lay them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from titan.console.numbers import (
    format_fixed,
    format_interval,
    format_plural,
    format_ratio,
    format_rounded,
    format_tokens,
)
from titan.hooks.schema import METRIC_PREFIX
from titan.report import rank, statistics
from titan.report.findings import Comparison, Interval, MeasuredSpeed, Quality, RunResult, TimeToTarget, Variant

Mood = Literal["", "good", "bad", "open"]


@dataclass(frozen=True)
class Cell:
    """A value as text, a detail such as its interval, and whether it is good or bad."""

    main: str = ""
    detail: str = ""
    mood: Mood = ""

    def format_line(self) -> str:
        """Return both in one line."""
        return f"{self.main} {self.detail}".strip()


@dataclass(frozen=True)
class Column:
    """One value of all variants.

    Attributes:
        name: its heading.
        unit: the unit in the heading.
        meaning: what it is, in a few words.
        cells: of each variant, in their order.
        weight: the heaviest are left out first where room is short; those of weight 0 stay.
    """

    name: str
    unit: str
    meaning: str
    cells: tuple[Cell, ...]
    weight: int = 0


_COLUMNS: tuple[tuple[str, str, str, int, Callable[[Variant], Cell]], ...] = (
    ("answer", "", "result of the comparison with the baseline", 0, lambda variant: format_answer(variant)),
    (
        "validation",
        "nats",
        "final validation loss in nats per token; 95% interval",
        0,
        lambda variant: _format_validation(variant),
    ),
    (
        "tokens",
        "seen",
        "tokens that finished runs saw, where variants differ",
        0,
        lambda variant: _format_tokens(variant),
    ),
    ("runs", "", "number of runs, and the state of unfinished ones", 3, lambda variant: _format_runs(variant)),
    (
        "speed",
        "of baseline",
        "tokens/s per device as a multiple of the baseline's; 95% interval",
        0,
        lambda variant: _format_ratio(variant),
    ),
    ("tokens/s", "per device", "at the median step", 1, lambda variant: _format_speed(variant)),
    (
        "step time",
        "ms",
        "median over steps (p10-p90), without the warm-up of each attempt",
        2,
        lambda variant: _format_step(variant),
    ),
    ("memory", "GiB", "peak memory of rank 0 over all runs", 1, lambda variant: _format_memory(variant)),
    (
        "MFU",
        "(causal)",
        "model FLOPs utilization with full attention, and with causal attention",
        6,
        lambda variant: _format_mfu(variant),
    ),
    (
        "bits",
        "per byte",
        "final validation loss in bits per byte of text; 95% interval",
        5,
        lambda variant: format_estimate(variant.bits),
    ),
    (
        "reached",
        "target",
        "runs that reached the target loss; median tokens to reach it",
        4,
        lambda variant: _format_reached(variant.reached),
    ),
    (
        "device-hours",
        "per run",
        "devices times hours of all attempts, mean over runs",
        8,
        lambda variant: _format_hours(variant),
    ),
    (
        "goodput",
        "",
        "share of the attempts' time spent in steps that count",
        7,
        lambda variant: _format_goodput(variant),
    ),
    (
        "loss",
        "training",
        "mean over the last steps and the runs, in nats per token",
        9,
        lambda variant: _format_loss(variant),
    ),
)


def build_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns with a value for any variant; a single variant has no comparison columns."""
    all_columns = (
        Column(name, unit, meaning, tuple(map(cell, comparison.variants)), weight)
        for name, unit, meaning, weight, cell in _COLUMNS
    )
    visible_columns = [
        column
        for column in (*all_columns, *_build_expert_columns(comparison), *_build_figure_columns(comparison))
        if any(cell.main for cell in column.cells)
    ]
    needless = {"tokens"} if len(rank.list_token_counts(comparison.variants)) < 2 else set()
    needless |= {"speed", "answer"} if len(comparison.variants) < 2 else set()
    return tuple(column for column in visible_columns if column.name not in needless)


def _build_figure_columns(comparison: Comparison) -> Iterator[Column]:
    """Yield a column for each file, task and average of weights that runs measured at their end."""
    keys = dict.fromkeys(key for variant in comparison.variants for run in variant.runs for key in run.figures)
    for key in keys:
        owner, _, figure = key.rpartition("/")
        preferred = [name for name in _PREFERRED if f"{owner}/{name}" in keys] or [figure]
        if figure == preferred[0]:
            name = owner.replace("evaluation/", "") or figure
            cells = tuple(_average_figure(variant, key) for variant in comparison.variants)
            yield Column(name, figure, f"{key} at the end; 95% interval over seeds", cells, 4)


def _build_expert_columns(comparison: Comparison) -> Iterator[Column]:
    """Yield columns of the load of experts; without what a capacity dropped where it is nothing."""
    for key, (unit, meaning) in _LOAD.items():
        cells = tuple(_average_load(variant, key) for variant in comparison.variants)
        if key != "expert_dropped" or any(cell.main not in ("", "0") for cell in cells):
            yield Column("experts", unit, f"{meaning}; mean over the last steps and the runs", cells, 5)


_LOAD = {
    "expert_load_max": ("largest load", "load of the most used expert of any layer, relative to an even load"),
    "expert_entropy": ("entropy", "entropy of the choice of experts, relative to an even load"),
    "expert_dropped": ("dropped", "share of chosen experts that a capacity dropped"),
}


def _average_load(variant: Variant, key: str) -> Cell:
    values = [run.experts[key] for run in variant.runs if key in run.experts]
    return Cell(format_rounded(fmean(values))) if values else Cell()


_PREFERRED = ("acc_norm", "acc", "bits_per_byte", "perplexity", "loss", "validation_loss")
"""The figure that stands for a file, a task or averaged weights: the first of these; all are in the CSV and JSON."""


def _average_figure(variant: Variant, key: str) -> Cell:
    """Return the mean of a figure over the variant's runs that have it."""
    return format_estimate(
        statistics.estimate_mean_interval([run.figures[key] for run in variant.runs if key in run.figures])
    )


def format_answer(variant: Variant) -> Cell:
    """Return the answer for a variant in a few words."""
    if variant.baseline:
        return Cell("baseline", _format_diverged(variant))
    if variant.same_science and variant.learning is not None:
        words: dict[str, Cell] = {"yes": Cell("same", mood="good"), "no": Cell("not the same", mood="bad")}
        return words.get(variant.learning.answer, Cell("inconclusive", _format_diverged(variant), "open"))
    if variant.untuned:
        wins_text, _, lost_text = variant.against_best.partition(", ")
        return Cell(
            wins_text or "not ranked", f"{lost_text}, another lr is best" if lost_text else "another lr is best"
        )
    quality = rank.select_verdict(variant)
    return Cell("not ranked", _format_diverged(variant), "open") if quality is None else _format_quality(quality)


def _format_diverged(variant: Variant) -> str:
    """Return how many of its seeds diverged; empty where none did."""
    return f"{variant.outcomes.diverged} of {variant.outcomes.known} diverged" if variant.outcomes.diverged else ""


def _format_quality(quality: Quality) -> Cell:
    position_text = "" if quality.at == "the end" else f"at {quality.at}"
    if quality.diverged or quality.baseline_diverged:
        return _format_diverged_quality(quality)
    if quality.answer == "undecided":
        return Cell("inconclusive", position_text, "open")
    if quality.answer == "no":
        return Cell("no difference", position_text)
    if quality.difference is None:
        return Cell("differs", position_text)
    return (
        Cell("better", position_text, "good")
        if quality.difference.estimate < 0
        else Cell("worse", position_text, "bad")
    )


def _format_diverged_quality(quality: Quality) -> Cell:
    """Return the answer where runs diverged: plain "better" or "worse" only where it is significant over all seeds."""
    wins_text, lost_text = format_wins(quality), format_lost_seeds(quality)
    if quality.answer != "yes":
        return Cell(wins_text, lost_text, "bad" if quality.diverged else "open")
    word, mood = ("better", "good") if quality.better > quality.worse else ("worse", "bad")
    return Cell(word, f"{wins_text}, {lost_text}", "good" if mood == "good" else "bad")


def format_wins(quality: Quality) -> str:
    """Return on how many seeds the variant did better than the baseline."""
    return f"better on {quality.better} of {quality.pairs} seeds"


def format_lost_seeds(quality: Quality) -> str:
    """Return how many seeds of both sides diverged, or never reached the target."""
    event = "did not reach the target" if quality.at == "the target" else "diverged"
    parts = [f"{quality.diverged} {event}"] if quality.diverged else []
    return ", ".join(parts + [f"baseline: {quality.baseline_diverged} {event}"] * bool(quality.baseline_diverged))


def format_range(interval: Interval, show: Callable[[float], str] = format_fixed) -> str:
    """Return the interval in brackets; empty where there is none."""
    return format_interval(interval.low, interval.high, show)


def format_estimate(interval: Interval | None, show: Callable[[float], str] = format_fixed) -> Cell:
    """Return an estimate with its interval."""
    return Cell() if interval is None else Cell(show(interval.estimate), format_range(interval, show))


def list_speeds(variant: Variant) -> list[MeasuredSpeed]:
    """Return the speeds of the variant's runs that have one."""
    return [run.speed for run in variant.runs if run.speed is not None]


def compute_step_ms(variant: Variant) -> tuple[float, float, float] | None:
    """Return median, p10 and p90 of the step time in ms, each the median over runs; None without timed steps."""
    spreads = [speed.step_seconds for speed in list_speeds(variant)]
    if not spreads:
        return None
    return (
        1e3 * median(spread.median for spread in spreads),
        1e3 * median(spread.p10 for spread in spreads),
        1e3 * median(spread.p90 for spread in spreads),
    )


def find_peak_memory(variant: Variant) -> float | None:
    """Return the peak memory of its runs in GiB; None where unknown."""
    return max((speed.memory_gib for speed in list_speeds(variant) if speed.memory_gib is not None), default=None)


def _format_runs(variant: Variant) -> Cell:
    seeds, states = len({run.seed for run in variant.runs}), Counter(map(_classify_state, variant.runs))
    details = [format_plural(seeds, "seed")] if seeds != len(variant.runs) else []
    details += [
        _format_progress(variant.runs, state, count) for state, count in sorted(states.items()) if state != "finished"
    ]
    return Cell(str(len(variant.runs)), f"({', '.join(details)})" if details else "")


def _classify_state(run: RunResult) -> str:
    return "diverged" if run.diverged else run.state


def _format_progress(runs: tuple[RunResult, ...], state: str, count: int) -> str:
    """Return how many runs have a state, and how far they are."""
    progress = median(run.step / max(1, run.steps) for run in runs if _classify_state(run) == state)
    return f"{count} {state} at {progress:.0%}" if len(runs) > 1 else f"{state} at {progress:.0%}"


def _format_step(variant: Variant) -> Cell:
    times = compute_step_ms(variant)
    return (
        Cell()
        if times is None
        else Cell(format_rounded(times[0]), f"({format_rounded(times[1])}-{format_rounded(times[2])})")
    )


def _format_validation(variant: Variant) -> Cell:
    """Return the mean, with the number of diverged runs, which it excludes, and of outliers, which it includes."""
    outlier_count, cell = sum(run.outlier for run in variant.runs), format_estimate(variant.validation)
    remarks = [f"without {variant.outcomes.diverged} diverged"] if variant.outcomes.diverged and cell.main else []
    remarks += [format_plural(outlier_count, "outlier")] if outlier_count else []
    return Cell(cell.main, " ".join(filter(None, [cell.detail, ", ".join(remarks)])))


def _format_tokens(variant: Variant) -> Cell:
    return Cell(" ".join(f"{token_count:,}" for token_count in rank.list_token_counts([variant])))


def _format_speed(variant: Variant) -> Cell:
    return Cell() if variant.speed is None else Cell(format_rounded(variant.speed.estimate))


def _format_ratio(variant: Variant) -> Cell:
    if variant.speed_ratio is None or variant.baseline:
        return Cell("1" if variant.baseline and variant.speed else "")
    cell = format_estimate(variant.speed_ratio, format_ratio)
    return replace(cell, detail="not ranked") if variant.speed_doubt else cell


def _format_mfu(variant: Variant) -> Cell:
    full = compute_median(speed.mfu for speed in list_speeds(variant))
    causal = compute_median(speed.mfu_causal for speed in list_speeds(variant))
    return Cell() if full is None else Cell(f"{full:.1%}", "" if causal is None else f"({causal:.1%})")


def _format_memory(variant: Variant) -> Cell:
    most = find_peak_memory(variant)
    return Cell() if most is None else Cell(format_fixed(most, 2 if most < 100 else 1))


def _format_hours(variant: Variant) -> Cell:
    hours = [run.cost.device_hours for run in variant.runs]
    return Cell(format_rounded(sum(hours) / len(hours))) if any(hours) else Cell()


def _format_goodput(variant: Variant) -> Cell:
    share = compute_median(run.cost.goodput for run in variant.runs)
    return Cell() if share is None else Cell(f"{share:.1%}")


def _format_loss(variant: Variant) -> Cell:
    losses = [run.loss for run in variant.runs if run.loss is not None]
    return Cell(format_fixed(sum(losses) / len(losses))) if losses else Cell()


def _format_reached(reached: TimeToTarget | None) -> Cell:
    if reached is None:
        return Cell()
    tokens_text = "" if reached.median_tokens is None else f"({format_tokens(reached.median_tokens)} tokens)"
    return Cell(f"{reached.reached} of {reached.runs}", tokens_text)


def compute_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without any."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


OWN_METRICS, MOST_METRICS = "Own metrics", 20
"""The section's heading, and the rows that it shows; CSV and JSON have all."""


def tabulate_own_metrics(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows: the last value of each metric, as the mean over a variant's runs; rows may be none."""
    names = sorted({name for variant in comparison.variants for run in variant.runs for name in run.own})
    rows = [
        [name.removeprefix(METRIC_PREFIX), *(_average_own_metric(variant, name) for variant in comparison.variants)]
        for name in names
    ]
    remainder = [[f"and {len(rows) - MOST_METRICS} more, in CSV and JSON", *[""] * len(comparison.variants)]]
    visible_rows = rows if len(rows) <= MOST_METRICS else rows[:MOST_METRICS] + remainder
    return ["last value of", *(variant.label for variant in comparison.variants)], visible_rows


def _average_own_metric(variant: Variant, name: str) -> str:
    values = [run.own[name] for run in variant.runs if name in run.own]
    return f"{fmean(values):.4g}" if values else ""


def tabulate_sources(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of the differences for each source of a mixture; no rows where there are none."""
    qualities = [
        (variant.label, quality) for variant in comparison.variants for quality in variant.quality if quality.by_source
    ]
    sources = sorted({source for _, quality in qualities for source in quality.by_source})
    rows = []
    for label, quality in qualities:
        intervals = [quality.by_source.get(source) for source in sources]
        cells = ["" if i is None else f"{i.estimate:+.4f} {format_range(i)}".strip() for i in intervals]
        rows.append([label, f"{quality.measure} at {quality.at}", *cells])
    return ["variant", "difference in", *sources], rows
