"""The makespan of pipelines: that of the timetable, for every schedule and any costs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titan.parallelism.pipeline.makespan import LinkedOrder, link_order, link_schedule
from titan.parallelism.pipeline.schedules import (
    SCHEDULES,
    Action,
    Cell,
    DeadlockError,
    Overlap,
    compute_timetable,
    list_actions,
    order_actions,
)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name, ranks, count = draw(st.sampled_from(list(SCHEDULES))), draw(st.integers(1, 6)), draw(st.integers(1, 24))
    per_rank = SCHEDULES[name].stages if SCHEDULES[name].fixed else draw(st.integers(1, 4))
    assume(SCHEDULES[name].allows(ranks, per_rank, count))
    return name, ranks, per_rank, count


def check(order: LinkedOrder, rows: list[list[Cell]], seed: int, hop: float) -> None:
    """Compare an order, whose stages take random times, with its timetable."""
    numbers = random.Random(seed)
    seconds = {key: numbers.uniform(0.1, 3.0) for key in order.keys}
    spans = compute_timetable(rows, lambda action: seconds[action.stage, action.kind], hop)
    assert order.compute_makespan(seconds, hop) == max(span.end for span in spans)
    actions = [(action.stage, action.kind) for row in rows for cell in row for action in list_actions(cell)]
    assert order.counts == {key: actions.count(key) for key in set(actions)}


@given(shapes(), st.integers(0, 99), st.sampled_from([0.0, 0.3, 5.0]))
def test_it_is_that_of_the_timetable(shape: tuple[str, int, int, int], seed: int, hop: float) -> None:
    check(link_schedule(*shape), order_actions(*shape), seed, hop)


def test_an_overlap_sends_after_all_of_it() -> None:
    rows: list[list[Cell]] = [
        [Action(0, "F", 0), Overlap((Action(0, "F", 1), Action(0, "B", 0))), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    ]
    check(link_order(rows), rows, 0, 0.0)


def test_a_file_may_change(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    counts = []
    for count in (2, 4):
        rows = order_actions("1F1B", 2, 1, count)
        path.write_text("\n".join(",".join(map(str, row)) for row in rows))
        counts.append(link_schedule(str(path), 2, 1, count).counts[0, "F"])
    assert counts == [2, 4]


def test_a_deadlock_is_an_error() -> None:
    rows: list[list[Cell]] = [
        [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
        [Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    with pytest.raises(DeadlockError, match=r"rank 0 waits at 0B0, rank 1 waits at 1F1"):
        link_order(rows)
