"""Moments of a step: on a GPU those at which its stream comes to them, read later without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch


def record_moment(on_gpu: bool) -> Any:
    """Return the present moment, on a GPU an event on the current stream."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def compute_seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments, which the device has passed."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000
