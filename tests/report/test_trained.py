"""A comparison of really trained runs: one device against sharded weights, and another recipe."""

from __future__ import annotations

import pytest

from tests.support.runs import compose_tiny_run, train_run
from titan.report.comparison import compare
from titan.report.findings import Variant

MORE = ("training.steps=8", "evaluation.tokens=256", "evaluation.every=4", "checkpoint=off")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    folder = tmp_path_factory.mktemp("trained")
    for seed in range(2):
        for layout in ("single", "fsdp2"):
            train_run(compose_tiny_run(folder / f"{layout}-{seed}", *MORE, f"training.seed={seed}", layout=layout))
        train_run(compose_tiny_run(folder / f"wrong-{seed}", *MORE, f"training.seed={seed}", "optimizer.lr=5e-2"))
    found = compare([folder], baseline="parallelism=single,lr=0.001")
    return {variant.label: variant for variant in found.variants}


@pytest.mark.full
def test_sharded_weights_learn_the_same(variants: dict[str, Variant]) -> None:
    learning = variants["parallelism=fsdp lr=0.001"].learning
    assert learning is not None and (learning.answer, learning.batches_equal, learning.pairs) == ("yes", True, 2)
    assert learning.first_loss_gap is not None and learning.first_loss_gap < 1e-6
    assert learning.first_norm_gap is not None and learning.first_norm_gap < 1e-5


@pytest.mark.full
def test_another_learning_rate_is_another_recipe(variants: dict[str, Variant]) -> None:
    variant = variants["parallelism=single lr=0.05"]
    assert not variant.same_science and variant.learning is None
    assert [quality.pairs for quality in variant.quality if quality.at == "the end"] == [2]


@pytest.mark.full
def test_speed_cost_and_hours_of_trained_runs_are_there(variants: dict[str, Variant]) -> None:
    for variant in variants.values():
        for run in variant.runs:
            assert run.state == "finished" and run.speed is not None and run.speed.steps == 5
            assert run.cost.device_hours > 0 and run.cost.goodput and 0 < run.cost.goodput <= 1
            assert run.validation is not None and len(run.curves.validation) == 2
