"""Regions that save their rank's shard of the gathered input and gather it again in backward (arXiv:2205.05198).

A region of tensor parallelism all-gathers its input along the sequence, and several linear layers multiply it. The
gradient of their weights needs the whole input. Where autograd saves it, a block keeps two tensors [B, T, D] on every
tensor rank. Here one autograd function gathers the input and computes all of these products; it saves the shard
[B, T / ranks, D] and, in backward,

1. starts to all-gather the shard;
2. meanwhile sums the gradient of the input over the layers;
3. starts to reduce-scatter that sum;
4. meanwhile computes the gradients of the weights.

Sums have the order in which autograd adds them up without this function, so gradients are bitwise the same.

Products in eight bits are torchao's, whose backward pass computes both gradients of a layer at once: there the shard is
gathered before, and the sum is scattered after. The compiler gathers again by itself where a gather is checkpointed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from titan.model.custom_op import register_operation
from titan.model.layers import Linear, Product, call_layers
from titan.parallelism import collectives
from titan.parallelism.collectives import SEQUENCE_DIM
from titan.precision import low_precision


def regather_input(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Let a region gather its input itself, twice, and return whether it can.

    It can't where the `forward` of its class may use the input for something else than `project`.

    Args:
        group: the tensor ranks.
    """
    if not hasattr(module, "project") or not getattr(module.forward, "passes_input_to_project", False):
        return False
    module.project = partial(_project_shard, group=group)  # type: ignore[assignment]
    return True


def _project_shard(x: Tensor, layers: Sequence[Linear], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """Return each layer's output [B, T, out] for the gathered input, from its shard [B, T / ranks, D].

    Layers that compute something else than a product, or that FSDP gathers by themselves, are called on the gathered
    input, which autograd then saves. So are layers with hooks.
    """
    if not all(map(_is_product, layers)):
        return call_layers(collectives.all_gather_autograd(x, SEQUENCE_DIM, group), layers)
    quantized = any(layer.product is not F.linear for layer in layers)
    if quantized and torch.compiler.is_compiling():
        gather = partial(collectives.all_gather_autograd, dim=SEQUENCE_DIM, group=group)
        return call_layers(checkpoint(gather, x, use_reentrant=False), layers)
    if any(map(_has_hooks, layers)):
        gathered: Tensor = _GatherTwice.apply(x, group)  # type: ignore[no-untyped-call]
        return call_layers(gathered, layers)
    weights = [layer.get_weight(layer.weight, layer.operand or x.dtype) for layer in layers]
    if not torch.is_grad_enabled():  # where Dynamo (torch 2.13) mistakes two weights for a forward without a context
        return _multiply(x, weights, [layer.product for layer in layers], group)
    if quantized:
        products = [layer.product for layer in layers]
        outputs: tuple[Tensor, ...] = _ProjectByLayer.apply(x, group, products, *weights)  # type: ignore[no-untyped-call]
    else:
        outputs = _ProjectShard.apply(x, group, *weights)  # type: ignore[no-untyped-call]
    return outputs


def _is_product(layer: Linear) -> bool:
    """Whether a layer is a product with its weight, the same answer on all ranks."""
    is_known = layer.product is F.linear or low_precision.is_product(layer.product)
    return is_known and type(layer).forward is Linear.forward and not isinstance(layer, FSDPModule)


def _has_hooks(layer: Linear) -> bool:
    """Whether something on this rank is called when the layer is."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks)


class _GatherTwice(torch.autograd.Function):
    """Gathers its input, and has the collectives of `_ProjectShard` in backward.

    Another rank's layers may have no hooks: ranks whose collectives differ would wait for each other for ever.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x)
        ctx.group = group
        return collectives.all_gather(x, SEQUENCE_DIM, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        collectives.all_gather(x, SEQUENCE_DIM, ctx.group)
        return collectives.reduce_scatter(grads[0], SEQUENCE_DIM, ctx.group), None


def _multiply(
    x: Tensor, weights: Sequence[Tensor], products: Sequence[Product], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return the products of the gathered input and each weight."""
    gathered = collectives.all_gather(x, SEQUENCE_DIM, group)
    return tuple(product(gathered, weight) for product, weight in zip(products, weights, strict=True))


class _ProjectShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        return _multiply(x, weights, [F.linear] * len(weights), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        # An operation that the compiler can't look into: it would merge both all-gathers and save their result.
        compute = torch.ops.titan.project_gradients if torch.compiler.is_compiling() else compute_gradients
        x_grad, *weight_grads = compute(list(grads), x, weights, ctx.group.size(), ctx.group.group_name)
        return x_grad, None, *weight_grads


class _ProjectByLayer(torch.autograd.Function):
    """Does the same for products in eight bits, each layer's gradients at once; some layers may be unquantized."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, products: Sequence[Product], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.products = group, products
        return _multiply(x, weights, products, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        gathered = collectives.all_gather(x, SEQUENCE_DIM, ctx.group)
        total: Any = None
        weight_grads: list[Tensor] = []
        for grad, weight, product in reversed(list(zip(grads, weights, ctx.products, strict=True))):
            part, weight_grad = _compute_layer_gradients(gathered, grad, weight, product)
            total = part if total is None else total.add_(part)
            del part  # else it is in memory beside the next one
            weight_grads.insert(0, weight_grad)
        return collectives.reduce_scatter(total, SEQUENCE_DIM, ctx.group), None, None, *weight_grads


def _compute_layer_gradients(x: Tensor, grad: Tensor, weight: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    if product is not F.linear:
        return low_precision.compute_product_gradients(x, grad, weight, product)
    rows = grad.flatten(0, -2)
    return (rows @ weight).view_as(x), rows.t() @ x.flatten(0, -2)


def compute_gradients(grads: list[Tensor], x: Tensor, weights: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    """Return the gradients of the shard and of the weights.

    Args:
        grads: of the outputs [B, T, out], layer by layer.
        x: the shard [B, T / ranks, D].
        weights: [out, D], layer by layer.
    """
    pending_input = collectives.start_all_gather(x, ranks, group)
    x_grad = _sum_input_gradients(grads, weights)
    inputs = collectives.finish_all_gather(pending_input, SEQUENCE_DIM, ranks).flatten(0, -2)
    del pending_input  # a copy of the input, unless there is one row
    pending_grad = collectives.start_reduce_scatter(x_grad, SEQUENCE_DIM, ranks, group)
    del x_grad
    weight_grads = [grad.flatten(0, -2).t() @ inputs for grad in grads]
    return [collectives.wait(pending_grad), *weight_grads]


def _sum_input_gradients(grads: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Return the gradient of the gathered input [B, T, D], the last layer's first, as autograd adds them up."""
    total: Any = None
    for grad, weight in zip(reversed(grads), reversed(weights), strict=True):
        part = grad.flatten(0, -2) @ weight
        total = part if total is None else total.add_(part)
        del part  # else it is in memory beside the next one
    return total.view(*grads[0].shape[:-1], -1)  # type: ignore[no-any-return]


def _make_fake_gradients(grads: list[Tensor], x: Tensor, weights: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format), *(torch.empty_like(w) for w in weights)]


register_operation("titan::project_gradients", compute_gradients, _make_fake_gradients)
