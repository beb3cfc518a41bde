"""Text from a model under training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import select_cases
from titan.training.result_json import sample_continuation


def test_each_token_follows_from_those_before_within_the_window() -> None:
    seen: list[list[int]] = []

    def counting(tokens: list[int]) -> Tensor:
        seen.append(tokens)
        return 100.0 * nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % 10), 10)

    assert sample_continuation(counting, [3, 4], 5, window=3, vocab=10, seed=0) == [5, 6, 7, 8, 9]
    assert seen == [[3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]


def drawn(**changes: Any) -> list[int]:
    """Tokens of a model that finds all equally likely."""
    given: dict[str, Any] = {"window": 4, "vocab": 20, "seed": 0} | changes
    return sample_continuation(lambda tokens: torch.arange(20) * 1e-3, [1], 60, **given)


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        pytest.param({}, range(20), id="all"),
        pytest.param({"vocab": 7}, range(7), id="the-tokenizers-ids-only"),
        pytest.param({"top_k": 3}, range(17, 20), id="the-likeliest-three"),
    ],
)
def test_what_may_be_sampled(changes: dict[str, Any], possible: range) -> None:
    assert set(drawn(**changes)) <= set(possible)
    assert len(set(drawn(**changes))) > len(possible) // 2
    assert drawn(**changes) == drawn(**changes)
    assert drawn(**changes) != drawn(**changes, **{"seed": 1})


LAYOUTS = {
    "ddp": ["parallelism=ddp"],
    "fsdp": ["parallelism=fsdp"],
    "tp": ["parallelism=tp"],
    "cp": ["parallelism=cp"],
    "pp": ["parallelism=pp", "parallelism.microbatches=2"],
    "zbv": ["parallelism=fsdp_pp", "parallelism.microbatches=2", "parallelism.schedule=ZBVZeroBubble"],
    "cp-tp-pp": ["parallelism=pp", "parallelism.tensor=2", "parallelism.context=2", "parallelism.microbatches=2"],
}


@pytest.mark.full
@pytest.mark.parametrize("layout", select_cases(LAYOUTS, ("pp",)))
def test_every_rank_samples_the_same(layout: str, tmp_path: Any) -> None:
    def before(trainer: Any) -> list[list[int]]:
        drawn: list[list[int]] = []
        finish = trainer.validate

        def sample_too() -> None:
            finish()
            drawn.append(sample_continuation(trainer.train_step.compute_logits, [1, 2], 20, window=8, vocab=64, seed=5))

        trainer.validate = sample_too
        return drawn

    model = ["model.layers=4", "model.kv_heads=2"]
    alone, *_ = train_run(compose_tiny_run(tmp_path / "alone", *model), before)
    ranks = train_run(compose_tiny_run(tmp_path / layout, *model, *LAYOUTS[layout]), before)
    assert len(alone.extra[0]) == 20
    assert [rank.extra for rank in ranks] == [alone.extra] * len(ranks)
