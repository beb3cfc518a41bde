"""Whole gradients between micro-batches: what FSDP adds up before it reduces them over ranks.

FSDP computes a gradient in the type in which its weight is gathered, and adds those of several micro-batches up in the
type in which ranks reduce them, fp32. `keep_in_bf16` lets the sum have the gradient's type instead, half as many bytes:
an addition of bf16 tensors is computed in fp32 and rounded to nearest. The reduction copies the sum into its fp32
buffer, so the sums over ranks, and gradients as the optimizer has them, stay fp32.

Rounding is to nearest. From 256 equal gradients on, a further one is lost: runs with more than 128 micro-batches are
rejected (`titan.run.checks`). Stochastic rounding loses none, but has 1.4 times the error below 128, needs random
numbers and several times the traffic; an error term needs the bytes that are saved (docs/precision.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_in_bf16(stage: nn.Module) -> None:
    """Let FSDP accumulate bf16 gradients in bf16; those of other types stay in the type of the reduction.

    Args:
        stage: wrapped by FSDP, before its first step.
    """
    for parameter in _list_fsdp_parameters(stage):
        parameter.to_accumulated_grad_if_needed = _Keeper(parameter, parameter.to_accumulated_grad_if_needed)


def add_computed_gradients(stage: nn.Module) -> None:
    """Add what a backward pass computed to what FSDP has accumulated.

    FSDP does so at the end of a block's backward pass. Where that computes gradients of weights later than those of
    activations, they would be added up in their own type, beside the sum, until the block's next backward pass.
    """
    for parameter in _list_fsdp_parameters(stage):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def free_reduced_gradients(stage: FSDPModule) -> None:
    """Free the inputs of a stage's last reduce-scatters, which the present stream waits for.

    FSDP frees them when the same stage reduces again, or at the end of a step.
    """
    state: Any = stage._get_fsdp_state()
    retained = getattr(state._comm_ctx, "reduce_scatter_states", ())  # none before the first forward pass
    for reduction in retained:
        if reduction.event is not None:
            state._device_handle.current_stream().wait_event(reduction.event)
    if retained:
        retained.clear()


class _Keeper:
    """Replaces the method of a parameter of FSDP that casts its first gradient of a step for accumulation."""

    def __init__(self, parameter: Any, cast: Any) -> None:
        self.parameter, self.cast = parameter, cast

    def __call__(self) -> None:
        """Make a bf16 gradient the sum; let FSDP cast any other."""
        unsharded = self.parameter._unsharded_param
        if unsharded.grad is None or unsharded.grad.dtype != torch.bfloat16:
            self.cast()
            return
        self.parameter.unsharded_accumulated_grad, unsharded.grad = unsharded.grad, None


def _list_fsdp_parameters(stage: nn.Module) -> Iterator[Any]:
    """Yield FSDP's records of the parameters of a stage."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params
