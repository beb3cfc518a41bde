"""Memory in closed form: monotone in the layout, and sensible for the shapes that people know."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from tests.machines import detector
from titan import capacity
from titan.capacity import GIB, available, demand, microbatches, needed, rank_rows
from titan.cluster import devices
from titan.compose import composed
from titan.model.schema import Llama
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism
from titan.run import Recipe
from titan.settings import Refusal
from titan.training import Training

POWERS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, **dict.fromkeys(DIMENSIONS, POWERS))


def recipe(*overrides: str) -> Recipe:
    """A composed recipe, on a machine where everything fits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "detect", detector("gpu"))
        run = composed(["cluster.memory_gib=1e9", *overrides])
    return Recipe(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Recipe)})


BASE = recipe("model=llama8b", "training.seq_len=2048", "training.global_batch=2097152")


def with_(**axes: Any) -> Recipe:
    return dataclasses.replace(BASE, **axes)


@given(LAYOUTS, st.sampled_from(["pipeline", "tensor"]), st.integers(1, 64))
def test_cutting_the_model_takes_less(layout: Layout, name: str, count: int) -> None:
    if name == "pipeline":  # which keeps gathered weights: it takes more than none at first, and less the deeper it is
        layout = dataclasses.replace(layout, pipeline=layout.pipeline * 2)
    more = dataclasses.replace(layout, **{name: getattr(layout, name) * 2})
    assert demand(BASE, more, count).gib < demand(BASE, layout, count).gib


@given(LAYOUTS, st.sampled_from(["replicate", "shard", "context"]), st.integers(1, 64))
def test_more_ranks_never_take_more_but_for_the_gathered_blocks(layout: Layout, name: str, count: int) -> None:
    more = dataclasses.replace(layout, **{name: getattr(layout, name) * 2})
    before, after = demand(BASE, layout, count), demand(BASE, more, count)
    assert after.activations <= before.activations
    assert after.state <= before.state


@given(LAYOUTS, st.integers(1, 64), st.integers(1, 64))
def test_more_microbatches_never_take_more(layout: Layout, first: int, second: int) -> None:
    few, many = sorted((first, second))
    assert demand(BASE, layout, many).gib <= demand(BASE, layout, few).gib


@given(LAYOUTS, st.integers(1, 32))
def test_checkpointing_takes_less_and_fp32_more(layout: Layout, count: int) -> None:
    full = with_(memory=dataclasses.replace(BASE.memory, checkpointing="full"))
    fp32 = with_(precision=dataclasses.replace(BASE.precision, compute="fp32"))
    assert demand(full, layout, count).activations < demand(BASE, layout, count).activations
    assert demand(fp32, layout, count).activations > demand(BASE, layout, count).activations


@given(LAYOUTS, st.floats(0.1, 500))
def test_microbatches_are_the_fewest_that_fit(layout: Layout, gib: float) -> None:
    layout = dataclasses.replace(layout, pipeline=1)
    count, rows = microbatches(BASE, layout, gib), rank_rows(BASE, layout)
    assert 1 <= count <= rows
    fitting = [c for c in range(1, rows + 1) if demand(BASE, layout, c).gib <= gib]
    assert count == (fitting[0] if fitting else rows)


@budget(max_examples=30)
@given(st.integers(1, 10**15))
def test_microbatches_of_any_batch_are_found_at_once(rows: int) -> None:
    training = Training(global_batch=rows * 2048, seq_len=2048)
    assert 1 <= microbatches(with_(training=training), Layout(shard=2), 80) <= rows


@given(st.integers(1, 500), POWERS, POWERS)
def test_rank_rows_have_room_for_all(rows: int, replicate: int, shard: int) -> None:
    layout = Layout(replicate=replicate, shard=shard)
    room = rank_rows(with_(training=Training(global_batch=rows * 256)), layout)
    assert (room - 1) * layout.data_ranks < rows <= room * layout.data_ranks


@pytest.mark.parametrize(
    ("model", "parallelism", "devices_", "gib"),
    [
        pytest.param("debug", "single", 1, (0.05, 1), id="debug"),
        pytest.param("llama1b", "single", 1, (18, 40), id="1b"),
        pytest.param("llama8b", "fsdp", 2, (60, 73), id="8b-fsdp"),
        pytest.param("llama8b", "3d", 2, (55, 73), id="8b-3d"),
        pytest.param("llama70b", "fsdp", 32, (35, 73), id="70b-fsdp"),
        pytest.param("llama70b", "3d", 32, (35, 73), id="70b-3d"),
        pytest.param("llama405b", "fsdp", 256, (50, 73), id="405b-fsdp"),
        pytest.param("llama405b", "3d", 128, (45, 73), id="405b-3d"),
    ],
)
def test_what_known_models_take(model: str, parallelism: str, devices_: int, gib: tuple[float, float]) -> None:
    answer = needed(any_layout(model, parallelism))
    assert answer is not None
    layout, wants = answer
    assert layout.devices == devices_
    assert gib[0] <= wants <= gib[1] <= 80 * capacity.USABLE


def any_layout(model: str, parallelism: str) -> Recipe:
    """A recipe in bf16, also with a layout that can be planned only."""
    open_degrees = {
        "single": {}, "fsdp": {"shard": -1}, "3d": {"shard": -1, "tensor": "auto", "pipeline": "auto"},
    }[parallelism]  # fmt: skip
    base = recipe(f"model={model}")
    return dataclasses.replace(base, parallelism=Parallelism(**open_degrees))  # type: ignore[arg-type]


def test_state_is_16_bytes_a_parameter_and_is_cut_by_sharding() -> None:
    fp32 = with_(precision=dataclasses.replace(BASE.precision, compute="fp32"))
    whole = demand(fp32, Layout(), 1).state
    assert whole == 16 * BASE.model.parameters()
    gathered = 4 * BASE.model.matmul_parameters() * 2 / BASE.model.layers
    assert demand(fp32, Layout(shard=8), 1).state == pytest.approx(whole / 8 + gathered)


@pytest.mark.parametrize(
    ("precision", "kept", "alone", "gathered"),
    [
        pytest.param("fp32", 16, (0, 0), (4, 4), id="fp32"),
        pytest.param("bf16", 16, (2, 2), (2, 2), id="bf16"),
        pytest.param("bf16_pure", 8, (0, 0), (2, 2), id="pure"),
        pytest.param("float8", 16, (0, 2), (1, 2), id="float8"),
        pytest.param("float8_rowwise", 16, (2, 2), (2, 2), id="rowwise"),
        pytest.param("mxfp8", 16, (2, 2), (2, 2), id="mx"),
    ],
)
def test_weights_take_what_their_types_do(precision: str, kept: int, alone: Any, gathered: Any) -> None:
    """Bytes of a parameter: kept, with gradient and state; of blocks and head, cast on one device; gathered by FSDP."""
    how = composed([f"precision={precision}", "precision.emulate=true", "cluster=cpu"]).precision
    chosen, model = with_(precision=how), BASE.model
    state = kept * model.parameters()
    blocks, head = model.layers * model.block_matmul_parameters(), model.vocab * model.dim
    assert demand(chosen, Layout(), 1).state == state + alone[0] * blocks + alone[1] * head
    used = (gathered[0] * blocks + gathered[1] * head) * 2 / model.layers
    assert demand(chosen, Layout(shard=8), 1).state == pytest.approx(state / 8 + used)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 64))
@budget(max_examples=40)
def test_needed_is_the_smallest_that_carries(heads: int, layers: int, width: int) -> None:
    model = Llama(dim=heads * 128 * width, layers=layers * 8, heads=heads, kv_heads=1, ffn=512 * width, vocab=32000)
    wide = with_(model=model, parallelism=Parallelism(shard=-1))
    answer = needed(wide)
    if answer is None:
        return
    layout, gib = answer
    assert gib <= 80 * capacity.USABLE
    if layout.devices > 1:
        half = Layout(shard=layout.devices // 2)
        assert demand(wide, half, rank_rows(wide, half)).gib > 80 * capacity.USABLE


@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "expected"),
    [
        pytest.param("cpu", [], 1, 16 * 0.92 - 0.35, id="cpu"),
        pytest.param("cpu", [], 4, 16 * 0.92 / 4 - 0.35, id="cpu-shared"),
        pytest.param("gpu", [], 8, 81559 / 1024 * 0.92, id="gpu-each"),
        pytest.param("gpu", ["cluster.memory_gib=40"], 8, 40 * 0.92, id="as-told"),
    ],
)
def test_what_a_rank_may_use(kind: str, overrides: list[str], ranks: int, expected: float) -> None:
    machine = detector(kind)()
    told = dataclasses.replace(BASE.cluster, memory_gib=40.0 if overrides else None)
    assert available(with_(cluster=told), Layout(replicate=ranks), machine) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_copy_of_the_state_takes_room_beside_it(ranks: int) -> None:
    machine, layout = detector("cpu")(), Layout(shard=ranks)
    copied = with_(checkpoint=dataclasses.replace(BASE.checkpoint, mode="async"))
    room = available(with_(), layout, machine) - available(copied, layout, machine)
    assert room == pytest.approx(12 * BASE.model.parameters() / ranks / 2**30)
    on_gpu = detector("gpu")()
    assert available(copied, layout, on_gpu) == available(with_(), layout, on_gpu), "the copy is in the host's memory"


def test_unknown_memory_holds_everything() -> None:
    machine = dataclasses.replace(detector("gpu")(), memory_gib=None)
    unknown = with_(cluster=dataclasses.replace(BASE.cluster, memory_gib=None))
    assert available(unknown, Layout(), machine) == math.inf
    capacity.check(unknown, Layout(), machine, 1)


def test_check_refuses_exactly_what_is_more_than_there_is() -> None:
    machine = detector("gpu")()
    told = with_(cluster=dataclasses.replace(BASE.cluster, memory_gib=None))
    rows = rank_rows(told, Layout(shard=8))
    wants = demand(told, Layout(shard=8), rows).gib
    for share, fits in ((0.99, False), (1.01, True)):
        there = dataclasses.replace(machine, memory_gib=wants * share / capacity.USABLE)
        if fits:
            capacity.check(told, Layout(shard=8), there, rows)
        else:
            with pytest.raises(Refusal, match="needs about"):
                capacity.check(told, Layout(shard=8), there, rows)
    assert wants * GIB == pytest.approx(sum(dataclasses.astuple(demand(told, Layout(shard=8), rows))))


@pytest.mark.parametrize(
    ("model", "parallelism", "nodes", "more", "expected"),
    [
        pytest.param("debug", "3d", 1, [], Layout(pipeline=2, shard=2, tensor=2), id="debug-on-8"),
        pytest.param("llama8b", "3d", 1, [], Layout(pipeline=2, shard=2, tensor=2), id="8b-on-8"),
        pytest.param("llama8b", "fsdp_tp", 4, [], Layout(shard=4, tensor=8), id="8b-on-32"),
        pytest.param("llama70b", "3d", 8, [], Layout(pipeline=2, shard=4, tensor=8), id="70b-on-64"),
        pytest.param("llama405b", "3d", 64, ["memory=full"], Layout(pipeline=2, shard=32, tensor=8), id="405b-on-512"),
        pytest.param("llama405b", "3d", 16, ["memory=full"], Layout(pipeline=8, shard=2, tensor=8), id="405b-on-128"),
    ],
)
def test_auto_degrees_follow_from_cluster_and_model(
    model: str, parallelism: str, nodes: int, more: list[str], expected: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect", detector("gpu"))
    sizes = ["training.seq_len=8192", "training.global_batch=16777216"]
    run = composed([f"model={model}", f"parallelism={parallelism}", *sizes, *more], ranks=nodes * 8)
    assert run.layout == expected
    assert demand(run, run.layout, run.microbatches).gib <= 80 * capacity.USABLE


def test_a_refusal_says_when_recomputing_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", detector("gpu"))
    with pytest.raises(Refusal, match=r"With memory=full it takes at least .* Type memory=full instead"):
        composed(
            ["model=qwen3_32b", "parallelism=fsdp_pp", "training.seq_len=8192", "training.global_batch=16777216"], 64
        )


@pytest.mark.parametrize(
    ("changes", "matrices", "others"),
    [
        pytest.param(["optimizer.moments=bf16"], 4, 4, id="bf16"),
        pytest.param(["optimizer=muon"], 4, 8, id="muon"),
        pytest.param(["optimizer=muon", "optimizer.moments=bf16"], 2, 4, id="muon-bf16"),
        pytest.param(["optimizer=sgd"], 0, 0, id="sgd"),
    ],
)
@pytest.mark.parametrize("layout", [Layout(), Layout(shard=4), Layout(tensor=2)], ids=str)
def test_state_of_optimizers(changes: list[str], matrices: int, others: int, layout: Layout) -> None:
    """Against AdamW's 8 bytes a parameter."""
    other, model = dataclasses.replace(BASE, optimizer=recipe(*changes).optimizer), BASE.model
    in_blocks = model.layers * model.block_matmul_parameters()
    less = (8 - matrices) * in_blocks + (8 - others) * (model.parameters() - in_blocks)
    saved = demand(BASE, layout, 1).state - demand(other, layout, 1).state
    assert saved == pytest.approx(less / layout.sharded / layout.tensor)


def test_logits_in_chunks_and_one_mask_are_counted() -> None:
    chunked = with_(training=dataclasses.replace(BASE.training, loss_chunk=256))
    masked = with_(dataset=dataclasses.replace(BASE.dataset, mask_documents=True))
    flex = with_(dataset=masked.dataset, training=dataclasses.replace(BASE.training, attention="flex"))
    plain, one = demand(BASE, Layout(shard=8), 1).activations, Layout(shard=8)
    assert demand(chunked, one, 1).activations < plain
    tokens = rank_rows(BASE, one) * BASE.training.seq_len
    assert demand(masked, one, 1).activations - plain == 2 * tokens * BASE.training.seq_len
    assert demand(flex, one, 1).activations == plain
