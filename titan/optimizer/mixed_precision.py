"""AdamW and SGD by torch's kernels, and AdamW for weights and moments in bf16 or fp32.

It computes in fp32, and rounds once when written back. The update is elementwise, so it runs on pieces of each rank's
shards: only one bucket of pieces at a time exists in fp32. torch's functional AdamW computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from titan.parallelism.norms import local_tensor

BUCKET = 1 << 22
"""Elements per bucket: four fp32 tensors of 16 MiB."""
TYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""The types of moments; None: each parameter's."""


def select_kernels(implementation: str) -> dict[str, Any]:
    """Return torch's keyword arguments of an implementation: fused, foreach or for-loop."""
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}


def build_adamw(
    groups: list[dict[str, Any]], common: dict[str, Any], moments: str, implementation: str
) -> torch.optim.Optimizer:
    """Return torch's AdamW if weights and moments have one type, else `MixedPrecisionAdamW`; see its arguments."""
    kinds = {p.dtype for group in groups for p in group["params"]}
    same_type = all(kind == (TYPES[moments] or kind) for kind in kinds)
    if same_type and (implementation == "fused" or kinds <= {torch.float32}):  # the fused one computes in fp32
        return torch.optim.AdamW(groups, **common, **select_kernels(implementation))
    return MixedPrecisionAdamW(groups, common, moments, implementation)


def build_sgd(groups: list[dict[str, Any]], common: dict[str, Any], implementation: str) -> torch.optim.SGD:
    """Return torch's SGD with settings `common` of all groups."""
    tensors = [p for group in groups for p in group["params"]]
    # There is no fused kernel for DTensors, and the CPU's does not update weights that are not fp32.
    lacks_fused = any(isinstance(p, DTensor) or (p.device.type == "cpu" and p.dtype != torch.float32) for p in tensors)
    uses_default = lacks_fused and implementation == "fused"
    return torch.optim.SGD(groups, **common, **({"fused": False} if uses_default else select_kernels(implementation)))


class Piece(NamedTuple):
    """Views of some rows of a parameter's local shard, its gradient and its state."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor


class MixedPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with state and weights of any type (see the module); its state has the keys of torch's AdamW."""

    def __init__(self, groups: list[dict[str, Any]], common: dict[str, Any], moments: str, implementation: str) -> None:
        """Create the optimizer of torch's parameter groups, with betas and eps `common` to all.

        The implementation "fused" honours `found_inf`, so that a non-finite step changes nothing.
        """
        super().__init__(groups, common)
        self.moments, self.implementation = moments, implementation
        self._step_supports_amp_scaling = implementation == "fused"
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group: dict[str, Any]) -> None:
        """Update a group's parameters."""
        parameters = [p for p in group["params"] if p.grad is not None]
        bucket, size = list[Piece](), 0
        for piece in (piece for parameter in parameters for piece in self._split_pieces(parameter)):
            if bucket and size + piece.weight.numel() > BUCKET:
                self._update_bucket(bucket, group)
                bucket, size = [], 0
            bucket.append(piece)
            size += piece.weight.numel()
        if bucket:
            self._update_bucket(bucket, group)
        steps = [self.state[p]["step"] for p in parameters]
        if steps:
            torch._foreach_add_(steps, 1)
        if steps and self._skip_flag is not None:
            torch._foreach_sub_(steps, [self._skip_flag] * len(steps))

    @property
    def _skip_flag(self) -> Tensor | None:
        """1 if the step must change nothing, else 0; None if the caller skips such steps itself."""
        return self.found_inf if self._step_supports_amp_scaling else None

    def create_moment(self, parameter: Tensor) -> Tensor:
        """Return a new moment of a parameter, with its sharding."""
        return torch.zeros_like(parameter, dtype=TYPES[self.moments], memory_format=torch.preserve_format)

    def _split_pieces(self, parameter: Tensor) -> Iterator[Piece]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            device = parameter.device if self.implementation == "fused" else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"], state["exp_avg_sq"] = self.create_moment(parameter), self.create_moment(parameter)
        shards = [local_tensor(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]  # type: ignore[arg-type]
        width = shards[0][0].numel() if len(shards[0]) else 1
        rows = max(1, BUCKET // max(1, width))
        for weight, gradient, first, second in zip(*(torch.split(t, rows) for t in shards), strict=True):
            yield Piece(weight, gradient, first, second, state["step"])

    def _update_bucket(self, bucket: list[Piece], group: dict[str, Any]) -> None:
        stored = [[p.weight for p in bucket], [p.first for p in bucket], [p.second for p in bucket]]
        weights, firsts, seconds = exact = [[t.float() for t in tensors] for tensors in stored]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [p.gradient.float() for p in bucket],
            firsts,
            seconds,
            [],
            [p.step.clone() for p in bucket],
            **select_kernels(self.implementation),
            found_inf=self._skip_flag,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for old, new in zip(stored, exact, strict=True):
            if pairs := [(a, b) for a, b in zip(old, new, strict=True) if a.dtype != b.dtype]:
                torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
