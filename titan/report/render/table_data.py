"""The table of a comparison as data: a row a variant, a column a figure; terminal, Markdown and HTML lay it out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from titan.console.numbers import short
from titan.report import ranking
from titan.report.findings import Arm, Comparison, Interval, Quality, Reached, RunFound, Speed

Mood = Literal["", "good", "bad", "open"]


@dataclass(frozen=True)
class Cell:
    """A figure as text, what qualifies it, such as its interval, and whether it is good or bad news."""

    main: str = ""
    detail: str = ""
    mood: Mood = ""

    def line(self) -> str:
        """Both in one line."""
        return f"{self.main} {self.detail}".strip()


@dataclass(frozen=True)
class Column:
    """One figure of all arms.

    Attributes:
        name, unit: its heading.
        meaning: what it is, in a few words.
        cells: of each arm, in their order.
        weight: where there is too little room the heaviest go first; those of weight 0 stay.
    """

    name: str
    unit: str
    meaning: str
    cells: tuple[Cell, ...]
    weight: int = 0


_SORTS: tuple[tuple[str, str, str, int, Callable[[Arm], Cell]], ...] = (
    ("answer", "", "result of the comparison with the baseline", 0, lambda arm: answer(arm)),
    ("validation", "nats", "final validation loss in nats per token; 95% interval", 0, lambda arm: _validation(arm)),
    ("tokens", "seen", "tokens that finished runs saw, where variants differ", 0, lambda arm: _tokens(arm)),
    ("runs", "", "number of runs, and the state of unfinished ones", 3, lambda arm: _runs(arm)),
    (
        "speed",
        "of baseline",
        "tokens/s per device as a multiple of the baseline's; 95% interval",
        0,
        lambda arm: _ratio(arm),
    ),
    ("tokens/s", "per device", "at the median step", 1, lambda arm: _speed(arm)),
    ("step time", "ms", "median over steps (p10-p90), without the warm-up of each attempt", 2, lambda arm: _step(arm)),
    ("memory", "GiB", "peak memory of rank 0 over all runs", 1, lambda arm: _memory(arm)),
    (
        "MFU",
        "(causal)",
        "model FLOPs utilization with full attention, and with causal attention",
        6,
        lambda arm: _mfu(arm),
    ),
    (
        "bits",
        "per byte",
        "final validation loss in bits per byte of text; 95% interval",
        5,
        lambda arm: estimate(arm.bits),
    ),
    (
        "reached",
        "target",
        "runs that reached the target loss; median tokens to reach it",
        4,
        lambda arm: _reached(arm.reached),
    ),
    ("device-hours", "per run", "devices times hours of all attempts, mean over runs", 8, lambda arm: _hours(arm)),
    ("goodput", "", "share of the attempts' time spent in steps that count", 7, lambda arm: _goodput(arm)),
    ("loss", "training", "mean over the last steps and the runs, in nats per token", 9, lambda arm: _loss(arm)),
)


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """The columns that have something to say of any arm; a single arm is held against nothing."""
    made = (
        Column(name, unit, meaning, tuple(map(cell, comparison.arms)), weight)
        for name, unit, meaning, weight, cell in _SORTS
    )
    told = [column for column in made if any(cell.main for cell in column.cells)]
    needless = {"tokens"} if len(ranking.tokens(comparison.arms)) < 2 else set()
    needless |= {"speed", "answer"} if len(comparison.arms) < 2 else set()
    return tuple(column for column in told if column.name not in needless)


def answer(arm: Arm) -> Cell:
    """The answer about an arm in a few words."""
    if arm.baseline:
        return Cell("baseline", _lost(arm))
    if arm.same_science and arm.learning is not None:
        words: dict[str, Cell] = {"yes": Cell("same", mood="good"), "no": Cell("not the same", mood="bad")}
        return words.get(arm.learning.answer, Cell("inconclusive", _lost(arm), "open"))
    if arm.untuned:
        told, _, lost = arm.against_best.partition(", ")
        return Cell(told or "not ranked", f"{lost}, another lr is best" if lost else "another lr is best")
    quality = ranking.verdict(arm)
    return Cell("not ranked", _lost(arm), "open") if quality is None else _quality(quality)


def _lost(arm: Arm) -> str:
    """How many of its seeds diverged; empty where none did."""
    return f"{arm.outcomes.diverged} of {arm.outcomes.known} diverged" if arm.outcomes.diverged else ""


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
    """The answer where runs diverged: "better" and "worse" alone only where that is shown of all seeds."""
    told, lost = won(quality), lost_seeds(quality)
    if quality.answer != "yes":
        return Cell(told, lost, "bad" if quality.diverged else "open")
    word, mood = ("better", "good") if quality.better > quality.worse else ("worse", "bad")
    return Cell(word, f"{told}, {lost}", "good" if mood == "good" else "bad")


def won(quality: Quality) -> str:
    """On how many seeds the arm did better than the baseline."""
    return f"better on {quality.better} of {quality.pairs} seeds"


def lost_seeds(quality: Quality) -> str:
    """How many seeds of both sides diverged, or never came to the target."""
    what = "did not reach the target" if quality.at == "the target" else "diverged"
    own = [f"{quality.diverged} {what}"] if quality.diverged else []
    return ", ".join(own + [f"baseline: {quality.baseline_diverged} {what}"] * bool(quality.baseline_diverged))


def number(value: float, digits: int = 4) -> str:
    """A measured value with so many decimals."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def few(value: float) -> str:
    """A value with three digits that count, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(value: float) -> str:
    """How many times something is another."""
    return number(value, 3) if abs(value) < 10 else few(value)


def between(interval: Interval, show: Callable[[float], str] = number) -> str:
    """The interval in brackets; empty where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{show(interval.low)}, {show(interval.high)}]"


def estimate(interval: Interval | None, show: Callable[[float], str] = number) -> Cell:
    """An estimate with its interval."""
    return Cell() if interval is None else Cell(show(interval.estimate), between(interval, show))


def speeds(arm: Arm) -> list[Speed]:
    """Of the arm's runs that have any."""
    return [run.speed for run in arm.runs if run.speed is not None]


def step_ms(arm: Arm) -> tuple[float, float, float] | None:
    """Median, p10 and p90 of the step time in ms, each the median over the runs; None where no step was timed."""
    spreads = [speed.step_seconds for speed in speeds(arm)]
    if not spreads:
        return None
    return (
        1e3 * median(spread.median for spread in spreads),
        1e3 * median(spread.p10 for spread in spreads),
        1e3 * median(spread.p90 for spread in spreads),
    )


def memory(arm: Arm) -> float | None:
    """The most memory that any of its runs held, in GiB."""
    return max((speed.memory_gib for speed in speeds(arm) if speed.memory_gib is not None), default=None)


def _runs(arm: Arm) -> Cell:
    seeds, states = len({run.seed for run in arm.runs}), Counter(map(_stands, arm.runs))
    told = [f"{seeds} seed{'s' * (seeds > 1)}"] if seeds != len(arm.runs) else []
    told += [_standing(arm.runs, state, count) for state, count in sorted(states.items()) if state != "finished"]
    return Cell(str(len(arm.runs)), f"({', '.join(told)})" if told else "")


def _stands(run: RunFound) -> str:
    return "diverged" if run.diverged else run.state


def _standing(runs: tuple[RunFound, ...], state: str, count: int) -> str:
    """How many stand so, and how far they are."""
    done = median(run.step / max(1, run.steps) for run in runs if _stands(run) == state)
    return f"{count} {state} at {done:.0%}" if len(runs) > 1 else f"{state} at {done:.0%}"


def _step(arm: Arm) -> Cell:
    times = step_ms(arm)
    return Cell() if times is None else Cell(few(times[0]), f"({few(times[1])}-{few(times[2])})")


def _validation(arm: Arm) -> Cell:
    """The mean, and what it does not show: diverged runs, which are not in it, and outliers, which are."""
    far, found = sum(run.outlier for run in arm.runs), estimate(arm.validation)
    odd = [f"without {arm.outcomes.diverged} diverged"] if arm.outcomes.diverged and found.main else []
    odd += [f"{far} outlier{'s' * (far > 1)}"] if far else []
    return Cell(found.main, " ".join(filter(None, [found.detail, ", ".join(odd)])))


def _tokens(arm: Arm) -> Cell:
    return Cell(" ".join(f"{seen:,}" for seen in ranking.tokens([arm])))


def _speed(arm: Arm) -> Cell:
    return Cell() if arm.speed is None else Cell(few(arm.speed.estimate))


def _ratio(arm: Arm) -> Cell:
    if arm.speed_ratio is None or arm.baseline:
        return Cell("1" if arm.baseline and arm.speed else "")
    found = estimate(arm.speed_ratio, ratio)
    return replace(found, detail="not judged") if arm.speed_doubt else found


def _mfu(arm: Arm) -> Cell:
    full = _middle(speed.mfu for speed in speeds(arm))
    causal = _middle(speed.mfu_causal for speed in speeds(arm))
    return Cell() if full is None else Cell(f"{full:.1%}", "" if causal is None else f"({causal:.1%})")


def _memory(arm: Arm) -> Cell:
    most = memory(arm)
    return Cell() if most is None else Cell(number(most, 2 if most < 100 else 1))


def _hours(arm: Arm) -> Cell:
    hours = [run.cost.device_hours for run in arm.runs]
    return Cell(few(sum(hours) / len(hours))) if any(hours) else Cell()


def _goodput(arm: Arm) -> Cell:
    share = _middle(run.cost.goodput for run in arm.runs)
    return Cell() if share is None else Cell(f"{share:.1%}")


def _loss(arm: Arm) -> Cell:
    losses = [run.loss for run in arm.runs if run.loss is not None]
    return Cell(number(sum(losses) / len(losses))) if losses else Cell()


def _reached(reached: Reached | None) -> Cell:
    if reached is None:
        return Cell()
    after = "" if reached.median_tokens is None else f"({short(reached.median_tokens)} tokens)"
    return Cell(f"{reached.reached} of {reached.runs}", after)


def _middle(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None
