"""Max-z loss is the published one, the same on every layout, and a variant of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.z_loss.max_z import MaxZ
from tests.support.matrix import MODEL
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full
from titan.model import loss_terms
from titan.model.layers import Head
from titan.model.loss_terms import Term
from titan.run.compose import compose_run

CONF = f"hydra.searchpath=[file://{Path(__file__).resolve().parents[1] / 'conf'}]"
LARGE = (*MODEL, "recipe=max_z", "training.loss_terms.max_z.coefficient=0.5", "optimizer=sgd", "checkpoint=off")


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_loss_and_its_gradients(chunk: int | None) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(16, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True))
    targets = torch.randint(12, (16,)).where(torch.arange(16) != 3, -100)
    head = Head(8, 12)
    head.weight = nn.Parameter(weight.detach().clone())
    loss_terms.set_head_loss(head, (Term("max_z", 0.5, MaxZ().build()),), chunk)
    found = head(hidden, targets)
    logits, own = hidden @ weight.T, hidden
    squares = logits.max(-1).values[targets != -100].square().sum()
    plain = F.cross_entropy(logits, targets, reduction="sum")
    assert found.tolist() == pytest.approx([plain.item(), squares.item()], rel=1e-5)
    wanted = torch.autograd.grad(plain + 0.5 * squares, (own, weight))
    found.backward(torch.ones_like(found))
    torch.testing.assert_close((hidden.grad, head.weight.grad), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        full("plain", (0.0, None, None)),
        full("z_loss", (1e-4, None, None)),
        full("soft_cap", (0.0, 30.0, None)),
        ("z_loss_soft_cap", (1e-4, 30.0, None)),
        ("max_z", (0.0, None, {"max_z": MaxZ(coefficient=2e-4)})),
    ],
)
def test_variants_of_the_sweep(recipe: str, wanted: tuple[Any, ...]) -> None:
    run: Any = compose_run([CONF, "sweep=z_loss", f"recipe={recipe}", "name=x", "cluster=cpu"])
    assert (run.training.z_loss, run.model.logit_cap, run.training.loss_terms) == wanted
    assert run.training.global_batch == 512


@pytest.mark.parametrize("layout", ["tp", full("3d")])
@pytest.mark.full
def test_layouts_learn_the_same(tmp_path: Path, layout: str) -> None:
    alone = compose_tiny_run(tmp_path / "alone", CONF, *LARGE)
    split = compose_tiny_run(tmp_path / "split", CONF, *LARGE, f"parallelism={layout}")
    for run in (alone, split):
        train_run(run)
    for name in ("loss", "loss/max_z", "grad_norm"):
        wanted = [line[name] for line in read_step_records(alone)]
        assert [line[name] for line in read_step_records(split)] == pytest.approx(wanted, rel=1e-5)
        assert len(set(wanted)) == 3
