"""Experts: products by groups, ties, experts without tokens; tests/model/test_parity.py compares with transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from titan.model.balance import Balance
from titan.model.experts import MixtureOfExperts, Router, select_top_k
from titan.model.grouped import multiply_grouped

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
    out = multiply_grouped(x, weight, torch.tensor(ends, dtype=torch.int32))
    upstream = torch.randn(out.shape, generator=generator, dtype=dtype)
    found = torch.autograd.grad(out, (x, weight), upstream)
    expected = loop(x, weight, ends)
    wanted = torch.autograd.grad(expected, (x, weight), upstream, allow_unused=True, materialize_grads=True)
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


def test_no_whole_order_and_no_copy_in_float32_is_saved() -> None:
    layer, saved = mixture(), list[tuple[torch.dtype, int]]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.untyped_storage().nbytes() // tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(1, 40, 16, dtype=torch.bfloat16, requires_grad=True))
    assert max(size for dtype, size in saved if dtype == torch.int64) == 40 * 3
    assert (torch.float32, 40 * 3 * 16) not in saved
    assert (torch.bfloat16, 40 * 3 * 16) in saved
