"""The precision axis: in which type to compute.

One mechanism serves every layout: weights, gradients and optimizer state are fp32; a weight is cast to the type of the
activations where it is used, and its gradient returns to fp32 before it is summed over micro-batches or ranks. The
embedding is looked up in fp32 and then cast, so the activations' type is decided in one place. FSDP gathers in the
compute type what is used in it only: a cast commutes with a gather, so the numbers stay those of one device.
Norms, rotary embedding and loss compute in fp32 inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.settings import setting

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Precision:
    """In which type to compute."""

    compute: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type of products and activations; auto: bf16 where the device is fast at it, else fp32"
    )

    @property
    def bytes(self) -> int:
        """Bytes of an activation."""
        return 2 if self.compute == "bf16" else 4

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of products and activations."""
        import torch

        return torch.bfloat16 if self.compute == "bf16" else torch.float32


def apply(model: torch.nn.Module, precision: Precision) -> None:
    """Let `model` compute in the chosen type: what the embedding gives, every later layer and stage follows."""
    if model.tok_embeddings is not None:
        model.tok_embeddings.dtype = precision.dtype
