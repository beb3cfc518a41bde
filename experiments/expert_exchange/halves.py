"""Blocks that compute the rows of a micro-batch in two halves, each beside what ranks exchange of the other.

Rows don't depend on each other, so halves change the order of sums in the gradients of weights only. A block whose
experts are on several ranks takes turns between both halves:

    first half    attention, router | dispatch ->   experts | combine ->                 sum
    second half                       attention, router | dispatch ->  experts | combine ->  shared experts, sum

What stands below an arrow runs beside that exchange. Other blocks compute one half after the other.

Shapes: B rows, T tokens of a row, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan.model.experts import MixtureOfExperts, MoeBlock
from titan.model.steps import interleave_steps
from titan.parallelism.schema import ExpertExchange


def split_rows(rows: int) -> list[int]:
    """Return the number of rows of each half; of one row there is one."""
    return [rows] if rows < 2 else [(rows + 1) // 2, rows // 2]


def split_inputs(tensor: Tensor | None, rows: int) -> list[Any]:
    """Return for each half of `rows` rows its part of [B, ...]; of None or [1, ...], which all rows share, the same."""
    sizes = split_rows(rows)
    if tensor is None or tensor.shape[0] != rows or len(sizes) == 1:
        return [tensor] * len(sizes)
    return list(torch.split(tensor, sizes))


@dataclass(frozen=True, kw_only=True)
class Halves(ExpertExchange):
    """Blocks that compute in halves, with titan's all-to-all."""

    def change_model(self, model: Any) -> None:
        """Let blocks take for `cos`, `sin` and `mask` tuples with one of each half, and compute halves."""
        model.build_block_inputs = partial(_build_inputs, model.build_block_inputs)
        for block in model.blocks():
            block.forward = _interleave_halves(block) if _takes_turns(block) else _compute_one_by_one(block.forward)


def _build_inputs(build: Any, document_ids: Tensor | None, positions: Tensor, hidden: Tensor) -> tuple[Any, ...]:
    """Return of each input of all blocks a tuple with one for each half."""
    halves = zip(*(split_inputs(tensor, len(hidden)) for tensor in (document_ids, positions, hidden)), strict=True)
    return tuple(zip(*(build(*half) for half in halves), strict=True))


def _takes_turns(block: Any) -> bool:
    """Return whether a block can be computed in steps; a class with another `forward` computes what that does."""
    kinds = type(block), type(getattr(block, "feed_forward", None))
    return kinds[0].forward is MoeBlock.forward and getattr(kinds[1], "forward", None) is MixtureOfExperts.forward


def _interleave_halves(block: Any) -> Callable[..., Any]:
    def forward(x: Tensor, *inputs: Any) -> Any:
        halves = _split_arguments(x, *inputs)
        return _join_halves(interleave_steps([block.iterate(*arguments) for arguments in halves]))

    return forward


def _compute_one_by_one(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without generators, so that one graph can hold the block."""

    def forward(x: Tensor, *inputs: Any) -> Any:
        return _join_halves([compute(*arguments) for arguments in _split_arguments(x, *inputs)])

    return forward


def _split_arguments(x: Tensor, cos: Any, sin: Any, mask: Any, valid: Tensor | None = None) -> list[tuple[Any, ...]]:
    rows = x.shape[0]
    valid_parts = () if valid is None else (split_inputs(valid, rows),)
    return list(zip(split_inputs(x, rows), cos, sin, mask, *valid_parts, strict=True))


def _join_halves(outputs: list[Any]) -> Any:
    """Return what a block returns for all rows: hidden states, and values of loss terms and counts if it has any."""
    if len(outputs) == 1 or not isinstance(outputs[0], tuple):
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    hidden, values, *counts = zip(*outputs, strict=True)
    joined_values = {name: torch.cat([value[name] for value in values]) for name in values[0]}
    return torch.cat(hidden), joined_values, *(None if count[0] is None else sum(count) for count in counts)
