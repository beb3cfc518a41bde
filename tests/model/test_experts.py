"""Experts: products by groups, ties, experts without tokens; tests/model/test_parity.py compares with transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titan.model.experts import MixtureOfExperts, largest
from titan.model.grouped import grouped_product

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
    out = grouped_product(x, weight, torch.tensor(ends, dtype=torch.int32))
    upstream = torch.randn(out.shape, generator=generator, dtype=dtype)
    found = torch.autograd.grad(out, (x, weight), upstream)
    expected = loop(x, weight, ends)
    wanted = torch.autograd.grad(expected, (x, weight), upstream, allow_unused=True, materialize_grads=True)
    assert torch.equal(out, expected)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rows_that_are_not_aligned() -> None:
    x, weight = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    assert torch.equal(grouped_product(x, weight, torch.tensor([1, 4], dtype=torch.int32)), loop(x, weight, (1, 4)))


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    scores = torch.tensor([[0.2, 0.3, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    assert largest(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_a_token_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 24, 8, 3, True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 6, 16)
    whole, route = layer(x)
    assert route.experts.shape == (1, 6, 3)
    assert torch.allclose(route.weights.sum(-1), torch.ones(1, 6))
    for i in range(6):
        torch.testing.assert_close(layer(x[:, i : i + 1])[0], whole[:, i : i + 1])
