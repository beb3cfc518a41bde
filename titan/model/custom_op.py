"""Custom operations, which torch.compile treats as opaque instead of tracing into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register_operation(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `function` as the operation of a name such as `titan::name`, for all devices and without a gradient.

    Args:
        function: annotated with types of torch's operator schemas; mutates none of its arguments.
        fake: the fake implementation: returns empty results of the same shapes and types.
    """
    # Not torch.library.custom_op, which imports the compiler at the first call.
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)
