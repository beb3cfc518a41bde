"""The operation that first turned finite values into others, while a step runs without compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.parallelism.norms import local_tensor

UNWRITTEN = ("empty", "new_empty", "resize", "set_", "as_strided")
"""Beginnings of names of operations whose result has no value yet."""


class NonFiniteOpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation with finite arguments and a result that is NaN or infinite.

    Minus infinity is no such result: attention masks have it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first: str | None = None

    def take_first(self) -> str | None:
        """Return the name of the first such operation since the last call, such as "mul"; None when there is none."""
        first, self._first = self._first, None
        return first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "_opname", None) or func.__name__)
        skips_check = self._first is not None or not _completes_result(func, name)
        inputs = [] if skips_check else list(_iterate_tensors((args, kwargs)))
        inputs_finite = name.endswith("_") and all(map(_is_finite, inputs))  # asked before it changes one of them
        out = func(*args, **(kwargs or {}))
        if (
            inputs
            and not all(map(_is_finite, _iterate_tensors(out)))
            and (inputs_finite or all(map(_is_finite, inputs)))
        ):
            self._first = name
        return out


def _completes_result(func: Any, name: str) -> bool:
    """Whether the result is complete when an operation returns; that of a collective may not be."""
    return "c10d" not in str(getattr(func, "namespace", "")) and not name.startswith(UNWRITTEN)


def _iterate_tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point())


@torch.no_grad()
def _is_finite(x: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity but minus infinity; assumed of types with separate storage."""
    x = local_tensor(x)
    return type(x) not in (Tensor, torch.nn.Parameter) or bool((x < torch.inf).all())
