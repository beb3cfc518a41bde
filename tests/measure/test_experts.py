"""What experts cost: both sides of each ratio compute the same, or differ in what the title says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.measure import command, expert_traffic, experts
from tests.support.composing import compose_test_run
from titan.model import expert_ops


@pytest.mark.parametrize("product", [pytest.param(each, id=each.title) for each in experts.MATMULS[:2]])
def test_a_loop_computes_what_a_grouped_matmul_does(product: experts.GroupedMatmul) -> None:
    x, weight, grad, ends = experts._make_tensors(product, "cpu")
    torch.testing.assert_close(
        expert_ops.multiply_with_kernel(x, weight, ends), expert_ops.multiply_in_loop(x, weight, ends)
    )
    both = (
        expert_ops.compute_weight_grad_with_kernel(x, grad, ends),
        expert_ops.compute_weight_grad_in_loop(x, grad, ends),
    )
    torch.testing.assert_close(*both)
    assert ends[-1] == product.rows == len(x) and ends.unique().numel() > 1


@pytest.mark.full
def test_the_traffic_of_a_layer_takes_less_than_three_fifths_of_its_matmuls() -> None:
    """qwen3_30b_a3b on an H100, in eager mode; each pass by itself."""
    ratios = {each.title: each.ratios[0] for each in expert_traffic.compare_traffic("")}
    assert set(ratios) == {"traffic / matmuls, forward", "traffic / matmuls, backward"}
    assert {title: ratio for title, ratio in ratios.items() if not 0.3 < ratio < 0.6} == {}


def test_traffic_counts_what_operations_read_and_write() -> None:
    shape = expert_traffic.LayerShape(tokens=64, dim=32, width=16, experts=4, top_k=2)
    rows, tokens = 64 * 2 * 32 * 2, 64 * 32 * 2
    forward, backward = expert_traffic.count_layer_traffic(shape)
    assert forward.bytes["titan::sum_rows"] == rows + tokens + 64 * 2 * 8
    assert forward.bytes["aten::silu"] == 2 * 64 * 2 * 16 * 2
    assert forward.bytes["padding"] == backward.bytes["padding"] == 0
    assert set(expert_traffic.MATMULS).isdisjoint(forward.bytes | backward.bytes)


@pytest.mark.full
def test_sides_of_steps_differ_in_the_experts() -> None:
    dense, moe = (
        compose_test_run([*side, "name=x"]) for side in experts.list_step_pairs().pop("step, experts / dense")
    )
    routers = moe.model.layers * moe.model.dim * moe.model.experts
    assert moe.model.active_parameters() - routers == dense.model.parameters()
    assert (moe.training, moe.layout) == (dense.training, dense.layout)


@pytest.mark.full
def test_sides_of_expert_parallelism_differ_in_its_degree() -> None:
    found = {title: sides for title, sides in experts.list_step_pairs().items() if "ranks" in title}
    for (ranks, degree), sides in zip(experts.DEGREES, found.values(), strict=True):
        first, second = (compose_test_run([*side, "name=x"]) for side in sides)
        assert (first.layout.expert, second.layout.expert) == (1, degree)
        assert first.layout.shard == second.layout.shard == ranks == second.layout.devices
        assert first.model == second.model


@pytest.mark.full
def test_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    case = experts.MATMULS[0].title
    options = ["suite=experts", "rounds=3", "steps=1", f"to={out}", f"case={case}"]
    assert command.main([*options, "cluster.device=cpu"]) == 0
    (found,) = json.loads(out.read_text())
    assert len(found["ratios"]) == 3 and min(found["ratios"]) > 0 and found["seconds"] > 0
    assert case in capsys.readouterr().out


@pytest.mark.thorough
def test_steps_of_two_sets_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["suite=experts", "rounds=2", "steps=1", f"to={out}", "case=2 ranks, expert 2"]
    small = [
        "model.layers=1",
        "model.vocab=256",
        "training.seq_len=32",
        "training.global_batch=64",
        "dataset=synthetic",
    ]
    assert command.main([*options, *small, "compile=off", "cluster.device=cpu"]) == 0
    (found,) = json.loads(out.read_text())
    assert len(found["ratios"]) == 2 and min(found["ratios"]) > 0
