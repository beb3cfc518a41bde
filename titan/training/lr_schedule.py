"""The learning rate at every step. Free of torch."""

from __future__ import annotations

import math

from titan.training.schema import Training


def lr_factor(training: Training, step: int) -> float:
    """Return the learning rate of `step` (1 is the first) as a share of its peak.

    Warm-up is linear. Then `wsd` (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395) stays at the peak and falls
    linearly over the last `decay` of the steps, `cosine` (Loshchilov and Hutter 2017, arXiv:1608.03983) follows half a
    period of a cosine and `linear` falls linearly; all would reach `final_lr` in the step after the last.
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
