"""Loss spikes: losses far above those of the steps before. Free of torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

MIN_RISE = 0.1
"""Nats: a smaller rise is no spike, however even the steps before it were."""
MIN_LOSSES = 20
"""Losses that the window must have, where it is not shorter."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution by its median absolute deviation."""


@dataclass(frozen=True)
class LossSpike:
    """A loss that is a spike: how many robust standard deviations it is above the median, and that median."""

    deviations: float
    window_median: float

    def build_record(self) -> dict[str, float]:
        """Return the keys of the step's line of metrics.jsonl."""
        return {"spike": self.deviations, "spike_median": self.window_median}

    def format_message(self, step: int, loss: float, first: int, last: int) -> str:
        """Return what the terminal says of it; `first` and `last` are the step's rows."""
        return (
            f"step {step}: the loss, {loss:.4f}, is a spike, {self.deviations:.1f} deviations above the median of "
            f"{self.window_median:.4f}: rows {first} to {last}"
        )


class SpikeDetector:
    """Compares each loss with those of a window of steps before it, by a robust z-score.

    Median and median absolute deviation change little with the spikes that are in the window themselves.
    """

    def __init__(self, window: int, deviations: float, previous_losses: Iterable[float | None] = ()) -> None:
        """Take the number of steps, 0 to mark none, the limit, and the losses before the first."""
        self.window, self.deviations = window, deviations
        self.losses = deque((x for x in previous_losses if x is not None and math.isfinite(x)), maxlen=window)

    def add(self, loss: float) -> LossSpike | None:
        """Add the loss of the next step; return its mark if it is a spike."""
        if not (self.window and math.isfinite(loss)):
            return None
        spike = None
        if len(self.losses) >= min(MIN_LOSSES, self.window):
            window_median = median(self.losses)
            sigma = MAD_TO_SIGMA * median(abs(x - window_median) for x in self.losses)
            deviations = (loss - window_median) / max(sigma, MIN_RISE / self.deviations)  # a smaller rise is no spike
            spike = LossSpike(deviations, window_median) if deviations > self.deviations else None
        self.losses.append(loss)
        return spike
