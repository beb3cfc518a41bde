"""The memory that a CPU rank keeps when tensors are freed, with the GNU C library. Free of torch.

The library takes tensors from one region of memory, its heap. A page that is returned to the kernel is cleared when it
is used again, which takes a fifth of a small model's step, so freed memory is kept. But small objects that outlive a
tensor come to lie in the memory that it leaves, where the next step's tensor does not fit any more. Where FSDP gathers
and frees weights, such holes grew from step to step until they took as much memory as all tensors together. So:

- large tensors are outside of the heap, and their memory returns to the kernel when they are freed; which tensors are
  large depends on whether FSDP gathers weights;
- threads (gloo's, which copy what they exchange) have no heaps besides;
- before the first step, after it, and when a rank is larger at the end of a step than at the end of an earlier one,
  freed pages return to the kernel.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress

from titan.files import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt (malloc.h)
LARGE, LARGE_GATHERED = 16 * 2**20, 2 * 2**20
"""Bytes from which a tensor is outside of the heap; and where FSDP gathers weights. From 2 MiB on tensors lie in huge
pages, which are cleared ten times as fast as others."""
GROWTH = 1.05  # how much larger a rank may be at the end of a step than at the end of an earlier one
USER_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")
"""How the names begin of the variables with which a user sets the library's parameters."""


def keep_freed_memory(gathers: bool = False) -> None:
    """Let the C library keep freed memory for the next step, but not of large tensors.

    A user's own MALLOC_* or GLIBC_TUNABLES setting is kept; with other C libraries nothing changes.

    Args:
        gathers: whether FSDP gathers and frees weights.
    """
    set_parameter = platform.find_c_function("mallopt")
    if set_parameter is None or any(name.startswith(USER_VARIABLES) for name in os.environ):
        return
    set_parameter(M_TRIM_THRESHOLD, 2**31 - 1)
    set_parameter(M_MMAP_THRESHOLD, LARGE_GATHERED if gathers else LARGE)
    set_parameter(M_ARENA_MAX, 1)


def release_freed_memory() -> None:
    """Return freed pages to the kernel."""
    trim = platform.find_c_function("malloc_trim")
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Returns freed pages to the kernel around the first step, and whenever the rank has grown since an earlier one."""

    def __init__(self, enabled: bool = True) -> None:
        """Start before the first step; do nothing unless `enabled`, where tensors are not on a CPU."""
        self._enabled, self._limit = enabled, 0.0

    def begin_steps(self) -> None:
        """Return what building the model and drawing its weights has freed, before the first step."""
        if not self._limit:
            self.release()

    def end_step(self) -> None:
        """Compare the rank's size with its size at the end of the first step after freed pages were returned."""
        size = read_resident_bytes() if self._enabled else 0
        if size > self._limit:
            self.release()
            self._limit = math.inf
        elif self._limit == math.inf:
            self._limit = GROWTH * size

    def release(self) -> None:
        """Return freed pages before work of another shape than a step's, whose tensors would not fit there."""
        if self._enabled:
            release_freed_memory()


def read_resident_bytes() -> int:
    """Return the size of this process in memory; 0 where the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError), open(platform.PROC / "self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
