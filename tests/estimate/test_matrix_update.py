"""The estimate of an optimizer that computes with whole matrices counts its products, its owners and its exchanges."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.estimate.test_step_time import composed_run, speeds
from titan.estimate import memory, step_time
from titan.estimate.operations import estimate_matmul
from titan.estimate.step_time import StepModel
from titan.optimizer.muon import orthogonalise_matrix
from titan.optimizer.schema import AdamW, Muon
from titan.run.run import Run


def step_model(run: Run) -> StepModel:
    return StepModel(run, run.layout, run.microbatches, speeds())


def added_seconds(layout: str, *more: str) -> float:
    """What Muon's update takes longer than the same update without work on whole matrices."""
    return step_time.estimate_matrix_update(step_model(composed_run(layout, "optimizer=muon", *more)))


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)], ids=str)
def test_the_products_are_those_of_the_optimizer(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalise_matrix(torch.ones(shape), iterations=3)
    products = Muon(iterations=3).list_matrix_products(*shape)
    assert sum(2 * math.prod(product) for product in products) == counter.get_total_flops()
    assert AdamW().list_matrix_products(*shape) == []


@pytest.mark.full
def test_one_device_computes_every_matrix_and_exchanges_none() -> None:
    run = composed_run("ddp", "parallelism=single", "cluster.devices=1", "cluster.nodes=1", "optimizer=muon")
    products = [
        product
        for matmul in run.model.block_matmuls(0).values()
        for product in run.optimizer.list_matrix_products(matmul.outputs, matmul.inputs)
    ]
    expected = run.model.layers * sum(estimate_matmul(*product, speeds()) for product in products)
    assert step_time.estimate_matrix_update(step_model(run)) == pytest.approx(expected)
    assert step_model(composed_run("fsdp")).estimate_update() < added_seconds("fsdp")


@pytest.mark.full
def test_owners_compute_the_largest_matrices_first_in_rounds() -> None:
    run = composed_run("fsdp", "optimizer=muon")
    model, small, large = step_model(run), (512, 512), (2048, 2048)
    seconds = {shape: step_time._estimate_products(model, shape) for shape in (small, large)}
    for owners, rounds in {1: (5, 3), 2: (2, 2), 3: (2, 1), 8: (0, 1)}.items():
        counted = step_time._estimate_largest_updates(model, Counter({small: 5, large: 3}), owners)
        assert counted == pytest.approx(rounds[0] * seconds[small] + rounds[1] * seconds[large]), owners


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "more"), [("fsdp", ()), ("fsdp-tp", ()), ("pp", ()), ("fsdp", ("optimizer.newton_schulz=fp32",))],
    ids=["fsdp", "fsdp-tp", "pp", "fp32"],
)  # fmt: skip
def test_ranks_share_out_the_matrices(layout: str, more: tuple[str, ...]) -> None:
    alone = added_seconds("ddp", *more)
    shared = added_seconds(layout, *more)
    assert 0 < shared < alone


@pytest.mark.full
def test_experts_are_updated_where_they_are() -> None:
    """More expert-parallel ranks have fewer experts each; without FSDP they exchange no expert."""
    seconds = {
        degree: added_seconds(
            "fsdp", "model=qwen3_30b_a3b", f"parallelism.expert={degree}", "training.global_batch=524288"
        )
        for degree in (1, 8)
    }
    assert seconds[8] == pytest.approx(seconds[1], rel=0.2)  # 16 ranks have 8 of the 128 experts either way


def optimizer_bytes(device: str, newton_schulz: str) -> float:
    """What the optimizer has in memory during its step."""
    run = composed_run("fsdp", "optimizer=muon", f"optimizer.newton_schulz={newton_schulz}")
    *_, (_, phases) = memory.iterate_step_phases(run, run.layout, run.microbatches, 0, device)
    return next(usage.parts["optimizer"] for usage in phases if usage.phase == "optimizer step")


@pytest.mark.full
@pytest.mark.parametrize(("device", "chosen"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_memory_is_estimated_in_the_type_that_the_device_computes_in(device: str, chosen: str) -> None:
    assert optimizer_bytes(device, "auto") == optimizer_bytes(device, chosen)
    assert optimizer_bytes(device, "bf16") < optimizer_bytes(device, "fp32")


def test_muon_computes_in_the_type_that_is_estimated() -> None:
    optimizer: Any = Muon().build([("layers.0.attention.wq.weight", torch.nn.Parameter(torch.ones(2, 2)))])
    for device, dtype in {"cuda": torch.bfloat16, "cpu": torch.float32, "mps": torch.float32}.items():
        parameter: Any = SimpleNamespace(device=SimpleNamespace(type=device))
        assert optimizer._choose_dtype(parameter) == dtype
        assert Muon().choose_matrix_bytes(device) == dtype.itemsize
