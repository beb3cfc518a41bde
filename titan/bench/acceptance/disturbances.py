"""Hooks that disturb a run at a step: what a run does then is a part of the acceptance suite."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from titan.config.settings import setting
from titan.hooks.context import Context
from titan.hooks.schema import Hook


class _StepHook:
    """Calls `act` before the optimizer of one step, on one rank."""

    def __init__(self, step: int, rank: int, act: Any) -> None:
        self.step, self.rank, self.act = step, rank, act

    def before_optimizer(self, context: Context) -> None:
        if context.step == self.step and context.rank == self.rank:
            self.act(context)


@dataclass(frozen=True, kw_only=True)
class StandStill(Hook):
    """Lets a rank sleep."""

    step: int = setting(1, "the step", at_least=1)
    rank: int = setting(0, "the rank", at_least=0)
    seconds: float = setting(10.0, "how long", above=0)

    def build(self) -> _StepHook:
        """See `Hook`."""
        return _StepHook(self.step, self.rank, lambda context: time.sleep(self.seconds))


@dataclass(frozen=True, kw_only=True)
class NotFinite(Hook):
    """Makes a gradient NaN."""

    step: int = setting(1, "the step", at_least=1)

    def build(self) -> _StepHook:
        """See `Hook`."""
        return _StepHook(self.step, 0, _set_gradient_nan)


def _set_gradient_nan(context: Context) -> None:
    for _, gradient in context.named_gradients():
        gradient.mul_(math.nan)
        return


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Hook):
    """Allocates memory on the device until there is none."""

    step: int = setting(1, "the step", at_least=1)

    def build(self) -> _StepHook:
        """See `Hook`."""
        return _StepHook(self.step, 0, _exhaust_memory)


def _exhaust_memory(context: Context) -> None:
    allocations = []
    while True:
        allocations.append(torch.empty(1 << 30, dtype=torch.uint8, device=context.device))
