"""Let a model compute in the chosen type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.precision.schema import Precision

if TYPE_CHECKING:
    import torch


def set_compute_dtype(
    model: torch.nn.Module, precision: Precision, taken: tuple[str, ...] = (), sharded: bool = False
) -> None:
    """Let `model`, on meta, compute in the chosen type: what the embedding gives, every later layer and stage follows.

    Args:
        model: the model, or a stage's part of it.
        precision: the types.
        taken: the modules whose products are computed in eight bits; those of other stages may be among them.
        sharded: whether FSDP gathers the weights, in the type to compute in or in float8.
    """
    if precision.weights != "fp32":
        model.to(precision.weight_dtype)
    if model.tok_embeddings is not None:
        model.tok_embeddings.dtype = precision.dtype
    if taken:
        from titan.precision import low_precision

        low_precision.apply(model, precision, taken, sharded)
