"""FSDP units: what is gathered together, when, and that the host waits once per layer with experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.composing import compose_test_run
from tests.support.gathers import count_gathers
from tests.support.machines import make_detector
from tests.support.own_strategies import Columns, Kept
from tests.support.tiers import full
from titan.cluster import devices
from titan.model.schema import Llama
from titan.parallelism import units
from titan.parallelism.schema import Sharding, Strategy
from titan.run.run import Run

LAYERS = 6
TINY = (
    "model=qwen3_moe_debug", f"model.layers={LAYERS}", "model.experts=16", "model.vocab=64", "model.dim=32",
    "model.expert_ffn=16", "training.seq_len=16", "training.global_batch=1024", "dataset=synthetic", "compile=off",
    "checkpoint=off", "precision=bf16", "parallelism=ep",
)  # fmt: skip


@pytest.fixture
def tiny_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Composes a model of six layers with experts on 64 ranks of eight nodes."""
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))

    def compose(*settings: str) -> Run:
        return compose_test_run([*TINY, *settings, f"hydra.run.dir={tmp_path}"], ranks=64)

    return compose


@pytest.mark.parametrize(
    ("settings", "has_mesh_per_parameter"),
    [
        pytest.param(["memory=full"], True, id="full"),
        full([], True, id="none"),
        full(["memory=selective"], True, id="selective"),
        full(["parallelism.prefetch=2"], True, id="two-ahead"),
        full(["parallelism.reshard=4"], True, id="resharded-over-four"),
        full(["parallelism.replicate=2", "parallelism.shard=32"], True, id="hsdp"),
        full(["memory=full"], False, id="one-mesh-per-unit"),
    ],
)
def test_experts_are_gathered_ahead_and_the_host_waits_once(
    settings: list[str], has_mesh_per_parameter: bool, tiny_experts: Any
) -> None:
    forward, backward = count_gathers(tiny_experts(*settings), has_mesh_per_parameter)
    assert (forward.layers, backward.layers) == (LAYERS, LAYERS)
    assert (forward.host_waits, backward.host_waits) == (LAYERS, 0)
    assert forward.late <= 1
    assert backward.late == 0


@pytest.mark.full
def test_nothing_is_gathered_ahead_where_that_is_off(tiny_experts: Any) -> None:
    forward, _ = count_gathers(tiny_experts("parallelism.prefetch=0"))
    assert forward.late == LAYERS


@pytest.fixture
def meshes() -> Iterator[list[Any]]:
    """Meshes of 4 and of 2 x 2 ranks."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield [
        init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ]
    dist.destroy_process_group()


FEED_FORWARD, PROJECTION = "layers.0.feed_forward", "layers.0.feed_forward.w1"
OTHER_RANKS = (Strategy(match=(FEED_FORWARD,)), 1)
CASES = [
    pytest.param({"a": OTHER_RANKS}, True, True, [FEED_FORWARD], id="other-ranks"),
    pytest.param({"a": (Columns(match=(FEED_FORWARD,)), 0)}, 4, False, [FEED_FORWARD], id="other-dimension"),
    pytest.param({"a": (Strategy(match=(FEED_FORWARD,)), 0)}, True, True, [], id="nothing-else"),
    pytest.param({"a": (Kept(match=(FEED_FORWARD,)), 1)}, True, True, [], id="own-wrapper"),
    pytest.param({"a": OTHER_RANKS}, 4, True, [], id="resharded-over-a-number"),
    pytest.param({"a": OTHER_RANKS}, True, False, [], id="one-mesh-per-unit"),
    pytest.param({"a": (Kept(match=("layers.0",)), 0), "b": OTHER_RANKS}, True, True, [],
                 id="own-wrapper-of-the-block"),
    pytest.param({"a": OTHER_RANKS, "b": (Columns(match=(PROJECTION,)), 0)}, True, True, [FEED_FORWARD, PROJECTION],
                 id="nested"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "reshard", "has_mesh_per_parameter", "inner"), CASES)
def test_what_is_gathered_with_its_block(
    groups: dict[str, tuple[Strategy, int]],
    reshard: bool | int,
    has_mesh_per_parameter: bool,
    inner: list[str],
    meshes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "HAS_MESH_PER_PARAMETER", has_mesh_per_parameter)
    with torch.device("meta"):
        model = Llama(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64).build()
    shardings = {name: Sharding(strategy, meshes[mesh]) for name, (strategy, mesh) in groups.items()}
    listed = units.list_units(model, meshes[0], shardings, reshard)
    assert [name for unit in listed for name in unit.inner] == inner
    assert units.list_units_inside_blocks(listed) == ([] if inner else [FEED_FORWARD])
    names = [name for unit in listed for name in unit.names]
    assert names == [*([] if inner else [FEED_FORWARD]), "layers.0", "layers.1", "head", "tok_embeddings"]


def test_a_parameter_has_the_ranks_and_dimension_of_the_innermost_group(meshes: list[Any]) -> None:
    with torch.device("meta"):
        model = Llama(dim=32, layers=1, heads=4, kv_heads=2, ffn=48, vocab=64).build()
    outer = Sharding(Strategy(match=(FEED_FORWARD,)), meshes[1])
    unit = units.Unit(
        ["layers.0"],
        Sharding(Strategy(match=()), meshes[0]),
        True,
        {FEED_FORWARD: outer, PROJECTION: Sharding(Columns(match=(PROJECTION,)), meshes[0])},
    )
    choose = units.build_placement_options(unit, model)["shard_placement_fn"]
    block: Any = model.layers["0"]
    feed_forward = block.feed_forward
    assert choose(block.attention.wq.weight).dim == 0
    assert choose(feed_forward.w1.weight).dim == 1
    results = [choose(weight) for weight in (feed_forward.w2.weight, feed_forward.w3.weight)]
    assert [(result.placement.dim, result.mesh_info.mesh) for result in results] == [(0, meshes[1])] * 2
    assert results[0].mesh_info is results[1].mesh_info  # torch wants one object for each group of ranks
