"""Weights that are rounded at random to the precision of their matmuls: the scale of differences that are rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from titan.model.init_weights import Normal, init_parameter
from titan.parallelism.norms import local_tensor
from titan.precision.schema import Precision

SPACING = {"fp32": 2.0**-23, "bf16": 2.0**-7}
"""The distance of neighbouring numbers between 1 and 2, by compute type."""
EIGHT_BIT_SPACING = 2.0**-3
"""Of float8_e4m3, which all 8-bit matmuls use."""
UNIFORM_STD = 12**-0.5
"""Standard deviation of a number that is uniform over one spacing, as an error of random rounding is."""


@torch.no_grad()
def perturb_weights(parameters: Iterable[tuple[str, Tensor]], precision: Precision, number: int) -> None:
    """Add the error of a random rounding to each weight, in place; the same on every layout.

    Args:
        parameters: this rank's shards, with names.
        precision: the run's; where weights are stored in the compute type already, the error is twice as large, since
            less is rounded away again.
        number: of the repetition.
    """
    spacing = EIGHT_BIT_SPACING if precision.eight_bit else SPACING[precision.compute]
    scale = UNIFORM_STD * spacing * (2 if precision.weights == precision.compute else 1)
    for name, p in parameters:
        noise = torch.empty_like(p, dtype=torch.float32)
        init_parameter(noise, f"rounding {number} of {name}", Normal(scale), 0)
        weight = local_tensor(p.detach())
        exponent = weight.float().abs().clamp(min=torch.finfo(torch.float32).tiny).log2().floor().exp2()
        weight.add_((local_tensor(noise) * exponent).to(weight.dtype))
