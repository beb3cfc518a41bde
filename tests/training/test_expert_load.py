"""The load of experts: what is counted, what routers make of it, what the metrics and warnings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.matrix import DOCUMENTS
from tests.support.matrix_experts import MODELS
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.model.experts import Router
from titan.training.expert_load import COLLAPSE_STEPS, ExpertLoad
from titan.training.trainer import Trainer


def spied(trainer: Trainer) -> list[list[float]]:
    """The counts of each step, as the trainer hands them on."""
    seen: list[list[float]] = []
    load: Any = trainer.train_step.expert_load
    update = load.update

    def spy(counts: Tensor, skipped: Tensor) -> None:
        seen.append(counts.tolist())
        update(counts, skipped)

    load.update = spy
    return seen


@pytest.mark.parametrize("layout", [full("single"), "fsdp3"])
def test_tokens_are_counted_once_and_only_those_that_count(layout: str, tmp_path: Path) -> None:
    """Not again in recomputation, in validation or in metrics of layers; no masked tokens, and no rows that fill up."""
    settings = (*MODELS["qwen3_moe"], *DOCUMENTS, "memory=full", "evaluation.tokens=64", "evaluation.every=1")
    more = ("training.global_batch=112", "parallelism.microbatches=2", "metrics.layers_every=2")
    run = compose_tiny_run(tmp_path, *settings, *more, layout=layout)
    counts = torch.tensor(train_run(run, spied)[0].extra).view(3, 2, 5)
    valid = torch.tensor([float(line["valid_tokens"]) for line in read_step_records(run)])
    assert (valid < 112).all()
    assert torch.equal(counts[..., :4].sum(-1), 2 * valid[:, None].expand(3, 2))
    (line,) = (line for line in read_step_records(run) if "expert_load/layers.0" in line)
    assert line["step"] == 2
    for layer in range(2):
        shares = counts[1, layer, :4] / counts[1, layer, :4].sum()
        assert line[f"expert_load/layers.{layer}"] == pytest.approx((4 * shares).tolist())
    assert line["expert_load_max"] == pytest.approx(float((counts[1, :, :4] / (2 * valid[1])).max() * 4))


def load_of(counts: list[float], rate: float = 0.0, chosen: int = 1) -> tuple[ExpertLoad, Router]:
    """One layer's, after a step with these counts."""
    router = Router(4, len(counts), chosen, has_bias=True)
    router.init_buffers("cpu")
    load = ExpertLoad({0: router}, len(counts), 1, chosen, rate)
    load.update(torch.tensor([*counts, 0.0], dtype=torch.float64), torch.tensor(False))
    return load, router


def test_a_bias_moves_against_the_load() -> None:
    load, router = load_of([6, 2, 4, 0], rate=0.5)
    assert router.load.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3, 0])
    assert router.bias is not None
    assert router.bias.tolist() == [-0.5, 0.5, -0.5, 0.5]
    for counts, skipped in (([9, 0, 0, 0], True), ([0, 0, 0, 0], False)):  # a bad step, and one without valid tokens
        load.update(torch.tensor([*counts, 0.0], dtype=torch.float64), torch.tensor(skipped))
        assert router.load.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3, 0])
        assert router.bias.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_figures_of_the_load() -> None:
    load, _ = load_of([6, 2, 4, 0])
    found = load.build_record([8, 0, 0, 0, 3], per_expert=False)
    assert found == {"expert_load_max": 4, "expert_load_min": 0, "expert_entropy": 0, "expert_dropped": 3 / 8}
    assert load.build_record([2, 2, 2, 2, 0], per_expert=False)["expert_entropy"] == pytest.approx(1)
    assert load.build_record([0, 0, 0, 0, 0], per_expert=True) == {}


def test_a_collapsed_router_is_reported_once() -> None:
    load, _ = load_of([6, 2, 4, 0, 0, 0, 0, 0])
    reported = [load.check_collapse([9, 1, 0, 0, 0, 0, 0, 0, 0]) for _ in range(2 * COLLAPSE_STEPS)]
    assert [i for i, lines in enumerate(reported, 1) if lines] == [COLLAPSE_STEPS]
    assert "the router of layer 0 has collapsed" in reported[COLLAPSE_STEPS - 1][0]
    assert [load.check_collapse([2, 2, 2, 1, 1, 0, 0, 0, 0]) for _ in range(2 * COLLAPSE_STEPS)] == [
        []
    ] * 2 * COLLAPSE_STEPS
