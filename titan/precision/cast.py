"""Set a model's compute type."""

from __future__ import annotations

from torch import nn

from titan.precision import grouped, low_precision
from titan.precision.schema import Precision


def set_compute_dtype(
    model: nn.Module, precision: Precision, quantized: tuple[str, ...] = (), sharded: bool = False
) -> None:
    """Set the compute type of a model on the meta device: the embedding's output type, which later layers follow.

    Args:
        model: the model, or a stage's part of it.
        quantized: names of the linear layers and experts that compute in 8 bits; names of other stages' are ignored.
        sharded: whether FSDP all-gathers the weights, in the compute type or in float8.
    """
    if precision.weights != "fp32":
        model.to(precision.weight_dtype)
    if model.tok_embeddings is not None:
        model.tok_embeddings.dtype = precision.dtype
    if quantized:
        low_precision.quantize_layers(model, precision, quantized, sharded)
        grouped.quantize_experts(model, precision, quantized)
