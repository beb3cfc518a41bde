"""What ranks need in their environment before torch starts. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch looks for its allocator's settings: the first is its own name for them, the others are older."""


def before_torch(env: MutableMapping[str, str]) -> None:
    """Add to `env` what torch and NCCL read when they start; what is set already stands.

    - Segments of GPU memory that can grow: without them blocks of changing sizes leave gaps, and a run that fits runs
      out of memory. On a CPU nothing changes.
    - Huge pages for large tensors on a CPU, each at a multiple of 2 MiB: glibc's heap then finds freed blocks of the
      right size again, and a run takes a fifth less memory where its tensors are large (docs/memory.md).
    - No warning that messages of a group wait for each other: `titan.parallelism.pipeline.runtime.link` sees to that.
    """
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    env.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


@contextmanager
def within(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Set variables of this process and of those that it starts; afterwards they are as before."""
    given = dict(variables or {})
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
