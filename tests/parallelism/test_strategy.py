"""Groups of modules with another sharding strategy; tests of the matrix prove what they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.checkpoint.test_manager import stop_at
from tests.support.matrix import GROUPS
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.parallelism.schema import Layout
from titan.parallelism.strategy import (
    ModelSharding,
    Strategy,
    assign_groups,
    blocks_are_alike,
    check_groups,
    count_shards,
    is_in_group,
    list_module_names,
)
from titan.training.worker import list_groups

NAMES = (
    "tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wo.weight", "layers.0.ffn_norm.weight",
    "layers.0.feed_forward.w1.weight", "layers.1.attention.wq.weight", "norm.weight", "head.weight",
)  # fmt: skip
OWN = "tests.support.own_strategies"


def groups(**match: tuple[str, ...]) -> dict[str, Strategy]:
    return {name: Strategy(match=patterns) for name, patterns in match.items()}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param({}, {}, id="none"),
        pytest.param(
            {"a": ("*",)}, dict.fromkeys(("tok_embeddings", "layers.0", "layers.1", "norm", "head"), "a"), id="all"
        ),
        pytest.param({"a": ("layers.0", "*.wq")}, {"layers.0": "a", "layers.1.attention.wq": "a"}, id="outermost"),
        pytest.param(
            {"a": ("layers.0",), "b": ("*.attention",)},
            {"layers.0": "a", "layers.0.attention": "b", "layers.1.attention": "b"},
            id="nested",
        ),
        pytest.param({"a": ("head",), "b": ("h*", "norm")}, {"head": "a", "norm": "b"}, id="first"),
    ],
)
def test_the_outermost_modules_of_the_first_group(given: dict[str, tuple[str, ...]], found: dict[str, str]) -> None:
    assert assign_groups(list_module_names(NAMES), groups(**given)) == found


def test_parameters_follow_the_innermost_group() -> None:
    given = {"a": Strategy(match=("layers.0",), shard=1), "b": Strategy(match=("*.attention",), shard=2)}
    modules = [name.removesuffix(".weight") for name in NAMES]
    assert list(count_shards(modules, given, Layout(shard=4)).values()) == [4, 2, 2, 1, 1, 2, 4, 4]
    assert [is_in_group(name, given) for name in modules] == [False, True, True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("match", "alike"),
    [(("layers.*",), True), (("*.wq", "head"), True), (("layers.0",), False), (("layers.1.*",), False)],
)
def test_blocks_that_are_alike(match: tuple[str, ...], alike: bool) -> None:
    names = [name for name in NAMES if not name.startswith("layers")]
    names += [f"layers.{i}.attention.{w}.weight" for i in range(3) for w in ("wq", "wk")]
    assert blocks_are_alike(names, groups(a=match)) == alike


@pytest.mark.parametrize(
    ("group", "tied", "message"),
    [
        pytest.param(Strategy(match=()), False, r"parallelism\.groups\.g\.match=\[\]: matches no module", id="empty"),
        pytest.param(Strategy(match=("layers.*.wz",)), False, r"match=.*no module of the model matches", id="nothing"),
        pytest.param(Strategy(match=("layers",)), False, r"match=.*no module of the model matches layers", id="layers"),
        pytest.param(Strategy(match=("head",), shard=3), False, r"g\.shard=3: does not divide the 4 ranks", id="ranks"),
        pytest.param(ModelSharding(match=("head",)), False, r"match=\[head\]: .* shards the whole model", id="model"),
        pytest.param(Strategy(match=("head",)), True, r"match=.*share a weight.*match both", id="tied"),
    ],
)
def test_groups_that_cannot_be(group: Strategy, tied: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_groups({"g": group}, NAMES[:-1] if tied else NAMES, Layout(replicate=2, shard=2), tied)


def _placed(trainer: Any) -> dict[str, Any]:
    """How each parameter is sharded: the size of each mesh dimension, and the placements; and the process groups."""
    named = dict(trainer.train_step.named_parameters())
    groups = sorted((group.dimension, len(group.ranks)) for group in list_groups(trainer.world).values())
    return {"groups": groups} | {
        name: (tuple(p.device_mesh.shape), tuple(map(str, p.placements)))
        for name, p in named.items()
        if isinstance(p, DTensor)
    }


def test_parameters_are_sharded_as_their_group_says_and_another_sharding_resumes(tmp_path: Path) -> None:
    """Ranks, dimension and wrapper; and a state of Muon, whose matrices are gathered over other ranks each."""
    settings = ("optimizer=muon", "training.steps=5", "model.layers=4")
    whole = compose_tiny_run(tmp_path / "whole", *settings)
    train_run(whole)
    before = compose_tiny_run(tmp_path / "parts", "modules=[tests]", GROUPS, "parallelism.shard=4", *settings)
    placed = train_run(before, lambda trainer: (stop_at(2)(trainer), _placed(trainer))[1])[0].extra
    assert train_run(compose_tiny_run(tmp_path / "parts", *settings))[0].code == 0
    assert placed["layers.0.attention.wq.weight"] == ((2, 2), ("R", "S(0)"))
    assert placed["layers.0.feed_forward.w2.weight"] == ((4,), ("S(1)",))
    assert placed["layers.0.feed_forward.w1.weight"] == ((4,), ("S(0)",))
    assert placed["norm.weight"] == placed["head.weight"] == ((4, 1), ("R", "S(0)"))
    assert placed["groups"] == [("replicate", 2), ("shard", 1), ("shard", 2), ("shard", 4)]  # of reports on hangs
    for line, wanted in zip(read_step_records(before), read_step_records(whole), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "message"),
    [
        pytest.param(f"_target_: {OWN}.Idle, match: [head]", "Idle.wrap did not apply fully_shard to head", id="idle"),
        full(f"_target_: {OWN}.IdleModel", "IdleModel.wrap did not shard all parameters of norm.", id="idle-model"),
        full(f"_target_: {OWN}.Columns, match: ['*.w2']", "Columns can't shard layers.0.feed_forward.w2", id="uneven"),
    ],
)
def test_a_strategy_that_cannot_wrap_a_module_ends_the_run(group: str, message: str, tmp_path: Path) -> None:
    run = compose_tiny_run(
        tmp_path, "modules=[tests]", f"+parallelism.groups={{g: {{{group}}}}}", "parallelism.shard=5"
    )
    assert all(message in str(seen.failure) for seen in train_run(run))
