"""The causes of a step's time in three groups: computation, communication and pipeline idle. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping

COMPUTATION, COMMUNICATION, IDLE = "computation", "communication", "idle"
_GROUPS = {
    "tensor parallelism": COMMUNICATION, "context parallelism": COMMUNICATION,
    "expert parallelism": COMMUNICATION, "weights and gradients": COMMUNICATION,
    "pipeline transfers": COMMUNICATION, "pipeline idle": IDLE,
}  # fmt: skip
"""Of the causes of `titan.estimate.step_time`; the others are computation."""


def find_group(cause: str) -> str:
    """Return the group of a cause."""
    return _GROUPS.get(cause, COMPUTATION)


def sum_groups(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each group; 0 for one without any."""
    sums = dict.fromkeys((COMPUTATION, COMMUNICATION, IDLE), 0.0)
    for cause, seconds in parts.items():
        sums[find_group(cause)] += seconds
    return sums
