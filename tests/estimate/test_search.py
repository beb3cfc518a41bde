"""The search for layouts: pruning loses nothing, and results can be started."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from titan.errors import ConfigError
from titan.estimate import fit, memory, search
from titan.estimate.layout_options import LayoutCandidate, iterate_options
from titan.estimate.lower_bounds import LowerBounds
from titan.estimate.pipeline_states import find_most_in_flight, find_schedule_states
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.search import PredictedLayout, find_best_changes, list_overrides, search_layouts
from titan.estimate.step_time import estimate_step
from titan.parallelism.schema import Layout
from titan.run.run import Run

COMMON = ("dataset=synthetic", "checkpoint=off", "cluster=h100", "compile=block", "training.seq_len=2048")
RUNS = {
    "8-devices": ("model=llama1b", "model.layers=4", "parallelism=fsdp", "training.global_batch=16384"),
    "16-devices-little-memory": (
        "model=llama3b", "parallelism=fsdp", "training.global_batch=131072", "cluster.nodes=2", "cluster.memory_gib=24",
        "parallelism.microbatches=auto",
    ),
    "4-devices-experts": (
        "model=qwen3_moe_debug", "model.layers=4", "parallelism=fsdp", "cluster.devices=4",
        "training.global_batch=16384",
    ),
}  # fmt: skip


def made(name: str) -> Run:
    return compose_test_run([*COMMON, *RUNS[name]], remote=True)


@pytest.mark.parametrize("name", ["8-devices", "4-devices-experts", "16-devices-little-memory"])
@pytest.mark.full
def test_pruning_finds_what_trying_all_finds(name: str) -> None:
    run = made(name)
    devices = run.layout.devices
    pruned, whole = (search_layouts(run, devices, run.machine, keep=5, prune=prune) for prune in (True, False))
    assert [r.step.seconds for r in pruned.best] == [r.step.seconds for r in whole.best]
    assert pruned.tried == whole.tried and pruned.predicted < whole.predicted


LONG = ("model.layers=16", "model.vocab=1024", "dataset.vocab=1024", "training.seq_len=8192",
        "training.global_batch=65536")  # fmt: skip
"""A model and a batch whose blocks decide."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more", "typed", "stride"),
    [
        pytest.param("8-devices", (), {}, 17, id="8-devices"),
        pytest.param("4-devices-experts", (), {}, 17, id="4-devices-experts"),
        pytest.param("8-devices", (*LONG, "memory=every_n"), {"checkpointing": "every_n"}, 29, id="every_n"),
        pytest.param("8-devices", (*LONG, "memory=budget"), {"checkpointing": "budget"}, 29, id="budget"),
    ],
)
def test_bounds_are_never_above_what_they_bound(
    name: str, more: tuple[str, ...], typed: dict[str, Any], stride: int
) -> None:
    run = compose_test_run([*COMMON, *RUNS[name], *more], remote=True)
    hardware = resolve_hardware(run.cluster, run.machine)
    bound = LowerBounds(run, lambda layout: derive_device_speeds(run, hardware, run.machine, layout), "cuda")
    for option in list(iterate_options(run, run.layout.devices, run.machine, typed))[::stride]:
        recipe, layout, count = option.build_candidate(run)
        try:
            step = estimate_step(recipe, layout, count, derive_device_speeds(recipe, hardware, run.machine, layout))
            usage = memory.estimate_peak(recipe, layout, count)
        except ConfigError:
            continue
        assert bound(option) <= step.seconds * 1.000001, option
        assert bound.compute_first_gib(option) <= bound.compute_gib(option) <= usage.gib * 1.000001, option
        assert bound.compute_seconds(option) <= step.seconds * 1.000001, option


@pytest.mark.full
def test_degrees_of_expert_parallelism_are_tried() -> None:
    run = made("4-devices-experts")
    degrees = {(p.layout.sharded * p.layout.tensor, p.layout.expert) for p in iterate_options(run, 4, run.machine)}
    assert degrees == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}


@pytest.mark.full
def test_the_front_has_nothing_that_is_slower_and_larger() -> None:
    front = search_layouts(made("8-devices"), 8, made("8-devices").machine).front
    times, sizes = [r.step.seconds for r in front], [r.gib for r in front]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True)


@pytest.mark.full
def test_results_are_command_lines_that_compose_to_them() -> None:
    run = made("8-devices")
    for result in search_layouts(run, 8, run.machine, keep=3).best:
        words = list_overrides(result.candidate, run, run.layout, run.microbatches)
        again = compose_test_run([*COMMON, *RUNS["8-devices"], *words], remote=True)
        assert again.layout == result.candidate.layout and again.microbatches == result.candidate.microbatches
        speeds = derive_device_speeds(
            again, resolve_hardware(again.cluster, again.machine), again.machine, again.layout
        )
        assert estimate_step(again, again.layout, again.microbatches, speeds).seconds == pytest.approx(
            result.step.seconds
        )


@pytest.mark.full
def test_nothing_fits() -> None:
    run = made("8-devices")
    small = compose_test_run([*COMMON, *RUNS["8-devices"]], remote=True)
    with pytest.raises(ConfigError, match=r"plan.search=true: none of .* layouts on 8 devices fits"):
        search_layouts(_with_memory(small, 2.0), 8, run.machine)


def _with_memory(run: Run, gib: float) -> Run:
    return dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, memory_gib=gib))


@pytest.mark.full
def test_single_changes_fit_and_are_sorted() -> None:
    run = compose_test_run([*COMMON, *RUNS["8-devices"], "memory=full", "compile=off"], remote=True)
    results = find_best_changes(run, run.layout, run.microbatches, run.machine, keep=99)
    times = [r.step.seconds for r in results]
    assert times == sorted(times)
    words = {" ".join(list_overrides(r.candidate, run, run.layout, run.microbatches)) for r in results}
    assert {"compile.scope=block", "memory.checkpointing=none"} <= words
    has = fit.compute_available_gib(run, run.layout, run.machine)
    assert all(isinstance(r.candidate, LayoutCandidate) and r.gib <= has for r in results)


@pytest.mark.full
def test_a_layout_is_predicted_once_and_the_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[LayoutCandidate] = []
    predict = search.predict_layout

    def count(candidate: LayoutCandidate, *rest: Any) -> PredictedLayout | None:
        predicted.append(candidate)
        return predict(candidate, *rest)

    monkeypatch.setattr(search, "predict_layout", count)
    monkeypatch.setattr(search, "SHOW_SECONDS", 0.0)
    run, lines = made("4-devices-experts"), list[str]()
    outcome = search_layouts(run, 4, run.machine, keep=2, show=lines.append)
    assert len(outcome.front) > 1
    settings = [(c.layout, c.microbatches, repr(c.recipe.parallelism), c.recipe.memory) for c in predicted]
    assert len(settings) == len(set(settings))
    assert any("layouts within 77 GiB" in line for line in lines)


def list_values(typed: dict[str, Any]) -> dict[str, set[Any]]:
    """Return the values that the options of a search have for each of some settings; stages of pipelines only."""
    run = made("8-devices")
    options = list(iterate_options(run, 8, run.machine, typed))
    values: dict[str, set[Any]] = {name: {getattr(o.layout, name) for o in options} for name in ("tensor", "pipeline")}
    pipelines = [o for o in options if o.layout.pipeline > 1]
    values |= {name: {getattr(o, name) for o in pipelines} for name in ("schedule", "stages")}
    return values | {name: {getattr(o, name) for o in options} for name in ("reshard", "microbatches", "mode")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        pytest.param({"tensor": 2}, {"tensor": {2}}, id="degree"),
        pytest.param({"schedule": "ZBVZeroBubble"}, {"schedule": {"ZBVZeroBubble"}, "pipeline": {1, 2}}, id="schedule"),
        pytest.param({"stages": 4}, {"stages": {4}, "pipeline": {2, 4}}, id="stages"),
        pytest.param({"stages": 1}, {"stages": set(), "pipeline": {1}}, id="one stage"),
        pytest.param({"starts": (1, 2, 3)}, {"stages": {4}, "pipeline": {2, 4}}, id="starts"),
        pytest.param({"microbatches": 3}, {"microbatches": {3}}, id="microbatches"),
        pytest.param({"reshard": 4}, {"reshard": {4, "auto"}}, id="reshard"),
        pytest.param({"checkpointing": "every_n"}, {"mode": {"every_n"}}, id="memory"),
        pytest.param({"async_tensor": True}, {"tensor": {2, 4, 8}}, id="async_tensor"),
    ],
)  # fmt: skip
def test_typed_settings_are_constraints(typed: dict[str, Any], expected: dict[str, set[Any]]) -> None:
    searched, constrained = list_values({}), list_values(typed)
    assert {name: constrained[name] for name in expected} == expected
    assert all(expected[name] != searched[name] for name in list(expected)[:1])


@pytest.mark.full
def test_settings_that_no_layout_has_are_named() -> None:
    run, typed = made("8-devices"), {"stages": 7, "checkpointing": "full"}
    with pytest.raises(ConfigError, match=r"has parallelism.stages=7 memory.checkpointing=full; leave one of them out"):
        search_layouts(run, 8, run.machine, typed=typed)


def test_a_layout_without_a_pipeline_leaves_out_stages_and_starts() -> None:
    run = made("8-devices")
    parallelism = dataclasses.replace(run.parallelism, pipeline=2, stages=4, starts=(1, 2, 3))
    recipe = dataclasses.replace(run, parallelism=parallelism)
    options = {o.stages: o for o in iterate_options(recipe, 8, run.machine)}
    words = {n: list_overrides(o.build_candidate(recipe), recipe, Layout(pipeline=2), 1) for n, o in options.items()}
    assert {"parallelism.stages=auto", "parallelism.starts=[]"} <= set(words["auto"])
    assert not any("starts" in word or "stages" in word for word in words[4])
    assert "parallelism.starts=[]" in words[2]


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "count"), [("GPipe", 2, 1, 3), ("LoopedBFS", 4, 2, 8), ("LoopedBFS", 3, 3, 6)]
)
def test_all_forward_schedules_have_all_microbatches_in_flight(
    schedule: str, ranks: int, stages: int, count: int
) -> None:
    states = find_schedule_states(schedule, ranks, stages, count)
    replayed = max(sum(number for _, number in state.in_flight) for rank in states for state in rank)
    assert find_most_in_flight(schedule, ranks, stages, count) == replayed
