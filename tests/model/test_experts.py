"""Experts: products by groups, ties, experts without tokens; tests/model/test_parity.py compares with transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan.model.balance import Balance
from titan.model.expert_ops import multiply_grouped, multiply_in_float32
from titan.model.experts import MixtureOfExperts, Router, select_top_k

ENDS = {
    "even": (4, 8, 12),
    "skewed": (0, 12, 12),
    "padded": (3, 3, 9),
    "nothing": (0, 0, 0),
}


def loop(x: Tensor, weight: Tensor, ends: tuple[int, ...]) -> Tensor:
    """The product of each row by itself."""
    begins = (0, *ends[:-1])
    rows = [x[a:b] @ weight[e].T for e, (a, b) in enumerate(zip(begins, ends, strict=True))]
    return torch.cat([*rows, x.new_zeros(len(x) - ends[-1], weight.shape[1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_products_and_gradients(ends: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 24, 16, generator=generator, dtype=dtype, requires_grad=True)
    expected = loop(x, weight, ends)
    upstream = torch.randn(expected.shape, generator=generator, dtype=dtype)
    wanted = torch.autograd.grad(expected, (x, weight), upstream, allow_unused=True, materialize_grads=True)
    for exact in {False, ends[-1] == len(x)}:
        out = multiply_grouped(x, weight, torch.tensor(ends, dtype=torch.int32), exact)
        found = torch.autograd.grad(out, (x, weight), upstream)
        assert torch.equal(out, expected)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rows_that_are_not_aligned() -> None:
    x, weight = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    assert torch.equal(multiply_grouped(x, weight, torch.tensor([1, 4], dtype=torch.int32)), loop(x, weight, (1, 4)))


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    scores = torch.tensor([[0.2, 0.3, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    assert select_top_k(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def mixture(**how: Any) -> MixtureOfExperts:
    """A layer of 8 experts with random weights."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 24, Router(16, 8, 3, **how))
    layer.router.init_buffers("cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def test_a_token_does_not_depend_on_the_others() -> None:
    layer, x = mixture(), torch.randn(1, 6, 16)
    whole = layer(x)[0]
    assert torch.allclose(layer.router(x).weights.sum(-1), torch.ones(1, 6))
    for i in range(6):
        torch.testing.assert_close(layer(x[:, i : i + 1])[0], whole[:, i : i + 1])


def test_a_bias_chooses_and_does_not_weigh() -> None:
    layer, x = mixture(sigmoid=True, has_bias=True, scale=2.5), torch.randn(2, 5, 16)
    assert layer.router.bias is not None
    layer.router.bias[6] = 10.0
    route = layer.router(x)
    assert (route.experts[..., 0] == 6).all()
    torch.testing.assert_close(route.weights.sum(-1), torch.full((2, 5), 2.5))
    chosen = route.logits.sigmoid().gather(-1, route.experts)
    torch.testing.assert_close(route.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_tokens_go_to_experts_of_their_groups() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.6, 0.2, 0.3, 0.8, 0.1]])  # pairs have 1.0, 1.1, 0.5 and 0.9
    router = Router(16, 8, 3, sigmoid=True, groups=4, topk_groups=2)
    assert select_top_k(router._compute_choice_scores(scores), 3).tolist() == [[0, 3, 2]]


def by_definition(layer: MixtureOfExperts, x: Tensor, valid: Tensor) -> dict[str, float]:
    """The losses of a layer, from the definitions in loops."""
    route, load = layer.router(x), layer.router.load.tolist()
    shares = (route.scores / route.scores.sum(-1, keepdim=True)).tolist()
    aux, seq, z = 0.0, 0.0, 0.0
    for row in range(x.shape[0]):
        chosen = [e for t in range(x.shape[1]) if valid[row, t] for e in route.experts[row, t].tolist()]
        for t in (t for t in range(x.shape[1]) if valid[row, t]):
            aux += 8 * sum(load[e] * shares[row][t][e] for e in range(8))
            seq += 8 * sum(chosen.count(e) / len(chosen) * shares[row][t][e] for e in range(8))
            z += math.log(sum(math.exp(v) for v in route.logits[row, t].tolist())) ** 2
    return {"aux_loss": aux, "seq_aux_loss": seq, "router_z_loss": z}


@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
def test_losses_are_as_defined(sigmoid: bool) -> None:
    layer = mixture(sigmoid=sigmoid)
    layer.balance = Balance(8, ("aux_loss", "seq_aux_loss", "router_z_loss"))
    layer.router.load = torch.arange(8).float() / 28
    x, valid = torch.randn(2, 5, 16), torch.tensor([[True] * 5, [True, True, False, True, False]])
    _, values, counted = layer(x, valid)
    found = {name: float(value.where(valid, 0).sum().detach()) for name, value in values.items()}
    assert found == pytest.approx(by_definition(layer, x, valid), rel=1e-5)
    assert counted is not None
    assert counted.tolist()[-1] == 0
    assert counted.tolist()[:-1] == layer.router(x).experts[valid].flatten().bincount(minlength=8).tolist()


def test_a_capacity_drops_later_tokens_and_choices() -> None:
    layer, x = mixture(), torch.randn(1, 40, 16)
    layer.balance = Balance(8, (), capacity=1.0)  # 40 tokens * 3 choices / 8 experts = 15 of each
    route = layer.router(x)
    kept = layer.balance.apply_capacity(route.experts)
    places: dict[int, int] = {}
    for choice in range(3):
        for t in range(40):
            expert = int(route.experts[0, t, choice])
            places[expert] = places.get(expert, 0) + 1
            assert int(kept[0, t, choice]) == (expert if places[expert] <= 15 else 8)
    _, _, counted = layer(x, torch.ones(1, 40, dtype=torch.bool))
    assert counted is not None
    assert counted[-1] == sum(max(0, n - 15) for n in places.values()) > 0
    layer.balance = Balance(8, (), capacity=8.0)
    torch.testing.assert_close(layer(x)[0], mixture()(x)[0])


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Memory that is not initialised is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_dropped_choices_add_nothing(empty_is_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = mixture(), torch.randn(1, 40, 16, requires_grad=True)
    layer.balance = Balance(8, (), capacity=1.0)
    route, dropping = layer.router(x), layer(x)[0]
    kept = (layer.balance.apply_capacity(route.experts) < 8).float()
    layer.balance = Balance(8)
    monkeypatch.setattr(layer.router, "forward", lambda x: route._replace(weights=route.weights * kept))
    weighed = layer(x)[0]
    assert kept.sum() < kept.numel()
    inputs = (x, *layer.parameters())
    sides = [(out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)) for out in (dropping, weighed)]
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other)


class SparseRouter(Router):
    """A router of a user's own, which drops choices of small weight without a capacity."""

    def forward(self, x: Tensor) -> Any:
        route = super().forward(x)
        return route._replace(experts=torch.where(route.weights < 0.3, self.experts, route.experts))


def test_choices_that_another_router_drops_add_nothing(empty_is_nan: None) -> None:
    layer, x = mixture(), torch.randn(1, 40, 16, requires_grad=True)
    layer.router.__class__ = SparseRouter
    route = layer.router(x)
    kept = route.experts < layer.router.experts
    assert 0 < kept.sum() < kept.numel()
    out = layer(x)[0]
    out.square().sum().backward()
    layer.router.forward = lambda x: route._replace(  # type: ignore[method-assign]
        experts=torch.where(kept, route.experts, 0), weights=route.weights * kept
    )
    torch.testing.assert_close(out, layer(x)[0])
    assert x.grad is not None and x.grad.isfinite().all()


def by_expert(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """The layer's definition, in float32: each token with the weights of each of its experts."""
    scores = (x.float() @ layer.router.weight.to(x.dtype).float().T).softmax(-1)
    chosen = select_top_k(scores, layer.router.top_k)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    w1, w2, w3 = (getattr(layer.experts, n).weight.to(x.dtype).float()[chosen] for n in ("w1", "w2", "w3"))
    hidden = F.silu(torch.einsum("ntkfd,ntd->ntkf", w1, x.float())) * torch.einsum("ntkfd,ntd->ntkf", w3, x.float())
    return torch.einsum("ntk,ntkdf,ntkf->ntd", weights, w2, hidden)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float32, 2e-6, id="fp32"), pytest.param(torch.bfloat16, 2e-2, id="bf16")],
)
def test_gradients_are_those_of_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    layer, x = mixture(), torch.randn(2, 20, 16).to(dtype).requires_grad_()
    upstream = torch.randn(2, 20, 16)
    inputs = (x, *layer.parameters())
    found, wanted = (
        (out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))) for out in (layer(x)[0], by_expert(layer, x))
    )
    for one, other in zip(found, wanted, strict=True):
        assert float(((one - other).norm() / other.norm()).detach()) < tolerance


def test_gradients_of_float32_products_are_exact_to_16_bits() -> None:
    x, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (256, 8))
    out, upstream = multiply_in_float32(x, weight), torch.randn(256, 8)
    wanted = F.linear(x.float(), weight.float())
    torch.testing.assert_close(out, wanted)
    exact = torch.autograd.grad(wanted, (x, weight), upstream)
    rough = (upstream.bfloat16() @ weight, upstream.bfloat16().T @ x)
    for found, right, rounded in zip(torch.autograd.grad(out, (x, weight), upstream), exact, rough, strict=True):
        same = (found == right).float().mean()
        assert same > 0.98 > (rounded == right).float().mean(), "only results between two numbers differ"


def test_no_whole_order_and_no_copy_in_float32_is_saved() -> None:
    layer, saved = mixture(), list[tuple[torch.dtype, int]]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.untyped_storage().nbytes() // tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(1, 40, 16, dtype=torch.bfloat16, requires_grad=True))
    assert max(size for dtype, size in saved if dtype == torch.int64) == 40 * 3
    assert max(size for dtype, size in saved if dtype == torch.float32) == 40 * 8, "the scores"
    rows = [size for dtype, size in saved if (dtype, size) == (torch.bfloat16, 40 * 3 * 16)]
    assert len(rows) == 2, "the inputs of w1 and w3, one tensor; no outputs"
