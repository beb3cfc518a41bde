"""What runs beside the exchange of tokens between ranks: shared experts, and the other half of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from titan.estimate.traced.events import Event
from titan.run.run import Run
from titan.training.trace.ranks import build_rank_trace

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


def _trace(_: int, __: int, one: Run) -> Sequence[Event]:
    return build_rank_trace(one, 0, full=True).events
