"""Law 1: a seed gives bitwise the same initial weights under every layout."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.ranks import RankFailedError, run_ranks
from tests.support.tiers import full
from titan.model import init_weights
from titan.model.init_weights import Normal, Ones, fill_normal, materialise_model
from titan.model.schema import Llama

UNEVEN = Llama(dim=40, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=101, vocab=131)
TIED = Llama(dim=32, layers=1, ffn=48, vocab=67, tied=True)


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    """Blocks of a few rows, so that small parameters have several."""
    with patch.object(init_weights, "BLOCK_VALUES", 64):
        yield


def sampled(
    shape: tuple[int, ...],
    box: tuple[tuple[int, int], ...] | None = None,
    name: str = "w",
    seed: int = 0,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of a box, given as (start, stop) of each dimension; None: the whole."""
    box = box or tuple((0, n) for n in shape)
    local = torch.full([stop - start for start, stop in box], math.nan, dtype=dtype)
    fill_normal(local, name=name, seed=seed, std=std, shape=shape, offset=tuple(start for start, _ in box))
    return local


def intervals(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut range(size) into intervals, empty ones included."""
    cuts = st.lists(st.integers(0, size), max_size=4)
    return cuts.map(lambda c: list(itertools.pairwise([0, *sorted(c), size])))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """A shape and a grid of boxes that covers it."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    return shape, list(itertools.product(*(draw(intervals(n)) for n in shape)))


@given(partitions())
def test_whole_is_the_union_of_any_boxes(partition: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]) -> None:
    shape, boxes = partition
    whole = sampled(shape)
    assert not whole.isnan().any()
    for box in boxes:
        assert torch.equal(sampled(shape, box), whole[tuple(slice(*side) for side in box)])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 47, 48, 50, 1000, 1024])
def test_a_part_of_a_block_has_the_values_of_the_whole(size: int) -> None:
    whole = torch.empty(size).normal_(generator=torch.Generator().manual_seed(3))
    for used in range(1, size + 1):
        found = init_weights._sample_normal(torch.empty(size), used, torch.Generator().manual_seed(3))
        assert torch.equal(found[:used], whole[:used])


def test_rows_do_not_depend_on_how_many_follow() -> None:
    assert torch.equal(sampled((13, 8)), sampled((29, 8))[:13])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"name": "v"}, id="name"),
        pytest.param({"seed": 1}, id="seed"),
        pytest.param({"name": "w0", "seed": 0}, id="name-that-joins-the-block"),
    ],
)
def test_other_names_and_seeds_give_other_values(other: dict[str, Any]) -> None:
    assert not (sampled((64, 8)) == sampled((64, 8), **other)).any()


def test_blocks_differ() -> None:
    blocks = sampled((64, 8)).reshape(8, -1)
    assert not any((a == b).any() for a, b in itertools.combinations(blocks, 2))


def test_seeds_of_blocks_keep_their_meaning() -> None:
    """A change here would change every run's start: fixed, not computed."""
    assert init_weights.hash_block_seed(0, "norm.weight", 0) == 14079161155085768481
    assert init_weights.hash_block_seed(2**63, "layers.0.attention.wq.weight", 12) == 18385063830235845118


def test_distribution_is_normal_clipped_at_three_deviations() -> None:
    values = sampled((2000, 200), std=0.5).double() / 0.5
    n = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert values.abs().max() == pytest.approx(3, abs=1e-6)
    # The variance of a clipped normal; the share clipped to either side.
    density, tail = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erfc(3 / math.sqrt(2)) / 2
    variance = 1 - 2 * tail - 6 * density + 18 * tail
    assert values.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / n))
    assert (values.abs() > 2.999999).double().mean() == pytest.approx(2 * tail, rel=0.2)
    assert abs((values[1:] * values[:-1]).mean()) < 4 / math.sqrt(n)


def test_low_precision_rounds_the_same_values() -> None:
    assert torch.equal(sampled((9, 7), dtype=torch.bfloat16), sampled((9, 7)).bfloat16())


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    sampled((16, 16))
    assert torch.equal(torch.randn(4), expected)


def on_meta(config: Llama) -> Any:
    with torch.device("meta"):
        return config.build()


def weights(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """All parameters whole, as every rank sees them."""
    named = model.named_parameters(remove_duplicate=False)
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}
    return {name: value.numpy() for name, value in whole.items()}


def step(model: Any) -> None:
    """Forward and backward of a row; outside FSDP's root forward its parameters are still gathered for the head."""
    tokens = torch.arange(6)[None]
    model.head(model(tokens), tokens).backward()


def gradients(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """All gradients whole, as every rank sees them."""
    named = [(name, p.grad) for name, p in model.named_parameters()]
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).numpy() for n, g in named if g is not None}


def alone(config: Llama) -> tuple[Any, Any]:
    """What `sharded` gives, on one device."""
    model = on_meta(config)
    materialise_model(model, model.initial(), 5, "cpu")
    before = weights(model)
    step(model)
    return before, gradients(model)


def test_materialise_fills_everything() -> None:
    model = on_meta(UNEVEN)
    materialise_model(model, model.initial(), 5, "cpu")
    expected = UNEVEN.build()
    assert torch.equal(model.inv_freq, expected.inv_freq)
    for name, weight in model.named_parameters():
        how = model.initial()[name]
        if isinstance(how, Ones):
            assert (weight == 1).all()
        else:
            assert weight.std().item() == pytest.approx(how.std, rel=0.1)
            assert torch.equal(weight, sampled(tuple(weight.shape), name=name, seed=5, std=how.std))


def test_tied_weights_stay_tied() -> None:
    model = on_meta(TIED)
    materialise_model(model, model.initial(), 5, "cpu")
    assert model.head.weight is model.tok_embeddings.weight
    assert len(list(model.parameters())) == len(model.initial())


def test_parameter_without_an_initial_value_is_named() -> None:
    model = on_meta(UNEVEN)
    initial = {k: v for k, v in model.initial().items() if k != "layers.1.attention.wk.weight"}
    with pytest.raises(KeyError, match=r"layers\.1\.attention\.wk\.weight"):
        materialise_model(model, initial, 5, "cpu")


def test_fake_parameters_cost_nothing() -> None:
    """A simulated model of 405B parameters is materialised without its memory or its values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = on_meta(Llama(dim=16384, layers=1, heads=128, kv_heads=8, ffn=53248, vocab=128256))
    never = patch.object(init_weights, "fill_normal", side_effect=AssertionError("drew values for a fake parameter"))
    with never, FakeTensorMode(allow_non_fake_inputs=True):
        materialise_model(model, model.initial(), 5, "cpu")
        assert model.head.weight.device.type == "cpu"


def split_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism: the blocks' matrices by rows, those that follow by columns."""
    plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
    plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
    plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    for block in model.blocks():
        parallelize_module(block, mesh, plan)


def parallelise(model: Any, world: int, layout: str) -> None:
    """Distribute a model with `layout`."""
    mesh = init_device_mesh("cpu", (world,))
    if layout == "replicate-shard":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "shard-tensor":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
        split_tensors(model, both["tensor"])
        mesh = both["shard"]
    last: Any = (lambda p: Shard(p.dim() - 1)) if layout == "shard-columns" else None
    for module in [*model.blocks(), model]:
        fully_shard(module, mesh=mesh, shard_placement_fn=last)


def sharded(rank: int, world: int, config: Llama, layout: str) -> tuple[Any, Any]:
    """On each rank: parallelise on meta, materialise, gather the weights and, of a sum over ranks, the gradients."""
    model = on_meta(config)
    parallelise(model, world, layout)
    materialise_model(model, model.initial(), 5, "cpu")
    before = weights(model)
    step(model)
    return before, gradients(model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "layout", "world"),
    [
        full(UNEVEN, "shard", 2, id="fsdp-2"),
        full(UNEVEN, "shard", 4, id="fsdp-4"),
        full(Llama(dim=6, layers=1, heads=1, kv_heads=1, ffn=5, vocab=17), "shard", 4, id="fsdp-4-empty"),
        full(Llama(dim=32, layers=1, ffn=48, vocab=64), "shard-columns", 4, id="fsdp-4-columns"),
        pytest.param(TIED, "shard", 2, id="fsdp-2-tied"),
        pytest.param(UNEVEN, "replicate-shard", 4, id="hsdp-2x2"),
        full(Llama(dim=32, layers=1, ffn=48, vocab=67), "shard-tensor", 4, id="fsdp-2-tensor-2"),
    ],
)
def test_every_layout_starts_the_same(config: Llama, layout: str, world: int) -> None:
    expected, expected_gradients = alone(config)
    for found, found_gradients in run_ranks(sharded, world, config, layout):
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert set(found_gradients) == set(expected_gradients)
        for name, value in expected_gradients.items():  # the same row on all ranks: the mean is the one's
            np.testing.assert_allclose(found_gradients[name], value, rtol=0, atol=1e-5 * abs(value).max(), err_msg=name)


def test_wrong_box_is_an_error() -> None:
    with (
        patch.object(init_weights, "compute_local_shape_and_global_offset", return_value=((1,), (0,))),
        pytest.raises(RankFailedError, match="the local shape is"),
    ):
        run_ranks(sharded, 1, UNEVEN, "shard")


def raises_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    torch.distributed.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    torch.distributed.barrier()


def waits(rank: int, world: int) -> None:
    time.sleep(3600)  # were it not killed, the test would not end


@pytest.mark.full
def test_run_ranks_gives_results_in_order() -> None:
    def total(rank: int, world: int, start: int) -> tuple[int, Tensor]:
        value = torch.tensor([start + rank])
        torch.distributed.all_reduce(value)
        return rank, value

    assert run_ranks(total, 3, 10) == [(rank, torch.tensor([33])) for rank in range(3)]


@pytest.mark.parametrize(
    ("fn", "message", "timeout"),
    [
        pytest.param(raises_on_one, "rank 1 of 2:(.|\n)*ValueError: planted", 300, id="raises"),
        pytest.param(dies_on_one, "rank 1 with exit code 3", 300, id="dies"),
        pytest.param(waits, r"no result in time from ranks \[0, 1\]", 0.5, id="too-long"),
    ],
)
def test_run_ranks_reports_failure_and_leaves_no_one(fn: Any, message: str, timeout: float) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_ranks(fn, 2, timeout=timeout)
    assert not multiprocessing.active_children()


def test_unused_names_are_allowed() -> None:
    """A pipeline stage holds a part of what the model declares."""
    model = on_meta(TIED)
    materialise_model(model, model.initial() | {"layers.9.attention.wq.weight": Normal(1.0)}, 5, "cpu")
