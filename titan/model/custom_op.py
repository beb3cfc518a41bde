"""Operations of titan's own, which torch.compile takes as they are instead of looking inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register(name: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make `function` the operation `torch.ops.titan.<name>`, for all devices and without a gradient.

    Args:
        name: as `titan::name`.
        function: annotated with types that torch's schemas know; changes none of its arguments.
        shapes: gives results of the right shapes and types for the same arguments, on tensors without values.
    """
    # Not torch.library.custom_op, which loads the compiler when it is first called.
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, shapes)
