"""The largest attention logits of a step count pairs of tokens that attend to each other only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from titan.training.observe import Observer


def largest(chunk: int | None, positions: Tensor | None, documents: Tensor | None) -> float:
    """The largest logit; the last token's query has the logit 10 - place with a key, the others' are negative."""
    k = (10 - torch.arange(6.0))[None, None, :, None].expand(2, 1, 6, 4)
    q = torch.full((2, 1, 6, 4), -1e3)
    q[:, :, 5] = 0.5
    fake: Any = SimpleNamespace(
        rows=SimpleNamespace(count_rows=lambda microbatch: 2),
        train_step=SimpleNamespace(world=SimpleNamespace(get_group=lambda name: None)),
    )
    given = {"positions": positions, "document_ids": documents}
    call: Any = SimpleNamespace(microbatch=0, get_argument=lambda place, name: given[name])
    return float(Observer._find_largest_logit(fake, call, q, k, chunk))


@pytest.mark.parametrize(
    ("chunk", "documents", "first"),
    [
        pytest.param(None, False, 0, id="row"),
        pytest.param(4, False, 4, id="chunk"),
        pytest.param(None, True, 1, id="document"),
        pytest.param(4, True, 5, id="chunk-of-a-document"),
    ],
)
def test_logits_within_chunks(chunk: int | None, documents: bool, first: int) -> None:
    ids = torch.tensor([0, 1, 1, 1, 1, 1]).expand(2, -1) if documents else None
    positions = torch.tensor([0, 0, 1, 2, 3, 4]).expand(2, -1) if documents else None
    assert largest(chunk, positions, ids) == pytest.approx(10 - first)
