"""Errors of gradients that are added up in bf16: `python -m tests.measure.accumulation_error`.

The gradients are those of a small model's matrices for one row after another, in bf16; sums are compared with fp64's.
"Equal" are the first row's gradients again and again: the most that micro-batches can have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan.model import init_weights
from titan.model.schema import Llama
from titan.precision.low_precision import set_compute_dtype
from titan.precision.schema import Precision
from titan.training.train_step import ModelStage

CONFIG = Llama(dim=128, layers=2, heads=4, kv_heads=2, ffn=384, vocab=512)
LENGTH = 64
COUNTS = (8, 64, 128, 256, 512)


def compute_gradients(count: int, rows: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of all matrices, in bf16, for `count` micro-batches of `rows` different rows in turn."""
    with torch.device("meta"):
        model = CONFIG.build()
    initial, stage = model.initial(), ModelStage(model)
    set_compute_dtype(model, Precision("bf16"))
    init_weights.materialise_model(model, initial, 0, "cpu")
    tokens = torch.randint(0, CONFIG.vocab, (rows, 1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for i in range(count):
        stage.zero_grad()
        row = tokens[i % rows]
        stage(row[:, :-1], row[:, 1:]).backward()
        yield [p.grad.bfloat16() for p in stage.parameters() if p.dim() > 1 and p.grad is not None]


def round_to_nearest(exact: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16."""
    return exact.bfloat16().float()


def round_stochastically(exact: Tensor) -> Tensor:
    """Round fp32 to one of the two neighbours in bf16, to each with a probability by its distance."""
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
    return ((exact.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)


def compute_error(sums: list[Tensor], exact: list[Tensor]) -> float:
    """Return the 2-norm of the error of all sums, in that of the exact ones."""
    errors = sum(float((a.double() - b).square().sum()) for a, b in zip(sums, exact, strict=True))
    return float((errors / sum(float(b.square().sum()) for b in exact)) ** 0.5)


def measure_errors(count: int, rows: int) -> list[float]:
    """Return the errors of sums of `count` gradients in fp32, and in bf16 with both kinds of rounding."""
    kinds: list[Callable[[Tensor], Tensor]] = [lambda exact: exact, round_to_nearest, round_stochastically]
    exact: list[Tensor] = []
    sums: list[list[Tensor]] = [[] for _ in kinds]
    for gradients in compute_gradients(count, rows):
        exact = [a + g for a, g in zip(exact, gradients, strict=True)] if exact else [g.double() for g in gradients]
        for i, rounded in enumerate(kinds):
            before = sums[i] or [torch.zeros_like(g, dtype=torch.float32) for g in gradients]
            sums[i] = [rounded(a + g) for a, g in zip(before, gradients, strict=True)]
    return [compute_error(each, exact) for each in sums]


def main() -> None:
    """Print one row for each number of micro-batches."""
    torch.manual_seed(0)
    print("micro-batches  rows       fp32  bf16 nearest  bf16 stochastic")
    for count in COUNTS:
        for name, rows in (("different", count), ("equal", 1)):
            figures = "  ".join(f"{error:>10.2g}" for error in measure_errors(count, rows))
            print(f"{count:>13}  {name:<9} {figures}", flush=True)


if __name__ == "__main__":
    main()
