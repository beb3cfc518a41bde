"""Pipelines as arithmetic: agrees with torch's own schedules, and rejects what torch would fail on."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from titan.errors import ConfigError
from titan.parallelism.pipeline import stage_plan
from titan.parallelism.pipeline.runtime import PipelineShape, list_torch_actions
from titan.parallelism.pipeline.schedules import SCHEDULES, Action, Cell, format_cell, order_actions
from titan.parallelism.pipeline.timing import compute_idle_share, compute_order_idle, link_order, link_schedule

NAMES = list(SCHEDULES)
TORCH_NAMES = [name for name, kind in SCHEDULES.items() if kind.in_torch]
SINGLE = ("GPipe", "1F1B")


def shapes(name: str, ranks: int) -> list[tuple[int, int]]:
    """Stages on a rank and micro-batches that a schedule allows."""
    kind = SCHEDULES[name]
    laps = (kind.stages,) if kind.fixed else (1, 2, 3)
    return [(lap, count) for lap in laps for count in (1, 3, 5, 6, 8, 10, 16) if kind.allows(ranks, lap, count)]


class FakeStage(SimpleNamespace):
    """As much of torch's stage as schedules look at; notes what is asked of it."""

    def __init__(self, index: int, ranks: int, count: int) -> None:
        super().__init__(stage_index=index, num_stages=count, group_size=ranks, group_rank=index % ranks)
        self.is_last, self.submod = index == count - 1, None
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **__: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def no_operations(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations


def torch_schedule(name: str, ranks: int, laps: int, count: int, rank: int = 0) -> Any:
    """A rank's schedule at torch."""
    mine = [FakeStage(rank + lap * ranks, ranks, ranks * laps) for lap in range(laps)]
    kind: Any = torch_schedules.get_schedule_class(name)
    return kind(mine[0] if name in SINGLE else mine, count)


def torch_order(name: str, ranks: int, laps: int, count: int) -> list[list[str]]:
    """What torch's ranks do."""
    if name in SINGLE:  # these run loops of their own; what they show as their order only resembles those
        return [_performed(name, ranks, count, rank) for rank in range(ranks)]
    found = torch_schedule(name, ranks, laps, count).pipeline_order
    return [[str(action) for action in found[rank] if action is not None] for rank in range(ranks)]


def _performed(name: str, ranks: int, count: int, rank: int) -> list[str]:
    schedule = torch_schedule(name, ranks, 1, count, rank)
    with mock.patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches([()] * count, [{}] * count)
    return list(schedule._stage.done)


def parsed(text: str) -> list[list[Cell]]:
    """Rows of actions, such as "0F0 0B0 | 1F0 1B0"."""
    return [[_parse_cell(word) for word in row.split()] for row in text.split("|")]


def _parse_cell(word: str) -> Cell:
    """An action as torch writes it, such as 0F0 or (1F1;1B0)OVERLAP_F_B."""
    return tuple(Action(int(stage), kind, int(m)) for stage, kind, m in re.findall("([0-9])([A-Z])([0-9])", word))


# ---- torch's schedules ----


@pytest.mark.full
@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_orders_are_those_of_torch(name: str, ranks: int) -> None:
    differ = []
    for laps, count in shapes(name, ranks):
        mine = [[format_cell(cell) for cell in row] for row in order_actions(name, ranks, laps, count)]
        differ += [(laps, count)] if mine != torch_order(name, ranks, laps, count) else []
    assert shapes(name, ranks) and differ == []


@pytest.mark.parametrize(
    ("name", "ranks", "laps", "count"),
    [
        pytest.param("Interleaved1F1B", 2, 7, 4, id="interleaved"),
        pytest.param("Interleaved1F1B", 9, 7, 63, id="405b"),
        pytest.param("InterleavedZeroBubble", 4, 5, 16, id="zero-bubble"),
        pytest.param("LoopedBFS", 3, 6, 6, id="breadth-first"),
        pytest.param("DualPipeV", 2, 2, 8, id="two-stages"),
    ],
)
def test_stages_are_gathered_as_often_as_by_torch(name: str, ranks: int, laps: int, count: int) -> None:
    gathers = link_schedule(name, ranks, laps, count).gathers
    for rank, actions in torch_schedule(name, ranks, laps, count).pipeline_order_with_comms.items():
        assert gathers[rank] == Counter(a.stage_index for a in actions if a.computation_type == torch_schedules.UNSHARD)


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_torch_refuses_is_refused(name: str, ranks: int) -> None:
    for laps, count in itertools.product((1,) if name in SINGLE else (1, 2, 3), range(1, 14)):
        try:
            torch_schedule(name, ranks, laps, count)
            built = True
        except ValueError:
            built = False
        assert SCHEDULES[name].allows(ranks, laps, count) is built, (laps, count)
        try:
            stage_plan.check_schedule(name, ranks, ranks * laps, count)
        except ConfigError:
            assert not built, (laps, count)
        else:
            assert built, (laps, count)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_facts_are_those_of_torch(name: str) -> None:
    kind = SCHEDULES[name]
    single = issubclass(torch_schedules.get_schedule_class(name), torch_schedules.PipelineScheduleSingle)
    assert single == (kind.fixed and kind.stages == 1)
    kinds = {a.kind for row in order_actions(name, 4, kind.stages, 8) for cell in row for a in cell}
    assert kind.splits_backward == ("I" in kinds)
    if not single:
        owners = torch_schedule(name, 4, kind.stages, 8).stage_index_to_group_rank
        assert stage_plan.place_stages(name, 4, 4 * kind.stages) == [owners[stage] for stage in range(4 * kind.stages)]
    laps = generate_stage_to_rank_mapping(3, 15, kind.placement)
    assert stage_plan.place_stages(name, 3, 15) == [laps[stage] for stage in range(15)]


# ---- time ----


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_idle_share_is_that_of_the_order(name: str, ranks: int) -> None:
    differ = []
    for laps, count in shapes(name, ranks):
        found = compute_idle_share(name, ranks, laps, count)
        played = compute_order_idle(order_actions(name, ranks, laps, count))
        least = SCHEDULES[name].least_idle(ranks, laps, count)
        same = found == pytest.approx(played, abs=1e-12) and found >= least - 1e-12
        differ += [] if same else [(laps, count, found, played, least)]
    assert shapes(name, ranks) and differ == []


@pytest.mark.parametrize(
    ("name", "laps", "count", "share"),
    [
        # (p - 1) / (m + p - 1) and with v stages a rank (p - 1) / (v m + p - 1), as in the papers
        pytest.param("GPipe", 1, 8, 3 / 11, id="GPipe"),
        pytest.param("1F1B", 1, 8, 3 / 11, id="1F1B"),
        pytest.param("Interleaved1F1B", 2, 8, 3 / 19, id="interleaved"),
        pytest.param("ShallowInterleaved1F1B", 2, 8, 3 / 19, id="interleaved, shallow"),
        pytest.param("LoopedBFS", 3, 8, 3 / 27, id="breadth first"),
        # only the first forward on its way is waited for, of 3 units a stage and micro-batch
        pytest.param("InterleavedZeroBubble", 1, 8, 3 / (3 * 8 + 3), id="ZB1P"),
        pytest.param("ZBVZeroBubble", 2, 8, 3 / (6 * 8 + 3), id="ZB-V"),
        pytest.param("DualPipeV", 2, 8, 6 / (6 * 8 + 6), id="DualPipeV"),
        # too few to fill the pipeline
        pytest.param("ZBVZeroBubble", 2, 1, 1 - 6 / 18, id="ZB-V, one micro-batch"),
        pytest.param("GPipe", 1, 1, 3 / 4, id="one after the other"),
    ],
)
def test_idle_shares_of_four_ranks(name: str, laps: int, count: int, share: float) -> None:
    assert compute_idle_share(name, 4, laps, count) == pytest.approx(share)


def count_seconds(rows: Sequence[Sequence[Cell]], costs: Sequence[float], hop: float = 0.0) -> float:
    """The makespan with the time of a forward pass, and of a backward pass for inputs and for weights."""
    forward, inputs, weights = costs
    kinds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    order = link_order(rows)
    makespan = order.compute_makespan({key: kinds[key[1]] for key in order.keys}, hop)
    spans = order.compute_timetable(lambda action: kinds[action.kind], hop)
    assert makespan == max((span.end for span in spans), default=0.0)
    assert all(span.end - span.start == pytest.approx(kinds[span.action.kind]) for span in spans)
    return makespan


@pytest.mark.parametrize(
    ("text", "costs", "makespan", "idle"),
    [
        pytest.param("0F0 0B0", (1, 1, 1), 3, 0, id="alone"),
        pytest.param("0F0 0B0 | 1F0 1B0", (1, 1, 1), 6, 1 / 2, id="two stages, one micro-batch"),
        pytest.param("0F0 0I0 0W0 | 1F0 1I0 1W0", (1, 2, 4), 10, 2 / 5, id="weights keep nobody waiting"),
        pytest.param("0F0 1F0 1B0 0B0", (2, 3, 5), 20, 0, id="two stages, one rank"),
        pytest.param("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1", (1, 1, 1), 9, 3 / 9, id="1F1B by hand"),
        # 1F0 2-3, 1B0 3-5, the pair 5-8 sends on at 8, although its backward began at 6
        pytest.param("0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1", (1, 1, 1), 9, 3 / 9, id="overlap"),
        pytest.param("", (1, 1, 1), 0, 0, id="nothing"),
    ],
)
def test_times_by_hand(text: str, costs: tuple[float, float, float], makespan: float, idle: float) -> None:
    """The idle share is with all costs 1."""
    assert count_seconds(parsed(text), costs) == makespan
    assert compute_order_idle(parsed(text)) == pytest.approx(idle)


def test_overlap_waits_for_each_and_sends_after_all() -> None:
    """The pair on rank 0 takes its forward first, waits for 1B0 until 4, ends at 6; only then 1F1 can start."""
    cells: Sequence[Sequence[Cell]] = [
        [(Action(0, "F", 0),), (Action(0, "F", 1), Action(0, "B", 0)), (Action(0, "B", 1),)],
        [(Action(1, "F", 0),), (Action(1, "B", 0),), (Action(1, "F", 1),), (Action(1, "B", 1),)],
    ]
    assert count_seconds(cells, (1, 1, 1)) == 4 + 2 + 1 + 2 + 2


@st.composite
def numbers(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name, ranks, count = draw(st.sampled_from(NAMES)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    laps = SCHEDULES[name].stages if SCHEDULES[name].fixed else draw(st.integers(1, 3))
    assume(SCHEDULES[name].allows(ranks, laps, count))
    return name, ranks, laps, count


@given(numbers(), st.tuples(*[st.integers(0, 9)] * 3))
def test_times_account_for_all_actions(chosen: tuple[str, int, int, int], costs: tuple[int, int, int]) -> None:
    _, ranks, laps, count = chosen
    rows = order_actions(*chosen)
    assert count_seconds(rows, costs) >= max(laps * count * sum(costs), ranks * laps * (costs[0] + costs[1]))
    actions = [(action.stage, action.kind) for row in rows for cell in row for action in cell]
    assert link_schedule(*chosen).counts == Counter(actions)


# ---- schedules that torch lacks ----


def most_in_flight(row: Sequence[Cell]) -> int:
    """The most micro-batches between forward and backward, over all stages of a rank."""
    changes = ({"F": 1, "B": -1}[action.kind] for cell in row for action in cell)
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize(("ranks", "laps", "count"), [(2, 2, 4), (4, 3, 10), (8, 5, 64), (9, 7, 63)])
def test_a_shallow_warm_up_holds_less_and_waits_no_longer(ranks: int, laps: int, count: int) -> None:
    deep, shallow = (order_actions(n, ranks, laps, count) for n in ("Interleaved1F1B", "ShallowInterleaved1F1B"))
    assert count_seconds(shallow, (1, 1, 1)) == count_seconds(deep, (1, 1, 1))
    assert count_seconds(shallow, (1, 1, 1), hop=0.1) > count_seconds(deep, (1, 1, 1), hop=0.1)
    (deep_most, *_, last), (shallow_most, *_, same) = (
        [most_in_flight(row) for row in rows] for rows in (deep, shallow)
    )
    size = count // max(1, count // ranks)
    assert deep_most == (laps - 1) * size + 2 * (ranks - 1) + 1
    assert (deep_most - shallow_most, last - same) == (ranks - 1, 0)


def test_a_shallower_warm_up_waits_longer() -> None:
    """One forward pass more than the next rank is the least."""
    rows = [list(row) for row in order_actions("ShallowInterleaved1F1B", 4, 2, 8)]
    first = next(i for i, cell in enumerate(rows[0]) if cell[0].kind == "B")
    rows[0][first - 1], rows[0][first] = rows[0][first], rows[0][first - 1]
    assert count_seconds(rows, (1, 1, 1)) > count_seconds(order_actions("ShallowInterleaved1F1B", 4, 2, 8), (1, 1, 1))


@given(numbers())
def test_torchs_runtime_takes_every_order(chosen: tuple[str, int, int, int]) -> None:
    name, ranks, laps, count = chosen
    owners = tuple(stage_plan.place_stages(name, ranks, ranks * laps))
    shape = PipelineShape(name, owners, 1, 1, 1, 1, torch.float32)
    mine = [FakeStage(lap * ranks, ranks, ranks * laps) for lap in range(laps)]
    runtime_class: Any = torch_schedules._PipelineScheduleRuntime
    runtime = runtime_class(mine, count)
    runtime._prepare_schedule_with_comms(list_torch_actions(shape, laps, count))
    found = [[str(a) for a in row if a.is_compute_op] for row in runtime.pipeline_order_with_comms.values()]
    assert found == [[format_cell(cell) for cell in row] for row in order_actions(*chosen)]


# ---- the number of micro-batches ----


@pytest.mark.parametrize(
    ("name", "ranks", "laps", "rows", "idle", "expected"),
    [
        pytest.param("1F1B", 4, 1, 64, 0.1, 32, id="27 of 3 rows would pad"),
        pytest.param("1F1B", 4, 1, 27, 0.1, 27, id="just enough"),
        pytest.param("1F1B", 4, 1, 26, 0.1, 26, id="none is enough: the best"),
        pytest.param("1F1B", 4, 1, 3, 0.1, None, id="none is allowed"),
        pytest.param("1F1B", 4, 1, 1000, 0.5, 4, id="few will do"),
        pytest.param("GPipe", 1, 1, 7, 0.1, 1, id="no pipeline, no waiting"),
        pytest.param("GPipe", 2, 1, 5, 0.1, 5, id="3 of 2 rows would pad"),
        pytest.param("Interleaved1F1B", 4, 2, 16, 0.1, 16, id="interleaved"),
        pytest.param("Interleaved1F1B", 4, 3, 15, 0.2, 5, id="4 of 4 rows would pad"),
        pytest.param("ZBVZeroBubble", 4, 2, 64, 0.1, 8, id="zero bubble needs few"),
        pytest.param("ZBVZeroBubble", 4, 2, 64, 0.05, 16, id="zero bubble"),
        pytest.param("DualPipeV", 4, 2, 7, 0.5, None, id="DualPipeV needs as many as stages"),
    ],
)
def test_number_of_microbatches(name: str, ranks: int, laps: int, rows: int, idle: float, expected: int | None) -> None:
    assert stage_plan.choose_microbatches(name, ranks, laps, rows, idle) == expected


@given(numbers(), st.integers(1, 24), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_number_of_microbatches_against_all(chosen: tuple[str, int, int, int], rows: int, idle: float) -> None:
    name, ranks, laps, _ = chosen
    lost = {}
    for n in range(1, rows + 1):
        if SCHEDULES[name].allows(ranks, laps, n):
            used = rows / (n * -(-rows // n)) * (1 - compute_idle_share(name, ranks, laps, n))
            lost[n] = round(1 - used, 12)
    found = stage_plan.choose_microbatches(name, ranks, laps, rows, idle)
    enough = [n for n in lost if lost[n] <= idle]
    if found is None or enough:
        assert found == next(iter(enough), None) and bool(lost) == bool(enough)
    else:
        assert lost[found] == min(lost.values())


# ---- layers to stages ----


def sizes(parts: list[range]) -> list[int]:
    assert [layer for part in parts for layer in part] == list(range(parts[-1].stop))
    return [len(part) for part in parts]


@pytest.mark.parametrize(
    ("costs", "count", "last", "expected"),
    [
        pytest.param([1] * 126, 16, 2, [8] * 15 + [6], id="a large head"),
        pytest.param([1] * 10, 4, 0, [2, 2, 3, 3], id="earlier stages have fewer"),
        pytest.param([0.1] * 10, 4, 0, [2, 2, 3, 3], id="sums of equal fractions are equal"),
        pytest.param([1] * 4, 4, 9, [1] * 4, id="one layer each"),
        pytest.param([1] * 8, 1, 3, [8], id="one stage"),
        pytest.param([5, 1, 1, 1], 2, 0, [1, 3], id="an expensive layer"),
        pytest.param([1, 5, 2, 3], 3, 0, [1, 1, 2], id="the cheapest before the most even"),
        pytest.param([4, *[1] * 7], 4, 0, [1, 2, 2, 3], id="a large embedding"),
        pytest.param([0, 0, 0], 2, 0, [1, 2], id="for nothing"),
    ],
)
def test_split(costs: list[float], count: int, last: float, expected: list[int]) -> None:
    assert sizes(stage_plan.split_layers(costs, count, last)) == expected


COST = st.one_of(st.integers(0, 6), st.sampled_from([0.25, 0.5, 1.75]))


@given(st.lists(COST, min_size=1, max_size=8), st.integers(1, 8), COST)
def test_split_is_the_best_of_all(costs: list[float], count: int, last: float) -> None:
    assume(count <= len(costs))
    whole = [int(cost * 4) for cost in costs]
    whole[-1] += int(last * 4)

    def merit(cuts: tuple[int, ...]) -> tuple[int, int, list[int]]:
        bounds = list(itertools.pairwise((0, *cuts, len(costs))))
        sums = [sum(whole[a:b]) for a, b in bounds]
        return max(sums), sum(x * x for x in sums), [b - a for a, b in bounds]

    found = stage_plan.split_layers(costs, count, last)
    best = min(map(merit, itertools.combinations(range(1, len(costs)), count - 1)))
    assert sizes(found) == best[2]


@given(st.integers(1, 200), st.integers(1, 200))
def test_by_layers_is_even(layers: int, count: int) -> None:
    assume(count <= layers)
    found = sizes(stage_plan.split_evenly(layers, count))
    assert sum(found) == layers and len(found) == count
    assert found == sorted(found) and found[-1] - found[0] <= 1


def test_explicit() -> None:
    assert stage_plan.split_at(12, 4, (4, 8, 11)) == [range(0, 4), range(4, 8), range(8, 11), range(11, 12)]
    assert stage_plan.split_at(3, 1, ()) == [range(3)]


# ---- errors ----


ERRORS: list[tuple[str, Callable[..., Any], tuple[Any, ...], list[str]]] = [
    ("too-few-layers", stage_plan.split_layers, ([1] * 3, 4), ["4 stages", "3 layers", "parallelism.pipeline"]),
    ("too-few-by-number", stage_plan.split_evenly, (3, 4), ["4 stages", "3 layers", "parallelism.pipeline"]),
    ("starts", stage_plan.split_at, (12, 4, (4, 8)),
     ["parallelism.starts=[4,8]", "2 given", "stages need 3", "stages=3"]),
    ("an-empty-stage", stage_plan.split_at, (12, 3, (4, 4)), ["starts=[4,4]", "ascend"]),
    ("an-empty-first", stage_plan.split_at, (12, 3, (0, 4)), ["starts=[0,4]", "from 1 to 11"]),
    ("an-empty-last", stage_plan.split_at, (12, 3, (4, 12)), ["starts=[4,12]", "from 1 to 11"]),
    ("misspelt", stage_plan.check_schedule, ("1F1C", 4, 4, 8), ["schedule=1F1C", "did you mean '1F1B'?"]),
    ("unknown", stage_plan.check_schedule, ("x", 4, 4, 8), ["schedule=x", "GPipe"]),
    ("needs-two-stages-a-rank", stage_plan.check_schedule, ("ZBVZeroBubble", 4, 4, 8),
     ["parallelism.stages=4", "2 stages on each rank", "give 8", "parallelism.pipeline=4"]),
    ("needs-one", stage_plan.check_schedule, ("1F1B", 4, 8, 8), ["stages=8", "one stage", "give 4"]),
    ("not-a-multiple-of-the-ranks", stage_plan.check_schedule, ("LoopedBFS", 4, 6, 8),
     ["stages=6", "multiple of parallelism.pipeline=4", "4, 8 or auto"]),
    ("less-than-ranks", stage_plan.check_schedule, ("LoopedBFS", 4, 3, 8), ["stages=3", "4, 8"]),
    ("too-few-micro-batches", stage_plan.check_schedule, ("1F1B", 4, 4, 3),
     ["parallelism.microbatches=3", "parallelism.pipeline=4", "give 4 or more"]),
    ("DualPipeV", stage_plan.check_schedule, ("DualPipeV", 4, 8, 7), ["microbatches=7", "8 or more"]),
    ("none", stage_plan.check_schedule, ("GPipe", 4, 4, 0), ["microbatches=0", "1 or more"]),
    ("rounds", stage_plan.check_schedule, ("Interleaved1F1B", 4, 8, 13),
     ["microbatches=13", "3 rounds", "give 12, 15 or auto"]),
    ("rounds-of-others", stage_plan.check_schedule, ("InterleavedZeroBubble", 4, 8, 9), ["2 rounds", "give 8, 10"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "words"), [pytest.param(*row, id=name) for name, *row in ERRORS])
def test_errors(call: Callable[..., Any], arguments: tuple[Any, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    sentence = str(raised.value)
    assert sentence.startswith("parallelism.") and sentence[-1] in ".?" and "\n" not in sentence
    assert [word for word in words if word not in sentence] == []


def test_a_deadlock_tells_who_waits() -> None:
    with pytest.raises(ValueError, match="the order deadlocks: rank 0 at 0B0, rank 1 at 1B0"):
        link_order(parsed("0F0 0B0 | 1B0 1F0"))


def test_orders_of_impossible_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="1F1B on 4 ranks"):
        order_actions("1F1B", 4, 1, 3)
