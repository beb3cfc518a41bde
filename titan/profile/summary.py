"""The summary of a profile: where the time and memory of its steps went on one rank, beside the plan. Free of torch.

Each profiled rank writes `profile/step-N-rank-R.json` beside its trace; N is the first recorded step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from titan.cluster import operation_kinds as kinds
from titan.console.numbers import format_rounded
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.atomic import write_atomic
from titan.profile.breakdown import Breakdown
from titan.profile.schema import Profile

PREDICTED = {
    kinds.MATMULS: ("matmuls", "experts"),
    kinds.ATTENTION: ("attention",),
    kinds.RECOMPUTATION: ("recomputation",),
    kinds.OTHER: ("memory-bound", "optimizer"),
    "communication": (
        "tensor parallelism", "context parallelism", "expert parallelism", "weights and gradients",
        "pipeline transfers", "pipeline idle",
    ),
    kinds.HOST: ("host",),
}  # fmt: skip
"""Causes of `titan.estimate.step_time` by the row that they are compared with: a rank without work waits for a
message of another stage."""
_FIGURES = dict[str, float]
_KINDS: dict[str, Any] = {"rank": int, "steps": list[int], "seconds": float, "parts": _FIGURES, "hidden": _FIGURES}
_OPTIONAL: dict[str, Any] = {
    "predicted": _FIGURES, "memory": _FIGURES, "memory_sentence": str, "slow_factor": float,
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """The profile of one rank, as an average of its steps.

    Attributes:
        rank: its number.
        steps: the recorded steps.
        seconds: of a step.
        parts: see `Breakdown`.
        hidden: likewise.
        predicted: seconds of a step by cause, as the run recorded its prediction; empty without one.
        memory: bytes at the peak by category; empty where allocations were not recorded.
        memory_sentence: what was alive at the peak.
        slow_factor: `profile.slow_factor` of the run.
    """

    rank: int
    steps: Sequence[int]
    seconds: float
    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    predicted: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    memory_sentence: str = ""
    slow_factor: float = Profile().slow_factor

    @property
    def own_seconds(self) -> float:
        """See `Breakdown.own_seconds`."""
        return Breakdown(self.steps[0], self.seconds, self.parts).own_seconds


def average_steps(rank: int, steps: Sequence[Breakdown], predicted: Mapping[str, float]) -> Summary:
    """Return the average of the steps of a profile; there is at least one."""

    def average_figures(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for figures in dicts for name in figures)
        return {name: sum(figures.get(name, 0.0) for figures in dicts) / len(dicts) for name in names}

    seconds = sum(step.seconds for step in steps) / len(steps)
    parts, hidden = (average_figures([getattr(step, name) for step in steps]) for name in ("parts", "hidden"))
    return Summary(rank, [step.step for step in steps], seconds, parts, hidden, predicted)


def build_trace_path(folder: Path, step: int, rank: int) -> Path:
    """Return the file of a trace: those of all ranks in one folder, as tools expect them."""
    return folder / f"step-{step}" / f"rank-{rank}.json.gz"


def write(folder: Path, summary: Summary) -> None:
    """Write a summary into a run's folder `profile`."""
    file = folder / f"step-{summary.steps[0]}-rank-{summary.rank}.json"
    write_atomic(file, json.dumps(dataclasses.asdict(summary), indent=1))


def read(directory: Path, step: int | None) -> list[Summary]:
    """Return the summaries of the ranks of a run that were profiled together, by rank.

    Args:
        step: a recorded step; None: of the latest profile.
    """
    summaries = sorted(_iterate_summaries(directory / "profile"), key=lambda stored: stored.rank)
    firsts = [s.steps[0] for s in summaries if step is None or step in s.steps]
    if not summaries:
        raise ConfigError(
            f"{directory}: has no profile; touch {directory}/profile/now while it runs, or train with profile=once."
        )
    if not firsts:
        recorded_steps = ", ".join(str(number) for number in sorted({n for s in summaries for n in s.steps}))
        raise ConfigError(f"step={step}: was not profiled; give one of {recorded_steps}.")
    return [summary for summary in summaries if summary.steps[0] == max(firsts)]


def _iterate_summaries(folder: Path) -> Iterator[Summary]:
    for file in folder.glob("step-*-rank-*.json"):
        try:
            yield _parse_summary(untrusted.parse_object(untrusted.read_regular_file(file).decode()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: is no summary of a profile ({error}); remove it.") from error


def _parse_summary(content: dict[str, Any]) -> Summary:
    for name, kind in _KINDS.items():
        untrusted.check_type(content[name], kind, name)
    for name in _OPTIONAL.keys() & content.keys():
        untrusted.check_type(content[name], _OPTIONAL[name], name)
    if not content["steps"] or not content["seconds"] > 0:
        raise ValueError(f"it is of {len(content['steps'])} steps of {content['seconds']:g} s")
    return Summary(**content)


def format_table(summary: Summary) -> list[str]:
    """Return the table of a summary: seconds and shares by kind, beside the prediction."""
    steps = f"step {summary.steps[0]}" + (f" to {summary.steps[-1]}" if len(summary.steps) > 1 else "")
    plan = _sum_predictions(summary)
    head = f"profile of {steps}, rank {summary.rank}: {format_rounded(summary.seconds)} s per step"
    columns = f"  {'':<24} {'seconds':>9} {'share':>7}" + (f" {'predicted':>10}" if plan else "")
    rows = []
    for name, seconds in _iterate_rows(summary):
        predicted = f" {format_rounded(plan[name]) + ' s':>10}" if name in plan else ""
        rows.append(f"  {name:<24} {format_rounded(seconds):>9} {seconds / summary.seconds:>7.1%}{predicted}")
    hidden = [f"{kind} {format_rounded(seconds)} s" for kind, seconds in summary.hidden.items()]
    hidden_lines = [f"  hidden beside computation: {', '.join(hidden)}"] * bool(hidden)
    memory = [f"  {name:<24} {size / 2**20:>9,.1f} MiB" for name, size in summary.memory.items()]
    if memory:
        total = sum(summary.memory.values()) / 2**20
        memory = [f"memory at the peak: {total:,.1f} MiB", *memory, summary.memory_sentence]
    return [head, columns, *rows, *hidden_lines, *memory]


def _iterate_rows(summary: Summary) -> Iterator[tuple[str, float]]:
    """Yield the rows of the table: communication as a whole, then its kinds."""
    parts = summary.parts
    yield from ((kind, parts[kind]) for kind in kinds.COMPUTATION if kind in parts)
    exposed = [(kind, parts[kind]) for kind in kinds.COLLECTIVES if kind in parts]
    if exposed or "communication" in _sum_predictions(summary):
        yield "communication", sum(seconds for _, seconds in exposed)
        yield from ((f"  {kind}, exposed", seconds) for kind, seconds in exposed)
    yield from ((kind, parts[kind]) for kind in (kinds.DATA, kinds.HOST, kinds.IDLE) if kind in parts)


def _sum_predictions(summary: Summary) -> dict[str, float]:
    """Return the predicted seconds of the rows that have some."""
    sums = {row: sum(summary.predicted.get(cause, 0.0) for cause in causes) for row, causes in PREDICTED.items()}
    return {row: seconds for row, seconds in sums.items() if seconds}


def compare_ranks(summaries: Sequence[Summary]) -> list[str]:
    """Return a line per rank, and one that names those whose own time is longest; nothing for one rank."""
    if len(summaries) < 2:
        return []
    usual = median(summary.own_seconds for summary in summaries)
    rows = [
        f"  rank {rank_summary.rank}: its own work {format_rounded(rank_summary.own_seconds)} s, communication "
        f"{format_rounded(sum(rank_summary.parts.get(kind, 0.0) for kind in kinds.COLLECTIVES))} s, "
        f"data {format_rounded(rank_summary.parts.get(kinds.DATA, 0.0))} s"
        for rank_summary in summaries
    ]
    slow = [s for s in summaries if s.own_seconds > s.slow_factor * usual > 0]
    warnings = [
        f"rank {s.rank} is slow: its own work takes {s.own_seconds / usual:.2f} times the median rank's" for s in slow
    ]
    factor = summaries[0].slow_factor
    no_warning = f"  no rank is slow: none takes {factor:g} times the median's own work (profile.slow_factor)"
    return ["ranks:", *rows, *(warnings or [no_warning])]
