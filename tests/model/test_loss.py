"""The loss from the logits of some tokens at a time: that of all logits, and their gradients, whatever the chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.model.layers import IGNORED, Head, cross_entropy
from titan.model.loss_terms import Objective, compute_loss_in_chunks

EXACT = 1e-5  # law 3
ROUNDED = 2e-2  # a gradient in bf16, of which each chunk's addend is rounded once more

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8), st.integers(1, 40))


def case(shape: tuple[int, ...], scale: float, ignored: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states [B, T, D], weight [V, D] and targets [B, T], of which some are ignored."""
    rows, tokens, dim, vocab = shape
    generator = torch.Generator().manual_seed(sum(shape))
    hidden = torch.randn(rows, tokens, dim, generator=generator)
    weight = scale * torch.randn(vocab, dim, generator=generator)
    targets = torch.randint(0, vocab, (rows, tokens), generator=generator)
    targets[torch.rand(rows, tokens, generator=generator) < ignored] = IGNORED
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(hidden @ weight.T, targets)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    return Objective(chunk=chunk)(hidden, weight, targets, nn.functional.linear)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@settings(deadline=None)
@given(SHAPES, st.integers(1, 30), st.sampled_from([0.1, 1.0, 50.0]), st.sampled_from([0, 0.3, 1]))
def test_any_chunk_gives_the_loss_and_gradients_of_all_logits(
    shape: tuple[int, ...], chunk: int, scale: float, ignored: float
) -> None:
    tensors, others = case(shape, scale, ignored), case(shape, scale, ignored)
    found, expected = chunked(*tensors, chunk=chunk), whole(*others)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=EXACT, abs=1e-4)
    (found * 0.25).backward()  # type: ignore[no-untyped-call]
    (expected * 0.25).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(tensors[:2], others[:2], strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).abs().max() <= EXACT * max(1, float(other.grad.abs().max()))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_bf16_differs_by_rounding_only(chunk: int) -> None:
    shape = (4, 16, 32, 50)
    tensors, others = case(shape, 1, 0.2, torch.bfloat16), case(shape, 1, 0.2, torch.bfloat16)
    chunked(*tensors, chunk=chunk).backward()  # type: ignore[no-untyped-call]
    whole(*others).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(tensors[:2], others[:2], strict=True):
        assert one.grad is not None and other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        assert far(one.grad.float(), other.grad.float()) <= ROUNDED


@pytest.mark.full
def test_chunks_of_the_weights_gradient_are_summed_in_float32() -> None:
    """A sum in bf16 would lose what one chunk adds to that of hundreds."""
    hidden, weight, targets = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16), 0
    _, _, gradient = compute_loss_in_chunks(hidden, weight, torch.full((1024,), targets), 1, (False, True))
    assert gradient.flatten().tolist() == [-512, 512]


class Shapes(TorchDispatchMode):
    """The shapes and types of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.matmuls += func._schema.name in ("aten::mm", "aten::addmm_")
        several = out if isinstance(out, tuple) else (out,)
        self.seen += [(tuple(t.shape), t.dtype) for t in several if torch.is_tensor(t)]
        return out


@pytest.mark.parametrize(("graded", "matmuls"), [pytest.param(True, 3, id="train"), pytest.param(False, 1, id="eval")])
def test_logits_are_never_whole_and_unused_gradients_are_not_computed(graded: bool, matmuls: int) -> None:
    hidden, weight, targets = case((2, 10, 8, 30), 1, 0)
    with Shapes() as shapes, torch.set_grad_enabled(graded):
        compute_loss_in_chunks(hidden.flatten(0, 1).detach(), weight.detach(), targets.flatten(), 8, (graded, graded))
    assert max(shape[0] for shape, _ in shapes.seen if shape[-1:] == (30,) and len(shape) == 2) == 8
    assert shapes.matmuls == 3 * matmuls  # of three chunks
    with torch.set_grad_enabled(graded):
        assert chunked(hidden, weight, targets, chunk=8).requires_grad is graded


@pytest.mark.parametrize("needed", [0, 1], ids=["hidden", "weight"])
def test_only_the_gradient_that_is_needed_is_there(needed: int) -> None:
    tensors, others = case((2, 5, 4, 9), 1, 0), case((2, 5, 4, 9), 1, 0)
    tensors[1 - needed].requires_grad_(False)
    chunked(*tensors, chunk=3).backward()  # type: ignore[no-untyped-call]
    whole(*others).backward()  # type: ignore[no-untyped-call]
    gradient, expected = tensors[needed].grad, others[needed].grad
    assert gradient is not None and expected is not None and tensors[1 - needed].grad is None
    assert far(gradient, expected) <= EXACT


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_head_is_one_graph_that_can_go_back_twice(backend: str) -> None:
    """As schedules do that compute the gradients of inputs and of weights apart."""
    hidden, weight, targets = case((2, 9, 8, 30), 1, 0.2)
    other, *more = case((2, 9, 8, 30), 1, 0.2)
    head = Head(8, 30)
    head.weight, head.fused = nn.Parameter(weight.detach()), Objective(chunk=7)
    head.compile(backend=backend, fullgraph=True)
    loss = head(hidden, targets)
    whole(other, *more).backward()  # type: ignore[no-untyped-call]
    for _ in range(2):
        dh, dw = torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True)
        assert far(dh, other.grad) <= EXACT  # type: ignore[arg-type]
        assert far(dw, more[0].grad) <= EXACT  # type: ignore[arg-type]
    with torch.no_grad():
        assert head(hidden, targets).item() == pytest.approx(loss.item(), rel=1e-6)
