"""Measures how long a rank waits for other ranks in a step.

Counted is the time in which the step's computation stands still: on a CPU in the calls of the main thread, and of the
one that starts backward passes of pairs, that wait for a collective or message, on a GPU between two events on the
stream of the computation around what makes it wait. All go through a few functions of torch, which are replaced while
this is in use:

    Work.wait, collectives that do not return before they are done, messages       torch.distributed
    wait_tensor                          of collectives in tensor and context parallelism, outside of compiled code
    Stream.wait_event                    FSDP on a GPU
    the end of backward                  DDP waits in C++: from the last gradient until backward returns
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

BLOCKING = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Collectives of torch.distributed that titan and FSDP call."""
BACKWARD = "titan-backward"
"""How the name of a thread begins that starts backward passes (`titan.parallelism.schema.ExpertExchange`)."""


class Waits:
    """Adds up the waiting of this process in each step."""

    def __init__(self, device: torch.device, compiled: bool) -> None:
        """Take the device, and whether parts of the model are compiled, in which nothing can be replaced."""
        self.on_gpu = device.type == "cuda"
        self.device, self.compiled = device, compiled
        self.thread = threading.get_ident()
        self.times: list[tuple[Any, Any]] = []
        self.inside = False
        self.ready: Any = None
        self.patches = ExitStack()

    def install(self, last: Tensor | None, further_functions: Sequence[tuple[Any, str]] = ()) -> None:
        """Replace torch's functions until `close`.

        Args:
            last: where DDP sums gradients, the parameter whose gradient is computed last.
            further_functions: further functions that wait, as module and name; compiled code may contain them.
        """
        targets = [(dist.Work, "wait"), *((dist, name) for name in BLOCKING)]
        targets += [] if self.compiled else [(functional, "wait_tensor"), *further_functions]
        targets += [(torch.cuda.Stream, "wait_event")] if self.on_gpu else []
        for owner, name in targets:
            self.patches.enter_context(mock.patch.object(owner, name, self._wrap_function(getattr(owner, name))))
        if last is not None:
            hook = last.register_post_accumulate_grad_hook(self._record_last_gradient)  # type: ignore[no-untyped-call]
            self.patches.callback(hook.remove)

    def close(self) -> None:
        """Put torch's functions back."""
        self.patches.close()

    def end_backward(self) -> None:
        """Count the time since the last gradient, where DDP sums them."""
        if self.ready is not None:
            self.times.append((self.ready, record_moment(self.on_gpu)))
            self.ready = None

    def take_waits(self) -> list[tuple[Any, Any]]:
        """Return the waiting since the last call, as `sum_seconds` reads it once the device has finished the step."""
        times, self.times = self.times, []
        return times

    def sum_seconds(self, times: list[tuple[Any, Any]]) -> float:
        """Return the sum of waiting that `take_waits` returned."""
        return sum(compute_seconds(start, end) for start, end in times)

    def _wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_time(*args: Any, **kwargs: Any) -> Any:
            if self.inside or not self._is_computing():
                return function(*args, **kwargs)
            self.inside, start = True, record_moment(self.on_gpu)
            try:
                return function(*args, **kwargs)
            finally:
                self.times.append((start, record_moment(self.on_gpu)))
                self.inside = False

        return run_and_time

    def _is_computing(self) -> bool:
        """Return whether this thread, or the stream on which it issues work, is that of the step's computation."""
        if self.on_gpu:
            return bool(torch.cuda.current_stream(self.device) == torch.cuda.default_stream(self.device))
        return threading.get_ident() == self.thread or threading.current_thread().name.startswith(BACKWARD)

    def _record_last_gradient(self, _: Tensor) -> None:
        self.ready = record_moment(self.on_gpu)


def record_moment(on_gpu: bool) -> Any:
    """Return the present moment, on a GPU an event on the current stream: no wait for the device."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def compute_seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments, which the device has passed."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000
