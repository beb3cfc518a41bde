"""The cosine between the gradients of successive steps, of each layer, from norms that are the same on every layout.

Below zero the second step undoes some of the first: weights go back and forth across a valley of the loss (Xing et al.
2018, arXiv:1802.08770).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from titan.config.settings import setting
from titan.hooks.schema import Hook

if TYPE_CHECKING:
    from torch import Tensor

    from titan.hooks.context import Context


@dataclass(frozen=True, kw_only=True)
class GradientCosine(Hook):
    """The settings of the hook."""

    every: int = setting(1, "steps between measurements", at_least=1)

    def build(self) -> Measure:
        """Return the object whose method is called before each update."""
        return Measure(self.every)


class Measure:
    """Keeps a copy of the gradients of the step before one that is measured."""

    def __init__(self, every: int) -> None:
        self.every, self.step = every, -1
        self.kept: dict[str, Tensor] = {}

    def before_optimizer(self, context: Context) -> None:
        """Log a measured step's cosines, unless this attempt has not done the step before."""
        gradients = dict(context.named_gradients())
        if context.step % self.every == 0 and self.step == context.step - 1:
            for layer, cosine in self.cosines(context, gradients).items():
                context.log(f"cosine/{layer}", cosine)
        keep = (context.step + 1) % self.every == 0
        self.step = context.step
        self.kept = {name: gradient.clone() for name, gradient in gradients.items()} if keep else {}

    def cosines(self, context: Context, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the cosine of each layer and of the whole model: 2ab = |a + b|^2 - |a|^2 - |b|^2."""
        parts = {
            "now": gradients,
            "before": self.kept,
            "both": {name: gradient + self.kept[name] for name, gradient in gradients.items()},
        }
        norms = context.norms({f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()})
        layers: dict[str, list[str]] = {}
        for name in (name.removeprefix("now/") for name in norms if name.startswith("now/")):
            layers.setdefault(layer_of(name), []).append(name)
            layers.setdefault("model", []).append(name)
        return {
            layer: cosine(*(reduce(add, (norms[f"{part}/{name}"].square() for name in names)) for part in parts))
            for layer, names in layers.items()
        }


def cosine(now: Tensor, before: Tensor, both: Tensor) -> Tensor:
    """Return the cosine between two vectors, from their squared norms and that of their sum."""
    return (both - now - before) / 2 / (now * before).sqrt()


def layer_of(parameter: str) -> str:
    """Return layers.3 for layers.3.attention.wq.weight, and head for head.weight."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
