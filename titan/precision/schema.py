"""The precision axis: the compute type, the matmuls in 8 bits, and the type of stored weights.

One mechanism serves every layout. Weights, gradients and optimizer state are fp32 (or bf16, by choice). A weight is
cast to the type of the activations where it is used, and its gradient is cast back before it is accumulated over
micro-batches or ranks; `accumulate=bf16` keeps what FSDP accumulates whole over micro-batches in bf16. The embedding is
looked up in the weight's type and then cast, so its output sets the activations' type. FSDP all-gathers in the compute
type the weights used only in it: a cast commutes with a gather, so the values are those of one device. Norms, rotary
embedding and loss compute in fp32 internally.

In addition, linear layers and experts may compute in 8 bits, see `titan.precision.low_precision` and `grouped`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.config.settings import setting
from titan.config.text_kinds import Label
from titan.precision.selection import MatmulSelection

if TYPE_CHECKING:
    import torch

CAPABILITY = {"float8": 8.9, "float8_rowwise": 8.9, "float8_rowwise_hp": 8.9, "mxfp8": 10.0}
"""The lowest CUDA compute capability with kernels for each format."""
HARDWARE = {
    8.9: "an Ada, Hopper or newer GPU, such as H100 (compute capability 8.9 or higher)",
    10.0: "a Blackwell GPU, such as B200 (compute capability 10.0 or higher)",
}


@dataclass(frozen=True)
class Precision(MatmulSelection):
    """The types of computation and of stored weights."""

    compute: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type of matmuls and activations; auto: bf16 on devices with fast bf16, else fp32"
    )
    weights: Literal["fp32", "bf16"] = setting("fp32", "type of weights and their gradients")
    accumulate: Literal["fp32", "bf16"] = setting(
        "fp32",
        "type of gradients that FSDP accumulates whole over micro-batches (parallelism.accumulate); bf16: half the "
        "memory, each addition is rounded; sums over ranks stay fp32",
    )
    matmuls: Literal["compute", "float8", "float8_rowwise", "float8_rowwise_hp", "mxfp8"] = setting(
        "compute",
        "type of the matmuls of linear layers and experts; compute: as precision.compute; float8: per-tensor scaling; "
        "float8_rowwise: per-row scaling; float8_rowwise_hp: the same, with weight gradients in precision.compute; "
        "mxfp8: one scale per 32 elements",
    )
    skip: tuple[Label, ...] = setting(
        ("head",),
        "patterns of the linear layers and experts that stay in precision.compute, such as head, *.wk or layers.0.*",
    )
    min_size: int = setting(
        0,
        "linear layers and experts with fewer inputs or outputs on a rank stay in precision.compute",
        at_least=0,
    )
    float8_gather: bool = setting(
        True,
        "with matmuls=float8: FSDP all-gathers weights in float8 where possible, else in precision.compute",
        science=False,
    )
    emulate: bool = setting(
        False, "emulate 8-bit matmuls on hardware without them: slow, but the same rounding", science=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of matmuls and activations."""
        import torch

        return torch.bfloat16 if self.compute == "bf16" else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """The torch type of weights and their gradients."""
        import torch

        return torch.bfloat16 if self.weights == "bf16" else torch.float32

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The torch type of gradients that are accumulated whole."""
        import torch

        return torch.bfloat16 if self.accumulate == "bf16" else torch.float32

    @property
    def rowwise(self) -> bool:
        """Whether 8-bit matmuls have a scale for each row."""
        return self.matmuls.startswith("float8_rowwise")

    @property
    def weight_grads_in_8_bits(self) -> bool:
        """Whether the matmuls of weight gradients are in 8 bits too."""
        return self.eight_bit and self.matmuls != "float8_rowwise_hp"

    def drop_unused_settings(self) -> Precision:
        """Return the same without 8-bit settings if they have no effect, so that they do not change ids."""
        return self if self.eight_bit else Precision(self.compute, self.weights, self.accumulate)

    def describe(self) -> str:
        """Return one phrase for the console."""
        words = [self.compute] + ["bf16 weights"] * (self.weights == "bf16")
        words += ["gradients accumulated in bf16"] * (self.accumulate == "bf16")
        words += [f"{self.matmuls} matmuls{', emulated' * self.emulate}"] * self.eight_bit
        return ", ".join(words)
