"""The table of a comparison as data, one row per variant; terminal, Markdown and HTML lay it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from titan.console.numbers import bounds, fixed, multiple, plural, rounded, short
from titan.report import ranking, statistics
from titan.report.findings import Comparison, Interval, Quality, Reached, RunFound, Speed, Variant

Mood = Literal["", "good", "bad", "open"]


@dataclass(frozen=True)
class Cell:
    """A value as text, a detail such as its interval, and whether it is good or bad."""

    main: str = ""
    detail: str = ""
    mood: Mood = ""

    def line(self) -> str:
        """Return both in one line."""
        return f"{self.main} {self.detail}".strip()


@dataclass(frozen=True)
class Column:
    """One value of all variants.

    Attributes:
        name, unit: its heading.
        meaning: what it is, in a few words.
        cells: of each variant, in their order.
        weight: the heaviest are left out first where room is short; those of weight 0 stay.
    """

    name: str
    unit: str
    meaning: str
    cells: tuple[Cell, ...]
    weight: int = 0


_SORTS: tuple[tuple[str, str, str, int, Callable[[Variant], Cell]], ...] = (
    ("answer", "", "result of the comparison with the baseline", 0, lambda variant: answer(variant)),
    (
        "validation",
        "nats",
        "final validation loss in nats per token; 95% interval",
        0,
        lambda variant: _validation(variant),
    ),
    ("tokens", "seen", "tokens that finished runs saw, where variants differ", 0, lambda variant: _tokens(variant)),
    ("runs", "", "number of runs, and the state of unfinished ones", 3, lambda variant: _runs(variant)),
    (
        "speed",
        "of baseline",
        "tokens/s per device as a multiple of the baseline's; 95% interval",
        0,
        lambda variant: _ratio(variant),
    ),
    ("tokens/s", "per device", "at the median step", 1, lambda variant: _speed(variant)),
    (
        "step time",
        "ms",
        "median over steps (p10-p90), without the warm-up of each attempt",
        2,
        lambda variant: _step(variant),
    ),
    ("memory", "GiB", "peak memory of rank 0 over all runs", 1, lambda variant: _memory(variant)),
    (
        "MFU",
        "(causal)",
        "model FLOPs utilization with full attention, and with causal attention",
        6,
        lambda variant: _mfu(variant),
    ),
    (
        "bits",
        "per byte",
        "final validation loss in bits per byte of text; 95% interval",
        5,
        lambda variant: estimate(variant.bits),
    ),
    (
        "reached",
        "target",
        "runs that reached the target loss; median tokens to reach it",
        4,
        lambda variant: _reached(variant.reached),
    ),
    (
        "device-hours",
        "per run",
        "devices times hours of all attempts, mean over runs",
        8,
        lambda variant: _hours(variant),
    ),
    ("goodput", "", "share of the attempts' time spent in steps that count", 7, lambda variant: _goodput(variant)),
    ("loss", "training", "mean over the last steps and the runs, in nats per token", 9, lambda variant: _loss(variant)),
)


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns with a value for any variant; a single variant has no comparison columns."""
    made = (
        Column(name, unit, meaning, tuple(map(cell, comparison.variants)), weight)
        for name, unit, meaning, weight, cell in _SORTS
    )
    shown = [
        column
        for column in (*made, *_experts(comparison), *_figures(comparison))
        if any(cell.main for cell in column.cells)
    ]
    needless = {"tokens"} if len(ranking.tokens(comparison.variants)) < 2 else set()
    needless |= {"speed", "answer"} if len(comparison.variants) < 2 else set()
    return tuple(column for column in shown if column.name not in needless)


def _figures(comparison: Comparison) -> Iterator[Column]:
    """Yield a column for each file, task and average of weights that runs measured at their end."""
    keys = dict.fromkeys(key for variant in comparison.variants for run in variant.runs for key in run.figures)
    for key in keys:
        owner, _, figure = key.rpartition("/")
        shown = [name for name in _PREFERRED if f"{owner}/{name}" in keys] or [figure]
        if figure == shown[0]:
            name = owner.replace("evaluation/", "") or figure
            cells = tuple(_mean(variant, key) for variant in comparison.variants)
            yield Column(name, figure, f"{key} at the end; 95% interval over seeds", cells, 4)


def _experts(comparison: Comparison) -> Iterator[Column]:
    """Yield columns of the load of experts; without what a capacity dropped where it is nothing."""
    for key, (unit, meaning) in _LOAD.items():
        cells = tuple(_load(variant, key) for variant in comparison.variants)
        if key != "expert_dropped" or any(cell.main not in ("", "0") for cell in cells):
            yield Column("experts", unit, f"{meaning}; mean over the last steps and the runs", cells, 5)


_LOAD = {
    "expert_load_max": ("largest load", "load of the most used expert of any layer, relative to an even load"),
    "expert_entropy": ("entropy", "entropy of the choice of experts, relative to an even load"),
    "expert_dropped": ("dropped", "share of chosen experts that a capacity dropped"),
}


def _load(variant: Variant, key: str) -> Cell:
    values = [run.experts[key] for run in variant.runs if key in run.experts]
    return Cell(rounded(fmean(values))) if values else Cell()


_PREFERRED = ("acc_norm", "acc", "bits_per_byte", "perplexity", "loss", "validation_loss")
"""The figure that stands for a file, a task or averaged weights: the first of these; all are in the CSV and JSON."""


def _mean(variant: Variant, key: str) -> Cell:
    """Return the mean of a figure over the variant's runs that have it."""
    return estimate(statistics.mean([run.figures[key] for run in variant.runs if key in run.figures]))


def answer(variant: Variant) -> Cell:
    """Return the answer for a variant in a few words."""
    if variant.baseline:
        return Cell("baseline", _lost(variant))
    if variant.same_science and variant.learning is not None:
        words: dict[str, Cell] = {"yes": Cell("same", mood="good"), "no": Cell("not the same", mood="bad")}
        return words.get(variant.learning.answer, Cell("inconclusive", _lost(variant), "open"))
    if variant.untuned:
        shown, _, lost = variant.against_best.partition(", ")
        return Cell(shown or "not ranked", f"{lost}, another lr is best" if lost else "another lr is best")
    quality = ranking.verdict(variant)
    return Cell("not ranked", _lost(variant), "open") if quality is None else _quality(quality)


def _lost(variant: Variant) -> str:
    """Return how many of its seeds diverged; empty where none did."""
    return f"{variant.outcomes.diverged} of {variant.outcomes.known} diverged" if variant.outcomes.diverged else ""


def _quality(quality: Quality) -> Cell:
    where = "" if quality.at == "the end" else f"at {quality.at}"
    if quality.diverged or quality.baseline_diverged:
        return _with_lost(quality)
    if quality.answer == "undecided":
        return Cell("inconclusive", where, "open")
    if quality.answer == "no":
        return Cell("no difference", where)
    if quality.difference is None:
        return Cell("differs", where)
    return Cell("better", where, "good") if quality.difference.estimate < 0 else Cell("worse", where, "bad")


def _with_lost(quality: Quality) -> Cell:
    """Return the answer where runs diverged: plain "better" or "worse" only where it is significant over all seeds."""
    shown, lost = won(quality), lost_seeds(quality)
    if quality.answer != "yes":
        return Cell(shown, lost, "bad" if quality.diverged else "open")
    word, mood = ("better", "good") if quality.better > quality.worse else ("worse", "bad")
    return Cell(word, f"{shown}, {lost}", "good" if mood == "good" else "bad")


def won(quality: Quality) -> str:
    """Return on how many seeds the variant did better than the baseline."""
    return f"better on {quality.better} of {quality.pairs} seeds"


def lost_seeds(quality: Quality) -> str:
    """Return how many seeds of both sides diverged, or never reached the target."""
    what = "did not reach the target" if quality.at == "the target" else "diverged"
    own = [f"{quality.diverged} {what}"] if quality.diverged else []
    return ", ".join(own + [f"baseline: {quality.baseline_diverged} {what}"] * bool(quality.baseline_diverged))


def between(interval: Interval, show: Callable[[float], str] = fixed) -> str:
    """Return the interval in brackets; empty where there is none."""
    return bounds(interval.low, interval.high, show)


def estimate(interval: Interval | None, show: Callable[[float], str] = fixed) -> Cell:
    """Return an estimate with its interval."""
    return Cell() if interval is None else Cell(show(interval.estimate), between(interval, show))


def speeds(variant: Variant) -> list[Speed]:
    """Return the speeds of the variant's runs that have one."""
    return [run.speed for run in variant.runs if run.speed is not None]


def step_ms(variant: Variant) -> tuple[float, float, float] | None:
    """Return median, p10 and p90 of the step time in ms, each the median over runs; None without timed steps."""
    spreads = [speed.step_seconds for speed in speeds(variant)]
    if not spreads:
        return None
    return (
        1e3 * median(spread.median for spread in spreads),
        1e3 * median(spread.p10 for spread in spreads),
        1e3 * median(spread.p90 for spread in spreads),
    )


def memory(variant: Variant) -> float | None:
    """Return the peak memory of its runs in GiB; None where unknown."""
    return max((speed.memory_gib for speed in speeds(variant) if speed.memory_gib is not None), default=None)


def _runs(variant: Variant) -> Cell:
    seeds, states = len({run.seed for run in variant.runs}), Counter(map(_stands, variant.runs))
    shown = [plural(seeds, "seed")] if seeds != len(variant.runs) else []
    shown += [_standing(variant.runs, state, count) for state, count in sorted(states.items()) if state != "finished"]
    return Cell(str(len(variant.runs)), f"({', '.join(shown)})" if shown else "")


def _stands(run: RunFound) -> str:
    return "diverged" if run.diverged else run.state


def _standing(runs: tuple[RunFound, ...], state: str, count: int) -> str:
    """Return how many runs have a state, and how far they are."""
    done = median(run.step / max(1, run.steps) for run in runs if _stands(run) == state)
    return f"{count} {state} at {done:.0%}" if len(runs) > 1 else f"{state} at {done:.0%}"


def _step(variant: Variant) -> Cell:
    times = step_ms(variant)
    return Cell() if times is None else Cell(rounded(times[0]), f"({rounded(times[1])}-{rounded(times[2])})")


def _validation(variant: Variant) -> Cell:
    """Return the mean, with the number of diverged runs, which it excludes, and of outliers, which it includes."""
    far, found = sum(run.outlier for run in variant.runs), estimate(variant.validation)
    odd = [f"without {variant.outcomes.diverged} diverged"] if variant.outcomes.diverged and found.main else []
    odd += [plural(far, "outlier")] if far else []
    return Cell(found.main, " ".join(filter(None, [found.detail, ", ".join(odd)])))


def _tokens(variant: Variant) -> Cell:
    return Cell(" ".join(f"{seen:,}" for seen in ranking.tokens([variant])))


def _speed(variant: Variant) -> Cell:
    return Cell() if variant.speed is None else Cell(rounded(variant.speed.estimate))


def _ratio(variant: Variant) -> Cell:
    if variant.speed_ratio is None or variant.baseline:
        return Cell("1" if variant.baseline and variant.speed else "")
    found = estimate(variant.speed_ratio, multiple)
    return replace(found, detail="not ranked") if variant.speed_doubt else found


def _mfu(variant: Variant) -> Cell:
    full = _middle(speed.mfu for speed in speeds(variant))
    causal = _middle(speed.mfu_causal for speed in speeds(variant))
    return Cell() if full is None else Cell(f"{full:.1%}", "" if causal is None else f"({causal:.1%})")


def _memory(variant: Variant) -> Cell:
    most = memory(variant)
    return Cell() if most is None else Cell(fixed(most, 2 if most < 100 else 1))


def _hours(variant: Variant) -> Cell:
    hours = [run.cost.device_hours for run in variant.runs]
    return Cell(rounded(sum(hours) / len(hours))) if any(hours) else Cell()


def _goodput(variant: Variant) -> Cell:
    share = _middle(run.cost.goodput for run in variant.runs)
    return Cell() if share is None else Cell(f"{share:.1%}")


def _loss(variant: Variant) -> Cell:
    losses = [run.loss for run in variant.runs if run.loss is not None]
    return Cell(fixed(sum(losses) / len(losses))) if losses else Cell()


def _reached(reached: Reached | None) -> Cell:
    if reached is None:
        return Cell()
    after = "" if reached.median_tokens is None else f"({short(reached.median_tokens)} tokens)"
    return Cell(f"{reached.reached} of {reached.runs}", after)


def _middle(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None
