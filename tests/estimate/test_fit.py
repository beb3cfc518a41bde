"""The memory estimate and its check: monotone in the layout, and plausible for well-known models."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.tiers import full
from titan.cluster import devices
from titan.config import warning
from titan.errors import ConfigError
from titan.estimate import fit, memory, overhead
from titan.estimate.constants import load_constants
from titan.estimate.fit import choose_microbatches, compute_available_gib, estimate_memory, find_smallest_layout
from titan.estimate.plan import build_plan
from titan.estimate.rank_sizes import GIB, count_rank_rows, find_weight_sharding
from titan.model.schema import Llama
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism
from titan.run.schema import Recipe
from titan.training.schema import Training

POWERS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, **dict.fromkeys(DIMENSIONS, POWERS))


def recipe(*overrides: str) -> Recipe:
    """A composed recipe, on a machine where everything fits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "detect_machine", make_detector("gpu"))
        run = compose_test_run(["cluster.memory_gib=1e9", *overrides])
    return Recipe(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Recipe)})


BASE = recipe("model=llama8b", "training.seq_len=2048", "training.global_batch=2097152")


def with_(**axes: Any) -> Recipe:
    return dataclasses.replace(BASE, **axes)


COUNTS = st.integers(8, 64)
"""Micro-batches that any of these pipelines can have."""


@given(LAYOUTS, COUNTS)
def test_tensor_parallelism_needs_less(layout: Layout, count: int) -> None:
    more = dataclasses.replace(layout, tensor=layout.tensor * 2)
    assert estimate_memory(BASE, more, count).gib < estimate_memory(BASE, layout, count).gib


@given(LAYOUTS, st.sampled_from(["replicate", "shard", "context"]), COUNTS)
def test_more_ranks_never_take_more_but_for_the_gathered_blocks(layout: Layout, name: str, count: int) -> None:
    more = dataclasses.replace(layout, **{name: getattr(layout, name) * 2})
    before, after = memory.estimate_peak(BASE, layout, count), memory.estimate_peak(BASE, more, count)
    assert memory.count_rank_state_bytes(BASE, more) <= memory.count_rank_state_bytes(BASE, layout)
    if layout.shard > 1:
        assert after.bytes <= before.bytes * (1 + 1e-9)


@given(LAYOUTS, st.integers(2, 64), st.integers(2, 64))
def test_from_two_on_more_microbatches_never_take_more(layout: Layout, first: int, second: int) -> None:
    layout, (few, many) = dataclasses.replace(layout, pipeline=1), sorted((first, second))
    assert estimate_memory(BASE, layout, many).gib <= estimate_memory(BASE, layout, few).gib


def compute_planned_gib(recipe: Recipe, layout: Layout, count: int) -> float:
    """What a plan says of GPUs: with what allocators reserve in published runs."""
    return estimate_memory(recipe, layout, count, "cuda", overhead.load_fragments(layout)).gib


def test_a_second_microbatch_finds_the_gradients_of_the_first() -> None:
    """Whole ones, fp32 all of them; reduced ones, a rank's part. With a head that takes little, that is the peak."""
    rows = Training(global_batch=8 * 2 * 2048, seq_len=2048, loss_chunk=256)
    small = with_(training=rows, memory=dataclasses.replace(BASE.memory, checkpointing="full"))
    whole = dataclasses.replace(small, parallelism=Parallelism(shard=8, accumulate="whole"))
    one, two = (estimate_memory(small, Layout(shard=8), count).bytes for count in (1, 2))
    assert estimate_memory(whole, Layout(shard=8), 1).bytes == one
    extra = estimate_memory(whole, Layout(shard=8), 2).bytes - two
    assert extra == pytest.approx(4 * BASE.model.parameters() * 7 / 8 * (1 + overhead.FRAGMENTS), rel=0.15)
    assert choose_microbatches(whole, Layout(shard=8), compute_planned_gib(small, Layout(shard=8), 1)) == 1


def test_gradients_accumulated_in_bf16_save_half_of_the_whole_ones() -> None:
    whole = with_(parallelism=Parallelism(shard=8, accumulate="whole"))
    fragments = load_constants().fragments
    saved = fit.compute_saved_gib(whole, Layout(shard=8), 4, "cuda")
    assert saved == pytest.approx(2 * BASE.model.parameters() * (1 + fragments) / GIB, rel=1e-3)
    assert fit.compute_saved_gib(BASE, Layout(shard=8), 4, "cuda") == 0  # shards are accumulated
    assert fit.compute_saved_gib(whole, Layout(shard=8), 1, "cuda") == 0
    assert fit.compute_saved_gib(whole, Layout(replicate=8), 4, "cuda") == 0


@pytest.mark.full
def test_the_error_suggests_bf16_gradients_where_recomputation_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    pipeline = ["parallelism.pipeline=8", "parallelism.shard=8", "memory=full"]
    run = ["model=qwen3_32b", "training.seq_len=4096", "training.global_batch=1048576", *pipeline]
    needed = [
        compose_test_run([*run, "cluster.memory_gib=1e6", *more], 64) for more in ([], ["precision.accumulate=bf16"])
    ]
    gibs = [estimate_memory(r, r.layout, r.microbatches).gib / fit.USABLE for r in needed]
    with pytest.raises(ConfigError, match=r"Try .*precision\.accumulate=bf16, which rounds sums of gradients"):
        fit.check_memory(
            dataclasses.replace(needed[0], cluster=dataclasses.replace(BASE.cluster, memory_gib=sum(gibs) / 2)),
            needed[0].layout,
            needed[0].machine,
            needed[0].microbatches,
        )


@given(LAYOUTS, st.integers(8, 32))
@pytest.mark.full
def test_checkpointing_takes_less_and_fp32_more(layout: Layout, count: int) -> None:
    full = with_(memory=dataclasses.replace(BASE.memory, checkpointing="full"))
    fp32 = with_(precision=dataclasses.replace(BASE.precision, compute="fp32"))
    assert memory.estimate_peak(full, layout, count).bytes <= memory.estimate_peak(BASE, layout, count).bytes
    assert memory.estimate_peak(fp32, layout, count).bytes > memory.estimate_peak(BASE, layout, count).bytes


@pytest.mark.full
@given(LAYOUTS, st.floats(0.1, 500))
def test_microbatches_fit_and_are_few_with_little_padding(layout: Layout, gib: float) -> None:
    layout = dataclasses.replace(layout, pipeline=1)
    count, rows = choose_microbatches(BASE, layout, gib), count_rank_rows(BASE, layout)
    assert 1 <= count <= rows
    planned = {c: compute_planned_gib(BASE, layout, c) for c in range(1, rows + 1)}
    fitting = [c for c, needed in planned.items() if needed <= gib]
    if not fitting:
        assert planned[count] == min(planned.values())
        return
    allowed = [c for c in fitting if c <= 2 * fitting[0]]
    least = min(c * -(-rows // c) for c in allowed)
    assert count in allowed and count * -(-rows // count) <= max(least, fit.LITTLE_PADDING * rows)


PADDED = [
    pytest.param(8, 3, 4, id="three-of-three-are-nine"),
    pytest.param(32, 7, 8, id="seven-of-five-are-35"),
    pytest.param(9, 2, 3, id="a-divisor-that-is-next"),
    pytest.param(7, 2, 2, id="none-twice-as-many-divides"),
    pytest.param(8, 2, 2, id="it-divides"),
    pytest.param(1000, 3, 3, id="two-rows-of-a-thousand"),
    pytest.param(10**15, 10**13, 10**13, id="at-once-of-any-batch"),
    pytest.param(10**15 + 1, 10**14, 10**14 + 1, id="at-once-with-a-remainder"),
]


@pytest.mark.parametrize(("rows", "smallest", "count"), PADDED)
def test_more_microbatches_are_chosen_where_fewer_rows_are_padding(rows: int, smallest: int, count: int) -> None:
    assert fit._choose_least_padded(rows, fit._list_counts(rows, smallest)) == count


@given(st.integers(1, 10**15))
@pytest.mark.full
def test_microbatches_of_any_batch_are_found_at_once(rows: int) -> None:
    training = Training(global_batch=rows * 2048, seq_len=2048)
    assert 1 <= choose_microbatches(with_(training=training), Layout(shard=2), 80) <= rows


@given(st.integers(1, 500), POWERS, POWERS)
def test_rank_rows_have_room_for_all(rows: int, replicate: int, shard: int) -> None:
    layout = Layout(replicate=replicate, shard=shard)
    room = count_rank_rows(with_(training=Training(global_batch=rows * 256)), layout)
    assert (room - 1) * layout.data_ranks < rows <= room * layout.data_ranks


@pytest.mark.parametrize(
    ("model", "parallelism", "devices_", "gib"),
    [
        pytest.param("debug", "single", 1, (40, 77.6), id="debug"),
        full("llama1b", "single", 1, (60, 77.6), id="1b"),
        full("llama8b", "fsdp", 2, (60, 77.6), id="8b-fsdp"),
        pytest.param("llama8b", "3d", 2, (55, 77.6), id="8b-3d"),
        full("llama70b", "fsdp", 32, (60, 77.6), id="70b-fsdp"),
        full("llama70b", "3d", 32, (60, 77.6), id="70b-3d"),
        full("llama405b", "fsdp", 256, (60, 77.6), id="405b-fsdp"),
        full("llama405b", "3d", 256, (60, 77.6), id="405b-3d"),
    ],
)
def test_what_known_models_take(model: str, parallelism: str, devices_: int, gib: tuple[float, float]) -> None:
    answer = find_smallest_layout(any_layout(model, parallelism))
    assert answer is not None
    layout, wants = answer
    assert layout.devices == devices_
    assert gib[0] <= wants <= gib[1] <= 80 * fit.USABLE


def any_layout(model: str, parallelism: str) -> Recipe:
    """A recipe in bf16, also with a layout that can be planned only."""
    open_degrees = {
        "single": {}, "fsdp": {"shard": -1}, "3d": {"shard": -1, "tensor": "auto", "pipeline": "auto"},
    }[parallelism]  # fmt: skip
    base = recipe(f"model={model}", "training.seq_len=2048", "training.global_batch=2097152", "memory=full")
    return dataclasses.replace(base, parallelism=Parallelism(**open_degrees))  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", [full(1), 8])
def test_state_is_12_bytes_a_parameter_and_is_cut_by_sharding(shard: int) -> None:
    assert memory.count_rank_state_bytes(BASE, Layout(shard=shard)) == 12 * BASE.model.parameters() / shard


@pytest.mark.parametrize(
    ("precision", "kept", "alone", "gathered"),
    [
        full("fp32", 12, (0, 0), (4, 4), id="fp32"),
        full("bf16", 12, (2, 2), (2, 2), id="bf16"),
        pytest.param("bf16_pure", 6, (0, 0), (2, 2), id="pure"),
        full("float8", 12, (0, 2), (1, 2), id="float8"),
        full("float8_rowwise", 12, (2, 2), (2, 2), id="rowwise"),
        full("mxfp8", 12, (2, 2), (2, 2), id="mx"),
    ],
)
def test_weights_take_what_their_types_do(precision: str, kept: int, alone: Any, gathered: Any) -> None:
    """Bytes of a parameter: kept with state; of blocks and head, cast on one device; gathered by FSDP."""
    how = compose_test_run([f"precision={precision}", "precision.emulate=true", "cluster=cpu"]).precision
    chosen, model = with_(precision=how), BASE.model
    assert memory.count_rank_state_bytes(chosen, Layout()) == kept * model.parameters()
    blocks, head = model.layers * model.block_matmul_parameters(), model.vocab * model.dim
    for layout, each in ((Layout(), alone), (Layout(shard=8), gathered)):
        used = how.count_used_bytes(model.linear_layers(), find_weight_sharding(chosen.parallelism, layout))
        assert used == each[0] * blocks + each[1] * head


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 64))
@pytest.mark.full
def test_smallest_layout_is_the_smallest_that_fits(heads: int, layers: int, width: int) -> None:
    model = Llama(dim=heads * 128 * width, layers=layers * 8, heads=heads, kv_heads=1, ffn=512 * width, vocab=32000)
    wide = with_(model=model, parallelism=Parallelism(shard=-1))
    answer = find_smallest_layout(wide)
    if answer is None:
        return
    layout, gib = answer
    assert gib <= 80 * fit.USABLE
    if layout.devices > 1:
        half = Layout(shard=layout.devices // 2)
        assert estimate_memory(wide, half, count_rank_rows(wide, half)).gib > 80 * fit.USABLE


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "expected"),
    [
        pytest.param("cpu", [], 1, 16 * 0.97, id="cpu"),
        pytest.param("cpu", [], 4, 16 * 0.97 / 4, id="cpu-shared"),
        pytest.param("gpu", [], 8, 81559 / 1024 * 0.97, id="gpu-each"),
        pytest.param("gpu", ["cluster.memory_gib=40"], 8, 40 * 0.97, id="as-given"),
    ],
)
def test_available_memory(kind: str, overrides: list[str], ranks: int, expected: float) -> None:
    machine = make_detector(kind)()
    cluster = dataclasses.replace(BASE.cluster, memory_gib=40.0 if overrides else None)
    assert compute_available_gib(with_(cluster=cluster), Layout(replicate=ranks), machine) == pytest.approx(expected)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_async_checkpoint_adds_a_host_copy_of_the_state(ranks: int) -> None:
    layout = Layout(shard=ranks)
    copied = with_(checkpoint=dataclasses.replace(BASE.checkpoint, mode="async"))
    more = estimate_memory(copied, layout, 1, "cpu").bytes - estimate_memory(with_(), layout, 1, "cpu").bytes
    assert more == pytest.approx(12 * BASE.model.parameters() / ranks)
    assert estimate_memory(copied, layout, 1) == estimate_memory(with_(), layout, 1), "the copy is in the host's memory"


def test_processes_and_allocators_are_counted() -> None:
    live = memory.estimate_peak(BASE, Layout(shard=8), 4).bytes
    assert (
        estimate_memory(BASE, Layout(shard=8), 4).bytes == live * (1 + overhead.FRAGMENTS) + overhead.CONTEXT_GIB * GIB
    )
    on_cpu = (
        estimate_memory(BASE, Layout(shard=8), 4, "cpu").bytes
        - memory.estimate_peak(BASE, Layout(shard=8), 4, "cpu").bytes
    )
    assert on_cpu > overhead.PROCESS_GIB * GIB


def test_unknown_memory_fits_everything() -> None:
    machine = dataclasses.replace(make_detector("gpu")(), memory_gib=None)
    unknown = with_(cluster=dataclasses.replace(BASE.cluster, memory_gib=None))
    assert compute_available_gib(unknown, Layout(), machine) == math.inf
    fit.check_memory(unknown, Layout(), machine, 1)


@pytest.mark.full
def test_check_rejects_exactly_what_exceeds_the_memory() -> None:
    machine = make_detector("gpu")()
    given = with_(cluster=dataclasses.replace(BASE.cluster, memory_gib=None))
    rows = count_rank_rows(given, Layout(shard=8))
    wants = estimate_memory(given, Layout(shard=8), rows).gib
    for share, fits in ((0.99, False), (1.01, True)):
        there = dataclasses.replace(machine, memory_gib=wants * share / fit.USABLE)
        if fits:
            fit.check_memory(given, Layout(shard=8), there, rows)
        else:
            with pytest.raises(ConfigError, match="estimated memory is"):
                fit.check_memory(given, Layout(shard=8), there, rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "parallelism", "nodes", "more", "expected"),
    [
        full("debug", "3d", 1, [], Layout(pipeline=2, shard=2, tensor=2), id="debug-on-8"),
        pytest.param("llama8b", "3d", 1, ["memory=full"], Layout(pipeline=2, shard=2, tensor=2), id="8b-on-8"),
        full("llama8b", "fsdp_tp", 4, [], Layout(shard=4, tensor=8), id="8b-on-32"),
        full("llama70b", "3d", 8, ["memory=full"], Layout(pipeline=2, shard=4, tensor=8), id="70b-on-64"),
        pytest.param("llama405b", "3d", 64, ["memory=full"], Layout(pipeline=8, shard=8, tensor=8), id="405b-on-512"),
        pytest.param(
            "llama405b",
            "3d",
            64,
            ["memory=full", "parallelism.accumulate=sharded"],
            Layout(pipeline=2, shard=32, tensor=8),
            id="405b-on-512-reduced",
        ),
    ],
)
def test_auto_degrees_follow_from_cluster_and_model(
    model: str, parallelism: str, nodes: int, more: list[str], expected: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    sizes = ["training.seq_len=8192", "training.global_batch=16777216"]
    run = compose_test_run([f"model={model}", f"parallelism={parallelism}", *sizes, *more], ranks=nodes * 8)
    assert run.layout == expected
    assert estimate_memory(run, run.layout, run.microbatches).gib <= 80 * fit.USABLE


@pytest.mark.full
def test_the_error_suggests_recomputation_where_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    with pytest.raises(ConfigError, match=r"With memory=full it needs .* Try memory=full, or set"):
        compose_test_run(
            ["model=qwen3_32b", "parallelism=fsdp_pp", "training.seq_len=8192", "training.global_batch=1048576"], 64
        )


@pytest.mark.parametrize(
    ("nodes", "more", "expected"),
    [
        full(256, [], (Layout(pipeline=2, shard=128, tensor=8), "GPipe", 1), id="2048 ranks"),
        pytest.param(64, [], (Layout(pipeline=2, shard=32, tensor=8), "GPipe", 1), id="64 nodes"),
        full(64, ["parallelism.microbatches=1"], (Layout(pipeline=2, shard=32, tensor=8), "GPipe", 1), id="typed"),
        full(64, ["training.global_batch=16384"], (Layout(pipeline=8, shard=8, tensor=8), "1F1B", 8), id="more rows"),
        pytest.param(64, ["parallelism.schedule=1F1B"], "schedule=1F1B.* 1 row .*training.global_batch", id="1F1B"),
        full(64, ["parallelism.microbatches=2"], "microbatches=2: more than the rows .*at most 1", id="two of one row"),
        full(8, [], "estimated memory is 161 GiB .*Try more cluster.nodes", id="8 nodes"),
    ],
)
def test_pipelines_of_few_rows_have_a_schedule_that_works(
    nodes: int, more: list[str], expected: tuple[Layout, str, int] | str, capsys: pytest.CaptureFixture[str]
) -> None:
    warning.warn_once.cache_clear()
    line = ["model=llama405b", "parallelism=3d", "cluster=h100", f"cluster.nodes={nodes}", *more]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            compose_test_run(line, remote=True)
    else:
        run = compose_test_run(line, remote=True)
        assert (run.layout, run.parallelism.schedule, run.microbatches) == expected
    says_why = "schedule=auto: is GPipe with 1 micro-batch, because a rank has 1 row" in capsys.readouterr().err
    assert says_why is ("GPipe" in expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        pytest.param(["model=llama8b"], "cluster=h100 parallelism=fsdp", id="single"),
        pytest.param(["model=llama8b", "parallelism=fsdp"], "cluster=h100", id="fsdp"),
        pytest.param(["model=llama70b"], "cluster=h100 cluster.nodes=4 parallelism=fsdp", id="nodes"),
    ],
)
def test_a_plan_on_a_laptop_names_the_nodes_that_hold_the_model(
    settings: list[str], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("cpu"))
    with pytest.raises(ConfigError, match=f"Try {way_out} to plan it on GPUs, model=debug, or set"):
        compose_test_run(settings, remote=True)
    compose_test_run([*settings, *way_out.split()], remote=True)


MUON, BF16_MOMENTS = "optimizer=muon", "optimizer.moments=bf16"


@pytest.mark.parametrize(
    ("layout", "changes", "matrices", "others"),
    [
        pytest.param(Layout(), [MUON, BF16_MOMENTS], 2, 4, id="one device-muon-bf16"),
        pytest.param(Layout(shard=4), [MUON], 4, 8, id="shard 4-muon"),
        pytest.param(Layout(tensor=2), [MUON], 4, 8, id="tensor 2-muon"),
        full(Layout(tensor=2), [BF16_MOMENTS], 4, 4, id="tensor 2-bf16"),
        full(Layout(tensor=2), ["optimizer=sgd"], 0, 0, id="tensor 2-sgd"),
    ],
)
def test_state_of_optimizers(changes: list[str], matrices: int, others: int, layout: Layout) -> None:
    """Against AdamW's 8 bytes a parameter; norms are whole on each tensor rank."""
    other, model = dataclasses.replace(BASE, optimizer=recipe(*changes).optimizer), BASE.model
    norms = (2 * model.layers + 1) * model.dim
    in_blocks = model.layers * model.block_matmul_parameters()
    less = (8 - matrices) * in_blocks + (8 - others) * (model.parameters() - in_blocks)
    saved = memory.count_rank_state_bytes(BASE, layout) - memory.count_rank_state_bytes(other, layout)
    whole = (8 - others) * norms * (1 - 1 / layout.tensor)
    assert saved == pytest.approx((less / layout.tensor + whole) / layout.sharded)


def test_logits_in_chunks_and_one_mask_are_counted() -> None:
    chunked = with_(training=dataclasses.replace(BASE.training, loss_chunk=256))
    masked = with_(dataset=dataclasses.replace(BASE.dataset, mask_documents=True))
    flex = with_(dataset=masked.dataset, training=dataclasses.replace(BASE.training, attention="flex"))
    plain, one = memory.estimate_peak(BASE, Layout(shard=8), 1).bytes, Layout(shard=8)
    assert memory.estimate_peak(chunked, one, 1).bytes < plain
    tokens = count_rank_rows(BASE, one) * BASE.training.seq_len
    documents = 8 * tokens  # their ids
    assert memory.estimate_peak(masked, one, 1).bytes - plain == pytest.approx(
        2 * tokens * BASE.training.seq_len + documents
    )
    assert memory.estimate_peak(flex, one, 1).bytes - plain == pytest.approx(documents)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(
            ["parallelism=fsdp"], r"cluster=h100 has 8 x NVIDIA H100 .*Try more cluster\.nodes", id="one node"
        ),
        pytest.param(
            ["parallelism=fsdp", "cluster.nodes=2"], r"cluster=h100 has 2 nodes of 8 x NVIDIA H100", id="two nodes"
        ),
        pytest.param(
            ["parallelism.microbatches=1"], r"Try parallelism\.microbatches=auto, or set cluster\.memory_gib", id="rows"
        ),
        pytest.param(
            ["model=llama8b", "cluster.nodes=2", "training.seq_len=32Ki", "training.global_batch=4Mi"],
            r"Try parallelism=fsdp memory=full, or set cluster\.memory_gib",
            id="enough devices",
        ),
        pytest.param(
            ["model.dim=1048576", "model.layers=100", "model.ffn=3145728", "parallelism=fsdp"],
            r"Try a smaller model, or set cluster\.memory_gib",
            id="no layout",
        ),
    ],
)
def test_a_planned_cluster_is_named(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        compose_test_run(["model=llama405b", "dataset=synthetic", "cluster=h100", *overrides], remote=True)
    assert "this machine" not in str(caught.value) and "detected" not in str(caught.value)


@pytest.mark.full
def test_a_format_that_the_planned_cluster_lacks_is_not_one_of_this_machine() -> None:
    line = ["dataset=synthetic", "cluster=a100", "model=llama1b", "parallelism=fsdp", "precision=float8"]
    with pytest.raises(ConfigError, match="and the cluster has NVIDIA A100"):
        compose_test_run(line, remote=True)


@pytest.mark.full
def test_micro_batches_that_titan_chooses_fit_the_plan() -> None:
    """Three micro-batches fit only without what allocators reserve in published runs."""
    run = compose_test_run(["recipe=train_1b", "optimizer=muon"], remote=True)
    planned = build_plan(run, run.layout, run.microbatches, run.machine)
    assert max(usage.gib for usage in planned.memory) <= planned.memory_gib
    assert run.microbatches == 4
