"""What runs beside the exchange of tokens between ranks: shared experts, and the other half of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from titan.errors import ConfigError
from titan.estimate.traced.events import Event
from titan.model.experts import MixtureOfExperts, MoeBlock
from titan.model.halves import compute_in_halves
from titan.model.schema_moe import Qwen3Moe
from titan.run.run import Run
from titan.training.trace.rank import build_rank_trace

SIZES = {"model.dim": 128, "model.expert_ffn": 192, "model.shared_experts": 1, "model.layers": 2,
         "model.first_dense": 0}  # fmt: skip
"""Of a model whose shared experts' matmuls have a size that no others have."""
LEAST_BYTES = 100_000
"""Smaller exchanges are of the rows' weights."""


def list_beside(events: Sequence[Event], action: str) -> list[set[str]]:
    """Return what is computed until each exchange of rows in the second block is waited for: kinds of matmuls."""
    found, pending, size = [], {}, 0.0
    for event in (event for event in events if event.region.action == action and event.region.block == 1):
        if event.kind == "collective" and event.stream == "expert":
            size = event.size
        elif event.kind == "record" and event.stream == "expert" and size > LEAST_BYTES:
            pending[event.key] = set[str]()
        elif event.kind == "wait" and event.key in pending:
            found.append(pending.pop(event.key))
        elif event.kind == "op" and len(event.shape) >= 3:
            for kinds in pending.values():
                kinds.add(name_matmul(event))
    return found


def name_matmul(event: Event) -> str:
    if "grouped" in event.name:
        return "experts"
    if len(event.shape) == 4:
        return "attention"
    return "shared" if SIZES["model.expert_ffn"] in event.shape else "other"


@pytest.mark.full
@pytest.mark.parametrize(
    ("halves", "forward", "backward"),
    [
        pytest.param("false", [{"shared"}, set()], [set(), {"shared"}], id="whole"),
        pytest.param(
            "true",
            [{"other", "attention"}, {"experts"}, {"experts", "shared"}, {"shared"}],
            [{"shared"}, {"experts", "shared"}, {"experts"}, {"other", "attention"}],
            id="halves",
        ),
    ],
)
def test_what_computes_beside_each_exchange(halves: str, forward: list[set[str]], backward: list[set[str]]) -> None:
    sizes = [f"{name}={size}" for name, size in SIZES.items()]
    one = compose_test_run(
        [
            "model=deepseek_v3_debug", *sizes, "dataset=synthetic", "precision=bf16", "cluster=h100",
            "cluster.devices=2", "parallelism=ep", "compile=off", "training.global_batch=4096", "training.seq_len=512",
            "memory=none", "checkpoint=off", f"parallelism.halves={halves}",
        ],
        remote=True,
    )  # fmt: skip
    events = run_ranks(_trace, 1, one, joined=False, timeout=300)[0]
    for action, expected in (("F", forward), ("B", backward)):
        assert list_beside(events, action) == expected


class OwnBlock(MoeBlock):
    """A block with another computation than titan's."""

    def forward(self, x: Tensor, *inputs: Any) -> Any:
        return 2 * super().forward(x, *inputs)


class OwnExperts(MixtureOfExperts):
    """Experts with another computation than titan's."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Any:
        out, *figures = super().forward(x, valid)
        return 2 * out, *figures


@pytest.mark.parametrize("own", ["block", "experts"])
def test_a_forward_of_ones_own_is_called(own: str) -> None:
    block = Qwen3Moe(dim=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=8, experts=4, top_k=2,
                     expert_ffn=8).build().layers["0"]  # fmt: skip
    (block if own == "block" else block.feed_forward).__class__ = OwnBlock if own == "block" else OwnExperts
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, rotation = torch.randn(3, 4, 16), torch.ones(1, 4, 1, 4)
    expected = block(x, rotation, rotation, None)
    compute_in_halves([block])
    assert torch.allclose(block(x, *[(rotation, rotation)] * 2, (None, None)), expected, atol=1e-6)


@pytest.mark.full
def test_an_exchange_without_steps_is_refused() -> None:
    settings = ("model=qwen3_moe_debug", "parallelism=ep", "cluster=h100", "cluster.devices=2", "precision=bf16")
    with pytest.raises(ConfigError, match="nothing computes beside the exchange"):
        compose_test_run(
            [*settings, "parallelism.halves=true", "parallelism.dispatcher=deepep", "dataset=synthetic",
             "compile=off"], remote=True
        )  # fmt: skip


def _trace(_: int, __: int, one: Run) -> Sequence[Event]:
    return build_rank_trace(one, 0, full=True).events
