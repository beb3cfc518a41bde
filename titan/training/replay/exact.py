"""The precision in which both sides of a comparison are computed, so that what differs is no rounding."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from titan.precision.schema import Precision
from titan.run.run import Run

if TYPE_CHECKING:
    import torch

ExactType = Literal["fp32", "fp64"]
"""The type: in fp64 matmuls, attention and FSDP's sums over ranks. Weights, their gradients and updates, norms, rotary
embedding, routers' scores and loss stay in fp32."""


@dataclass(frozen=True)
class DoublePrecision(Precision):
    """Matmuls and activations in fp64. No run trains so: its settings are those of fp32."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of matmuls and activations."""
        import torch

        return torch.float64

    def describe(self) -> str:
        """Return one phrase for the console."""
        return "fp64"


def needs_exact(precision: Precision, exact: ExactType) -> bool:
    """Whether a run computes in less than the type."""
    return exact == "fp64" or precision.eight_bit or "bf16" in (precision.compute, precision.weights)


def make_exact(run: Run, exact: ExactType) -> Run:
    """Return the run in the type; a kernel that does not take it is replaced by one that torch chooses."""
    precision = replace(run.precision, compute="fp32", weights="fp32", matmuls="compute").drop_unused_settings()
    training, on_gpu = run.training, run.machine.device == "cuda"
    if exact == "fp64":
        precision = DoublePrecision(**{field.name: getattr(precision, field.name) for field in fields(Precision)})
        training = replace(training, attention="math") if on_gpu or training.attention == "flex" else training
    elif training.attention in ("flash", "cudnn") and on_gpu:
        training = replace(training, attention="auto")
    return replace(run, precision=precision, training=training)
