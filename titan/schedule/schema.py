"""The schedule axis: the learning rate and the weight decay at every step, as factors of those of the optimizer.

Each kind is a dataclass; what a run learns follows from the step alone, so that a resumed run continues where it was.
Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import setting
from titan.errors import ConfigError

CHECKED_STEPS = 1000
"""Steps at which `check` computes the factors."""


class Factors(NamedTuple):
    """By what a step multiplies `optimizer.lr`, and every parameter group's weight decay."""

    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings common to all schedules; a kind overrides `after_warmup`, or `lr_factor` as a whole."""

    warmup: int | str = setting(
        "auto",
        "steps in which the learning rate rises from zero; auto: a tenth of them, 2,000 at most",
        words=("auto",),
        at_least=0,
    )
    final_lr: float = setting(0.0, "learning rate at the end, as a share of optimizer.lr", at_least=0, at_most=1)
    weight_decay_shape: Literal["constant", "lr", "linear", "cosine"] = setting(
        "constant",
        "weight decay over the steps: constant, lr (in proportion to the learning rate), or linear or cosine from "
        "optimizer.weight_decay to final_weight_decay",
    )
    final_weight_decay: float = setting(
        0.0, "weight decay at the end, as a factor of optimizer.weight_decay", at_least=0, cap=1e4
    )

    def build(self, steps: int) -> Callable[[int], Factors]:
        """Return the function from a step (1 is the first) of a training of `steps` steps to its factors."""
        return lambda step: Factors(self.lr_factor(step, steps), self.weight_decay_factor(step, steps))

    def warmup_steps(self, steps: int) -> int:
        """Return the steps in which the learning rate rises from zero."""
        return min(2000, steps // 10) if self.warmup == "auto" else int(self.warmup)

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the learning rate of `step` (1 is the first) of `steps` as a share of its peak."""
        start = self.warmup_steps(steps)
        return step / start if step <= start else self.after_warmup(step, steps)

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the same, for steps after the warm-up."""
        raise NotImplementedError(f"{type(self).__name__} has no after_warmup(step, steps) and no lr_factor")

    def weight_decay_factor(self, step: int, steps: int) -> float:
        """Return the weight decay of `step` (1 is the first) of `steps` as a factor of the optimizer's."""
        if self.weight_decay_shape == "constant":
            return 1.0
        if self.weight_decay_shape == "lr":
            return self.lr_factor(step, steps)
        progress = compute_progress(step, 0, steps)
        shape = half_cosine(progress) if self.weight_decay_shape == "cosine" else 1 - progress
        return between(self.final_weight_decay, shape)

    @property
    def sets_weight_decay(self) -> bool:
        """Whether the weight decay may change from step to step."""
        is_own = any(getattr(type(self), n) is not getattr(Schedule, n) for n in ("weight_decay_factor", "build"))
        return self.weight_decay_shape != "constant" or is_own

    def check(self, steps: int) -> None:
        """Raise ConfigError for settings without effect, too long a warm-up, and factors that are no plain numbers."""
        if self.warmup_steps(steps) >= steps:
            raise ConfigError(
                f"schedule.warmup={self.warmup}: must be below training.steps={steps}; "
                f"give schedule.warmup={steps // 10}, for example."
            )
        if self.final_weight_decay and self.weight_decay_shape not in ("linear", "cosine"):
            raise ConfigError(
                f"schedule.final_weight_decay={self.final_weight_decay}: has no effect with "
                f"schedule.weight_decay_shape={self.weight_decay_shape}; give schedule.weight_decay_shape=linear or "
                "cosine."
            )
        name = f"schedule._target_={get_kind(type(self))}"
        try:
            factors = self.build(steps)
            factors_by_step = {step: factors(step) for step in {1, *range(1, steps, -(-steps // CHECKED_STEPS)), steps}}
        except Exception as error:
            raise ConfigError(
                f"{name}: {type(error).__name__} for training.steps={steps}: {error}; correct it."
            ) from error
        for step, values in sorted(factors_by_step.items()):
            for factor_name, value in zip(Factors._fields, values, strict=True):
                if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                    raise ConfigError(
                        f"{name}: the factor of {factor_name} at step {step} of {steps} is {value}; it must be a "
                        "finite number that is not negative."
                    )


@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395): a plateau, then a linear fall."""

    decay: float = setting(0.2, "share of the steps in which it falls at the end", at_least=0, at_most=1)

    def after_warmup(self, step: int, steps: int) -> float:
        """Return 1 until the last `decay` of the steps; the step after the last would have `final_lr`."""
        start = max(self.warmup_steps(steps), steps - round(self.decay * steps))
        return 1.0 if step <= start else between(self.final_lr, 1 - compute_progress(step, start, steps))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a period of a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the cosine's value; the step after the last would have `final_lr`."""
        return between(self.final_lr, half_cosine(compute_progress(step, self.warmup_steps(steps), steps)))


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """A linear fall."""

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the line's value; the step after the last would have `final_lr`."""
        return between(self.final_lr, 1 - compute_progress(step, self.warmup_steps(steps), steps))


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """The inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762), independent of the last step."""

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the square root of (steps of warm-up / step), at least `final_lr`."""
        return max(self.final_lr, math.sqrt(max(1, self.warmup_steps(steps)) / step))


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The peak, to the end."""

    def after_warmup(self, step: int, steps: int) -> float:
        """Return 1."""
        return 1.0

    def check(self, steps: int) -> None:
        """Raise ConfigError also for `final_lr`, which has no effect."""
        super().check(steps)
        if self.final_lr:
            raise ConfigError(
                f"schedule.final_lr={self.final_lr}: has no effect with schedule=constant; leave it out, or choose "
                "schedule=wsd, cosine or linear."
            )


KINDS: dict[str, type[Schedule]] = {
    "wsd": WSD, "cosine": Cosine, "linear": Linear, "inverse_sqrt": InverseSqrt, "constant": Constant,
}  # fmt: skip


def compute_progress(step: int, start: int, steps: int) -> float:
    """Return which share of the steps after `start` is done before `step`: 0 in the first, 1 after the last."""
    return min(1.0, (step - 1 - start) / (steps - start))


def half_cosine(progress: float) -> float:
    """Return half a period of a cosine, from 1 to 0."""
    return (1 + math.cos(math.pi * progress)) / 2


def between(final: float, shape: float) -> float:
    """Return the value between `final` (where `shape` is 0) and 1 (where it is 1)."""
    return final + (1 - final) * shape
