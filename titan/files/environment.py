"""The environment variables that ranks need before torch starts. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from titan.files import platform

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables from which torch reads its allocator's settings: the current name, then older ones."""


def prepare_environment(env: MutableMapping[str, str]) -> None:
    """Add to `env` what torch and NCCL read when they start; variables that are set already keep their values.

    - Expandable segments of GPU memory: without them blocks of changing sizes leave gaps, and a run that fits runs out
      of memory. On a CPU nothing changes.
    - Huge pages for large tensors on a CPU, each at a multiple of 2 MiB: glibc's heap then finds freed blocks of the
      right size again, and a run takes a fifth less memory where its tensors are large (docs/memory.md).
    - No warning that messages of a group wait for each other:
      `titan.parallelism.pipeline.runtime.create_p2p_groups` avoids that.
    """
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    env.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def divide_cores(env: MutableMapping[str, str], ranks: int, cores: int | None = None) -> None:
    """Set how many threads each rank of a node uses, unless that is set.

    Args:
        env: the ranks' environment, before they import torch.
        ranks: how many there are on the node.
        cores: each rank's; None: an equal part of this process's.
    """
    if ranks > 1:
        threads = platform.count_cores() // ranks if cores is None else cores
        env.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


def use_loopback(env: MutableMapping[str, str]) -> None:
    """Let gloo connect ranks of one machine over its loopback: it fails where the host's name does not resolve."""
    env.setdefault("GLOO_SOCKET_IFNAME", platform.LOOPBACK)


@contextmanager
def set_variables(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Set variables of this process and of its children while the block runs; afterwards they are as before."""
    values = dict(variables or {})
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
