"""What a recomputed block keeps of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan.memory.checkpointing import checkpoint_blocks
from titan.memory.kept_values import keep
from titan.memory.schema import Memory
from titan.model.parts import Part


class Deciding(nn.Module):
    """A block that decides twice in each pass by what it counts."""

    def __init__(self, decide: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.decide = nn.Linear(2, 2, bias=False), decide

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x) * keep(self.decide)
        return x.sin() * keep(self.decide)


def decided(checkpointing: Any, passes: int = 1, parts: int = 2) -> tuple[int, list[Tensor]]:
    """Return how often a block decided, and the gradients of two inputs, which it computed one after the other."""
    numbers = iter(range(1, 100))
    block = Deciding(lambda: float(next(numbers)))
    nn.init.eye_(block.linear.weight)
    checkpoint_blocks([block], Memory(checkpointing), parts=[[Part(block, name=f"part{i}") for i in range(parts)]])
    inputs = [torch.full((2,), 0.5, requires_grad=True) for _ in range(2)]
    outputs = [block(x).sum() for x in inputs]
    for _ in range(passes):
        for out in outputs:
            out.backward(retain_graph=True)
    return next(numbers) - 1, [x.grad for x in inputs if x.grad is not None]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_each_forward_pass_decides_once(checkpointing: str) -> None:
    expected = decided("none")
    count, gradients = decided(checkpointing)
    assert count == expected[0] == 4
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))
    assert not torch.equal(*gradients)


def test_a_second_recomputation_keeps_the_same() -> None:
    count, gradients = decided("full", passes=2)
    assert count == 4
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients, decided("none")[1], strict=True))
