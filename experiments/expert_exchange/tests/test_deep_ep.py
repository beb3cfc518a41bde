"""An exchange that adds before it sends: what it computes, how much it sends, and how it calls DeepEP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.expert_exchange.deep_ep import AddingDispatch, DeepEP, DeepEPTransport
from tests.support.one_copy import CountingTransport, OneCopyTransport, SentBytes
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.memory.checkpointing import checkpoint_blocks
from titan.memory.schema import Memory
from titan.model.experts import MixtureOfExperts, Router
from titan.model.parts import Part
from titan.parallelism.expert import ExpertDispatch

RANKS, EXPERTS, TOP_K, DIM, TOKENS = 2, 8, 4, 256, 64


def build_layer(rank: int, dispatch: Callable[..., Tensor], scale_inputs: bool) -> MixtureOfExperts:
    """A layer with this rank's part of the experts, the same weights on all ranks."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(DIM, 16, Router(DIM, EXPERTS, TOP_K), scale_inputs=scale_inputs)
    layer.router.init_buffers("cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    local = EXPERTS // RANKS
    for linear in layer.experts.children():
        linear.weight = torch.nn.Parameter(linear.weight[rank * local : (rank + 1) * local].detach().clone())
    layer.dispatch = dispatch
    return layer


def compare(rank: int, world: int, scale_inputs: bool, capacity: float | None) -> dict[str, float]:
    """The largest relative difference of results and gradients, and the bytes that each exchange sends."""
    group: Any = dist.group.WORLD
    figures, sides = dict[str, float](), list[list[Tensor]]()
    dispatches = {"rows": ExpertDispatch(group), "copies": AddingDispatch(group, OneCopyTransport(group))}
    for name, dispatch in dispatches.items():
        layer = build_layer(rank, dispatch, scale_inputs)
        layer.balance.capacity = capacity
        x = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        with SentBytes() as sent:
            out = layer(x)[0]
            gradients = torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))
        sides.append([out, *gradients])
        figures[name] = sent.total
    differences = [(one - other).abs().max() / one.abs().max() for one, other in zip(*sides, strict=True)]
    return {**figures, "difference": float(max(differences))}


@pytest.mark.parametrize(
    ("scale_inputs", "capacity", "share"),
    [
        pytest.param(False, None, 0.6, id="outputs"),
        pytest.param(False, 0.5, 0.85, id="capacity"),
        full(True, None, 1.1, id="inputs"),  # each has one expert; its number is sent too
    ],
)
def test_one_copy_for_each_rank_computes_the_same_and_sends_less(
    scale_inputs: bool, capacity: float | None, share: float
) -> None:
    for found in run_ranks(compare, RANKS, scale_inputs, capacity):
        assert found["difference"] < 1e-6
        assert found["copies"] < share * found["rows"]


def recompute(rank: int, world: int, checkpointing: Any, scale_inputs: bool) -> tuple[tuple[int, int], list[Tensor]]:
    """How often a rank sent all and tokens only in a step of two micro-batches; and its results and gradients."""
    transport = CountingTransport(dist.group.WORLD)
    layer = build_layer(rank, AddingDispatch(transport.group, transport), scale_inputs)
    checkpoint_blocks([layer], Memory(checkpointing), parts=[[Part(layer, name="router"), Part(layer, name="experts")]])
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(1, TOKENS, DIM, generator=generator).requires_grad_() for _ in range(2)]
    outputs = [layer(x)[0] for x in inputs]
    gradients = torch.autograd.grad(sum(out.square().sum() for out in outputs), (*inputs, *layer.parameters()))
    return (transport.sends, transport.tokens_again), [*outputs, *gradients]


@pytest.mark.full
@pytest.mark.parametrize("scale_inputs", [False, full(True, id="inputs")])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_recomputation_sends_tokens_only(checkpointing: str, scale_inputs: bool) -> None:
    expected = run_ranks(recompute, RANKS, "none", scale_inputs)
    found_again = run_ranks(recompute, RANKS, checkpointing, scale_inputs)
    for (counts, found), (counts_once, once) in zip(found_again, expected, strict=True):
        assert counts_once == (2, 2)  # the gradients of two results
        assert counts == (2, 4)  # and the tokens of two recomputations
        assert all(torch.equal(a, b) for a, b in zip(found, once, strict=True))


def dispatch_alone(x: Tensor, topk_idx: Any = None, topk_weights: Any = None, handle: Any = None, **_: Any) -> Any:
    """One rank that keeps all tokens, whose first half of the experts it has; called as DeepEP's version 2 is."""
    if topk_idx is None:
        return x, None, None, handle, None
    received = topk_idx.where(topk_idx < EXPERTS // 2, -1)
    handle = SimpleNamespace(num_recv_tokens_per_expert_list=torch.bincount(received[received >= 0]).tolist())
    return x, received, topk_weights, handle, None


def test_deep_ep_is_called_as_its_version_2_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock(topk_idx_t=torch.int64)
    library.ElasticBuffer.return_value.dispatch = Mock(side_effect=dispatch_alone)
    library.ElasticBuffer.return_value.combine.side_effect = lambda x, handle, topk_weights: (x, topk_weights, None)
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    group: Any = SimpleNamespace(size=lambda: 2)
    layer = build_layer(0, AddingDispatch(group, DeepEPTransport(group)), scale_inputs=False)
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    layer(x)[0].sum().backward()
    layer(x[:, :10])
    calls = [(name.rpartition(".")[2], options) for name, _, options in library.mock_calls]
    assert [name for name, _ in calls] == ["ElasticBuffer", *["dispatch", "combine"] * 3]
    sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": DIM, "num_topk": TOP_K}
    assert calls[0][1] == sizes | {"deterministic": True}
    first, again, summed = (calls[i][1] for i in (1, 3, 4))
    assert (first["num_experts"], first["expert_alignment"], again.keys()) == (EXPERTS, 1, {"handle"})
    assert summed["topk_weights"].shape == (TOKENS, TOP_K) and summed["topk_weights"].dtype == torch.float32


def test_without_the_package_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="exchange=deep_ep: needs CUDA and"):
        DeepEP().build(None)  # type: ignore[arg-type]
