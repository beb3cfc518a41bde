"""Loss terms that blocks return: masked like targets, counted once, absent from evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.loss_terms import Small
from titan.errors import RunError
from titan.memory.checkpointing import checkpoint_blocks
from titan.memory.schema import Memory
from titan.model.layers import IGNORED
from titan.training.train_step import StageWithLosses

COEFFICIENT, VOCAB = 3.0, 11


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    built = Small(dim=8, layers=2, heads=2, kv_heads=1, ffn=12, vocab=VOCAB, small=COEFFICIENT).build()
    for name, parameter in built.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return built


def batch() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, VOCAB, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    targets[0, 2:], targets[2] = IGNORED, IGNORED  # a part of a row, and a row of weight zero
    return tokens, targets


def by_hand(model: Any, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and the term, summed over valid targets, from the outputs of the blocks."""
    outputs: list[Tensor] = []
    handles = [b.register_forward_hook(lambda _, __, out: outputs.append(out[0])) for b in model.blocks()]
    hidden = model(tokens)
    for handle in handles:
        handle.remove()
    logits, valid = (hidden @ model.head.weight.T).flatten(0, 1), targets != IGNORED
    small = sum((x.square().mean(-1)[valid].sum() for x in outputs), torch.zeros(()))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), small


@pytest.mark.parametrize("memory", ["none", "full"])
def test_the_term_of_valid_tokens_is_added_once(memory: str, model: Any) -> None:
    tokens, targets = batch()
    plain, small = by_hand(model, tokens, targets)
    wanted = torch.autograd.grad(plain + COEFFICIENT * small, list(model.parameters()))
    checkpoint_blocks(model.blocks(), Memory(checkpointing=memory))  # type: ignore[arg-type]
    found = StageWithLosses(model, tensor_rank=0)(tokens, targets)
    assert found.tolist() == pytest.approx([plain.item(), small.item()], rel=1e-5)
    found.backward(torch.ones_like(found))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max()


@torch.no_grad()
def test_evaluation_and_generation_do_not_see_the_term(model: Any) -> None:
    tokens, targets = batch()
    stage = StageWithLosses(model, tensor_rank=0)
    assert stage(tokens, targets).shape == ()
    assert stage(tokens).shape == (3, 6, VOCAB)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"large": torch.zeros(3, 6)}, "the loss term large, which the model's losses lack", id="name"),
        pytest.param({"small": torch.zeros(())}, r"small has the shape \[\] for tokens \[3, 6\]", id="shape"),
    ],
)
def test_a_wrong_name_or_shape_is_named(values: dict[str, Tensor], message: str, model: Any) -> None:
    block = model.blocks()[0]
    block.forward = lambda x, *args: (x, values)
    with pytest.raises(RunError, match=message):
        model(batch()[0])
