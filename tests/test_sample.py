"""Text from a model under training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runs import tiny, train
from titan.sample import continuation

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Predicts the next number, and remembers what it was given."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.seen = vocab, list[list[int]]()

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens[0].tolist())
        return tokens[..., None].float()

    def head(self, hidden: Tensor) -> Tensor:
        return 100.0 * nn.functional.one_hot((hidden[..., 0].long() + 1) % self.vocab, self.vocab)


def test_each_token_follows_from_those_before_within_the_window() -> None:
    model = Counting(10)
    assert continuation(model, [3, 4], 5, window=3, vocab=10, seed=0, device=CPU) == [5, 6, 7, 8, 9]
    assert model.seen == [[3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]


class Even(nn.Module):
    """Finds all tokens equally likely."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 1)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.arange(20).expand(*hidden.shape[:2], 20) * 1e-3


def drawn(**changes: Any) -> list[int]:
    given: dict[str, Any] = {"window": 4, "vocab": 20, "seed": 0, "device": CPU} | changes
    return continuation(Even(), [1], 60, **given)


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        pytest.param({}, range(20), id="all"),
        pytest.param({"vocab": 7}, range(7), id="the-tokenizers-ids-only"),
        pytest.param({"top_k": 3}, range(17, 20), id="the-likeliest-three"),
    ],
)
def test_what_may_be_drawn(changes: dict[str, Any], possible: range) -> None:
    assert set(drawn(**changes)) <= set(possible)
    assert len(set(drawn(**changes))) > len(possible) // 2
    assert drawn(**changes) == drawn(**changes)
    assert drawn(**changes) != drawn(**changes, **{"seed": 1})


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_every_rank_draws_the_same(layout: str, tmp_path: Any) -> None:
    def before(trainer: Any) -> list[list[int]]:
        drawn: list[list[int]] = []
        finish = trainer.validate

        def sample_too() -> None:
            finish()
            engine, device = trainer.engine, trainer.world.device
            drawn.append(continuation(engine.model, [1, 2], 20, window=8, vocab=64, seed=5, device=device))

        trainer.validate = sample_too
        return drawn

    alone, *_ = train(tiny(tmp_path / "alone"), before)
    ranks = train(tiny(tmp_path / layout, layout=layout), before)
    assert len(alone.extra[0]) == 20
    assert [rank.extra for rank in ranks] == [alone.extra] * 2
