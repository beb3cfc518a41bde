"""The training axis: how long, on how much, from which seed, and the learning rate at every step. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from titan.settings import Refusal, setting


@dataclass(frozen=True)
class Training:
    """How long to train, and on how much at a time."""

    steps: int = setting(200, "optimizer updates", at_least=1)
    global_batch: int = setting(2048, "tokens an update, over all devices", at_least=1)
    seq_len: int = setting(256, "tokens a row", at_least=2)
    seed: int = setting(0, "decides the initial weights and the order of the data", at_least=0, below=2**63)
    schedule: Literal["wsd", "cosine", "linear"] = setting("wsd", "learning rate after warm-up: wsd, cosine or linear")
    warmup: int | str = setting(
        "auto",
        "steps in which the learning rate rises from zero; auto: a tenth of them, 2,000 at most",
        words=("auto",),
        at_least=0,
    )
    decay: float = setting(0.2, "share of the steps in which wsd falls at the end", at_least=0, at_most=1)
    final_lr: float = setting(0.0, "learning rate at the end, as a share of optimizer.lr", at_least=0, at_most=1)
    clip_norm: float | None = setting(1.0, "largest norm of the gradient; null: no clipping", above=0)
    bad_steps: int = setting(3, "steps in a row with a loss or gradient that is not finite, to give up at", at_least=1)
    gc_every: int = setting(50, "steps between collections of Python's garbage", science=False, at_least=1)

    @property
    def rows(self) -> int:
        """Rows in a global batch."""
        return self.global_batch // self.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises from zero."""
        return min(2000, self.steps // 10) if self.warmup == "auto" else int(self.warmup)

    def check(self) -> None:
        """Refuse what fits no row, and a schedule without room.

        Raises:
            Refusal: naming the setting to change.
        """
        if self.global_batch % self.seq_len:
            near = max(1, round(self.global_batch / self.seq_len)) * self.seq_len
            raise Refusal(
                f"training.global_batch={self.global_batch}: must be a multiple of training.seq_len={self.seq_len}; "
                f"the nearest is {near}."
            )
        if self.warmup_steps >= self.steps:
            raise Refusal(
                f"training.warmup={self.warmup}: must be below training.steps={self.steps}; "
                f"give training.warmup={self.steps // 10}, for example."
            )


def lr_factor(training: Training, step: int) -> float:
    """The share of the peak learning rate that holds in `step` (1 is the first).

    Warm-up is linear. Then `wsd` (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395) stays at the peak and falls
    linearly over the last `decay` of the steps, `cosine` (Loshchilov and Hutter 2017, arXiv:1608.03983) falls along
    half a period and `linear` falls evenly; all would reach `final_lr` in the step after the last.
    """
    start = training.warmup_steps
    if step <= start:
        return step / start
    if training.schedule == "wsd":
        start = max(start, training.steps - round(training.decay * training.steps))
    if step <= start:
        return 1.0
    done = min(1.0, (step - 1 - start) / (training.steps - start))
    shape = (1 + math.cos(math.pi * done)) / 2 if training.schedule == "cosine" else 1 - done
    return training.final_lr + (1 - training.final_lr) * shape
