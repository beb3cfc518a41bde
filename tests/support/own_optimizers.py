"""Small optimizers of each kind that titan distinguishes, and of each kind that it rejects."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Base(torch.optim.Optimizer):
    """w <- w - lr * update(g), after a decay of the weights; the update is the gradient."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for weight in (p for p in group["params"] if p.grad is not None):
                update = self.compute_update(weight, weight.grad, self.state[weight], group)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return what is subtracted."""
        return gradient


class Signs(Base):
    """The sign of a momentum, and a count of steps that is a Python number."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["momentum"] = state.get("momentum", torch.zeros_like(weight)) * 0.9 + gradient  # a new tensor each time
        state["steps"] = state.get("steps", 0) + 1
        return state["momentum"].sign() / state["steps"] ** 0.5


class MatrixNorms(Base):
    """A momentum, divided by the norm of each matrix; rows have a state of another shape."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        dims = (-2, -1) if gradient.dim() > 1 else (-1,)
        momentum = state.setdefault("momentum", torch.zeros_like(weight)).lerp_(gradient, 0.1)
        rows = state.setdefault("rows", torch.zeros(weight.shape[:-1])).lerp_(gradient.square().mean(-1), 0.1)
        scaled = momentum / (rows[..., None].sqrt() + 1e-3)
        return scaled / torch.linalg.vector_norm(scaled, dim=dims, keepdim=True).clamp(min=1e-6)


class TrustRatio(Base):
    """The gradient's direction times the norm of all weights of the tensor (LARS), and a scalar that follows it."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        ratio = weight.norm() / gradient.norm().clamp(min=1e-9)
        state["ratio"] = state.get("ratio", torch.zeros(())) * 0.5 + 0.5 * ratio
        return gradient * state["ratio"]


class Clipped(Base):
    """The gradient, with the mean square of the whole tensor limited."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / (gradient.square().mean().sqrt() / 0.5).clamp(min=1)


class CoupledDecay(Base):
    """A decay that depends on the norm of all weights of the tensor."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient + group["weight_decay"] * weight * weight.norm()


class LaterWhole(Base):
    """Element by element in the first steps, then by the norm of the tensor."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", torch.zeros(())) + 1
        return gradient if state["steps"] < 10 else gradient / gradient.norm()


class LargeWhole(Base):
    """Element by element for small tensors, and by the norm for those with long sides (as Adafactor's factors)."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm() if max(weight.shape) > 300 else gradient.sign()


class GroupCount(Base):
    """A count of steps in the parameter group, as Schedule-Free has it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count, and update."""
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient.sign() / group["k"]


class Noisy(Base):
    """Noise from torch's generator."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient + 0.1 * torch.randn_like(gradient)


class NoisySystem(Base):
    """Noise from the system, which nobody can seed."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient * (1 + int.from_bytes(os.urandom(2), "little") / 65536)


class FirstCounts(Base):
    """A count of steps that only the first parameter has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count, and update."""
        first = self.state[self.param_groups[0]["params"][0]]
        first["steps"] = self.steps = first.get("steps", 0) + 1
        super().step()

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient.sign() / self.steps


class NoisySigns(Base):
    """Signs of the gradient with noise in proportion to each matrix's norm."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        norm = torch.linalg.vector_norm(gradient, dim=(-2, -1) if gradient.dim() > 1 else (-1,), keepdim=True)
        return gradient / norm + 0.1 * torch.randn_like(gradient)


class Joint(Base):
    """The gradients divided by the norm of all of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Measure all gradients, then update."""
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack(norms).norm()
        super().step()

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / self.norm


class Hidden(Base):
    """A momentum in an attribute."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.momenta: dict[Tensor, Tensor] = {}

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        self.momenta[weight] = self.momenta.get(weight, torch.zeros_like(weight)) * 0.9 + gradient
        return self.momenta[weight]


class Unscheduled(Base):
    """The learning rate of the constructor, whatever the schedule says."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.rate = lr

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update with the rate of the constructor."""
        for group in self.param_groups:
            group["lr"] = self.rate
        super().step()


class Closed(Base):
    """A step that computes the loss itself."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        """Call the closure."""
        super().step()
        return closure()


class LateState(Base):
    """A state that appears in the twelfth step."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] >= 12:
            state["late"] = torch.zeros_like(weight)
        return gradient


class EarlyState(Base):
    """A state that appears in the third step."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] >= 3:
            state["early"] = state.get("early", torch.zeros_like(weight)) + gradient
        return gradient + 0.1 * state.get("early", 0.0)


class ObjectState(Base):
    """A state that is an object."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["object"] = self
        return gradient


class MatricesOnly(Base):
    """The direction of a matrix; vectors and stacks are errors."""

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if weight.dim() != 2:
            raise ValueError(f"only matrices, not {weight.dim()} dimensions")
        return gradient / gradient.norm()


class HandsOn(torch.optim.AdamW):
    """AdamW with arguments that it names in no signature."""

    def __init__(self, params: Any, **arguments: Any) -> None:
        super().__init__(params, **arguments)


class Averaged(Base):
    """SGD that evaluates the mean of its weights, between its methods `train` and `eval`."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.param_groups[0]["is_training"] = False

    def train(self) -> None:
        """Begin to train."""
        self.param_groups[0]["is_training"] = True

    @torch.no_grad()
    def eval(self) -> None:
        """Put the mean in place of the weights."""
        for group in self.param_groups:
            group["is_training"] = False
            for weight in group["params"]:
                weight.copy_(self.state[weight]["sum"] / self.state[weight]["steps"])

    def compute_update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not group["is_training"]:
            raise RuntimeError("call train() first")
        state["steps"] = state.get("steps", 0) + 1
        state["sum"] = state.get("sum", torch.zeros_like(weight)) + weight
        return gradient
