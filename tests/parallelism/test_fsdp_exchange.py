"""How FSDP exchanges weights and gradients: buffers in flight, process groups, symmetric memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run, read_learned_values, train_run
from tests.support.tiers import full
from titan.config import warning
from titan.errors import ConfigError
from titan.model import init_weights
from titan.model.schema import Llama
from titan.parallelism import data
from titan.run.compose import warn_of_small_work
from titan.training.train_step import ModelStage

CONFIG = Llama(dim=16, layers=4, heads=2, kv_heads=1, ffn=24, vocab=32)


def build_stages(rank: int, first_ranks: int) -> list[ModelStage]:
    """Return two stages that are sharded over all ranks; replicas where `first_ranks` is above one."""
    world = dist.get_world_size()
    sizes, names = (
        ((first_ranks, world // first_ranks), ("replicate", "shard")) if first_ranks > 1 else ((world,), ("shard",))
    )
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    stages = []
    for layers in (range(2), range(2, 4)):
        with torch.device("meta"):
            model: Any = CONFIG.build()
            model.keep(layers, first=layers.start == 0, last=layers.start > 0)
        initial, stage = model.initial(), ModelStage(model)
        data.shard_stage(stage, mesh, torch.float32, reshard=True)
        init_weights.materialise_model(model, initial, 0, "cpu")
        stages.append(stage)
    return stages


def list_param_groups(stages: list[ModelStage]) -> list[Any]:
    units: list[nn.Module] = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]  # type: ignore[operator]


def configure(rank: int, world: int, first_ranks: int) -> tuple[int, bool, set[int], list[int]]:
    """Return the number of groups that reduce, whether others gather, the buffers, and the ranks that reduce."""
    stages = build_stages(rank, first_ranks)
    data.configure_exchange(stages, 3, separate=True, symmetric=False)
    groups = list_param_groups(stages)
    reducing = {group._reduce_scatter_process_group for group in groups}
    gathering = {group._all_gather_process_group for group in groups}
    buffers = {group.reduce_scatter_max_input_buffers for group in groups}
    return len(reducing), reducing.isdisjoint(gathering), buffers, dist.get_process_group_ranks(reducing.pop())


@pytest.mark.parametrize(
    ("first_ranks", "ranks"),
    [pytest.param(1, [[0, 1]] * 2, id="fsdp"), full(2, [[0, 1], [0, 1], [2, 3], [2, 3]], id="hsdp")],
)
def test_all_units_of_all_stages_reduce_in_one_other_group(first_ranks: int, ranks: list[list[int]]) -> None:
    assert run_ranks(configure, len(ranks), first_ranks) == [(1, True, {3}, group) for group in ranks]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("parallelism=fsdp",), id="fsdp"),
        full(("parallelism=hsdp",), id="hsdp"),
        full(("parallelism=pp", "parallelism.shard=2", "parallelism.schedule=Interleaved1F1B"), id="pp"),
        full(("model=qwen3_moe_debug", "parallelism=fsdp", "parallelism.expert=2", "cluster.devices=4"), id="ep"),
    ],
)
def test_what_is_learned_stays_the_same(layout: tuple[str, ...], tmp_path: Any) -> None:
    settings = ("model.layers=4", "training.steps=2", *layout)
    usual = compose_tiny_run(tmp_path / "usual", *settings)
    changed = compose_tiny_run(
        tmp_path / "changed", *settings, "parallelism.reduce_buffers=3", "parallelism.separate_reduce=true"
    )
    for run in (usual, changed):
        train_run(run)
    assert read_learned_values(changed) == read_learned_values(usual)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(("parallelism.symmetric_memory=true",), "symmetric_memory=true: needs a CUDA device", id="cpu"),
        pytest.param(
            ("parallelism.symmetric_memory=true", "parallelism.reduce_buffers=2", "cluster=h100"),
            "has one buffer, and parallelism.reduce_buffers=2",
            id="buffers",
        ),
        pytest.param(("parallelism.reduce_buffers=0",), "parallelism.reduce_buffers=0", id="none"),
    ],
)
def test_what_cannot_be_exchanged_so_is_rejected(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_test_run(["parallelism=fsdp", *settings], remote="cluster=h100" in settings)


@pytest.mark.full
def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.run.checks.read_torch_version", lambda: (2, 12))
    with pytest.raises(ConfigError, match=r"parallelism\.separate_reduce=true: needs torch 2\.13"):
        compose_test_run(["parallelism=fsdp", "parallelism.separate_reduce=true"])
    compose_test_run(["parallelism=fsdp"])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_where_nothing_is_sharded_a_warning_says_so(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    warning.warn_once.cache_clear()
    compose_test_run([f"parallelism={layout}", "parallelism.reduce_buffers=2"])
    assert "parallelism.reduce_buffers=2: has no effect, because FSDP shards nothing" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        pytest.param(("parallelism=tp",), True, id="whole-experts"),
        pytest.param(("parallelism=tp", "parallelism.expert=auto"), False, id="shared"),
        pytest.param(("parallelism=fsdp",), False, id="no-tensor-ranks"),
        pytest.param(("parallelism=tp", "model=debug"), False, id="dense"),
        pytest.param(("parallelism=tp", "parallelism.sequence_parallel=false"), False, id="cannot-share"),
    ],
)
def test_whole_experts_on_tensor_ranks_are_warned_of(
    settings: tuple[str, ...], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warning.warn_once.cache_clear()
    wide = () if "model=debug" in settings else ("model.expert_ffn=1536",)
    warn_of_small_work(compose_test_run(["model=qwen3_moe_debug", *wide, *settings]))
    assert ("tensor ranks has whole experts; with parallelism.expert=auto" in capsys.readouterr().err) == is_warned
