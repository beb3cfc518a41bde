"""Muon (Jordan et al. 2024): the update of a matrix is its momentum, orthogonalised by Newton-Schulz iterations.

The momentum is sharded as the parameter is. A sharded matrix must be gathered to be orthogonalised: the matrices are
distributed over the ranks, see `titan.optimizer.matrix_gather`. A replicated one is orthogonalised by every rank. The
weight of experts is a matrix for each; where experts are distributed, each rank orthogonalises its own.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.optimizer import matrix_gather, mixed_precision
from titan.optimizer.matrix_gather import Item
from titan.parallelism.norms import local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic polynomial: steepest at zero; singular values converge to about 0.7 to 1.2."""
EPS = 1e-7
"""The smallest norm to divide by."""


class MuonWithAdamW(mixed_precision.MixedPrecisionAdamW):
    """Muon for the parameter groups with `orthogonal`, AdamW for the others."""

    def __init__(self, settings: Any, groups: list[dict[str, Any]]) -> None:
        """Create the optimizer from a `titan.optimizer.schema.Muon` and torch's parameter groups."""
        common = {"betas": settings.betas, "eps": settings.eps}
        super().__init__(groups, common, settings.moments, settings.implementation)
        self.settings = settings
        sharded = (p for group in groups if group["orthogonal"] for p in group["params"] if _splits_matrices(p))
        self.boxes: dict[Tensor, matrix_gather.Box] = {p: matrix_gather.compute_local_slices(p) for p in sharded}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a collective over the ranks of each mesh."""
        sharded = []
        for group in self.param_groups:
            if not group["orthogonal"]:
                self.update_group(group)
                continue
            for item in (Item(p, group) for p in group["params"] if p.grad is not None):
                if item.parameter in self.boxes:
                    sharded.append(item)
                else:
                    self._apply_update(item, self._orthogonalise(item, self._compute_direction(item.parameter)))
        matrix_gather.run_on_owners(sharded, self._gather, self._orthogonalise, self._spread)

    def _orthogonalise(self, item: Item, matrix: Tensor) -> Tensor:
        return orthogonalise_matrix(matrix, self.settings.iterations)

    def _gather(self, item: Item) -> Tensor:
        """Return the whole direction of a sharded matrix; a collective over its mesh."""
        parameter, mesh = item.parameter, item.parameter.device_mesh
        return matrix_gather.gather_matrix(self._compute_direction(parameter).to(mesh.device_type), parameter, mesh)

    def _spread(self, item: Item, update: Tensor | None, broadcast: matrix_gather.Broadcast) -> None:
        """Update this rank's shard with what the owner has computed."""
        parameter = item.parameter
        device, dtype = parameter.device_mesh.device_type, self._choose_dtype(parameter)
        whole = torch.empty(parameter.shape, dtype=dtype, device=device) if update is None else update
        broadcast(whole)
        self._apply_update(item, whole[self.boxes[parameter]].to(local_tensor(parameter.detach()).device))

    def _compute_direction(self, parameter: Tensor) -> Tensor:
        """Add the gradient to the momentum; return the local shard of the direction in the type of Newton-Schulz."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = self.create_moment(parameter)
        stored, gradient = local_tensor(state["momentum_buffer"]), local_tensor(parameter.grad).float()  # type: ignore[arg-type]
        momentum = stored.float().lerp(gradient, 1 - self.settings.momentum)
        stored.copy_(
            momentum if self._skip_flag is None else torch.where(self._skip_flag > 0, stored.float(), momentum)
        )
        if self.settings.nesterov:
            momentum = gradient.lerp(momentum, self.settings.momentum)
        return momentum.to(self._choose_dtype(parameter))

    def _choose_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the type of Newton-Schulz; offloaded weights are orthogonalised on their mesh's device."""
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
        return torch.bfloat16 if self.settings.choose_newton_schulz(device) == "bf16" else torch.float32

    def _apply_update(self, item: Item, part: Tensor) -> None:
        """Decay the local shard of a matrix and add its orthogonalised direction; round once."""
        parameter, group = item
        weight, rate = local_tensor(parameter.detach()), group["lr"]
        new = weight.float() * (1 - rate * group["weight_decay"])
        new.add_(part, alpha=-rate * compute_scale(self.settings.adjust, tuple(parameter.shape)))
        weight.copy_(new if self._skip_flag is None else torch.where(self._skip_flag > 0, weight.float(), new))


def orthogonalise_matrix(matrix: Tensor, iterations: int) -> Tensor:
    """Return approximately the nearest matrix with orthonormal rows (or columns): singular values near one.

    They are computed by quintic Newton-Schulz iterations in the type of one matrix, or of several [..., rows, columns].
    """
    a, b, c = COEFFICIENTS
    tall, add = matrix.shape[-2] > matrix.shape[-1], torch.addmm if matrix.dim() == 2 else torch.baddbmm
    x = matrix.mT if tall else matrix
    # the largest singular value is at most the norm, so then at most one
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def compute_scale(adjust: str, shape: tuple[int, ...]) -> float:
    """Return the factor of a matrix's update that depends on its shape.

    match_rms_adamw: 0.2 * sqrt(max(rows, columns)), so that the root mean square is that of AdamW's updates
    (arXiv:2502.16982, section 2.2). original: sqrt(max(1, rows / columns)), Jordan's.
    """
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _splits_matrices(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ranks have parts of a matrix: not so where each has some experts with whole matrices."""
    is_sharded = isinstance(tensor, DTensor)
    return is_sharded and (tensor.dim() == 2 or not matrix_gather.list_sharded_dimensions(tensor) <= {0})
