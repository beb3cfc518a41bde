"""The world of a run: its ranks, their device, and who does what with whom.

One place turns degrees into a device mesh and answers every later question: which ranks sum gradients, who reads which
rows, who speaks. A single rank has neither process group nor mesh; every method then does nothing or gives what it got.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore

from launchers.place import Place
from titan.dataset.loader import Share
from titan.parallelism.schema import Layout

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them.

    Attributes:
        place: this rank among all.
        layout: all degrees.
        device: where this rank computes.
        mesh: the dimensions whose degree is above one, outermost first; None for a single rank.
    """

    place: Place
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that writes shared files and the terminal."""
        return self.place.rank == 0

    @property
    def share(self) -> Share:
        """Which rows of a global batch this rank reads: replicate and shard together cut the batch."""
        inner = self._coordinate("shard")
        return Share(self._coordinate("replicate") * self.layout.shard + inner, self.layout.data_ranks)

    def dimensions(self, *names: str) -> DeviceMesh | None:
        """The part of the mesh with those of `names` whose degree is above one; None when there is none."""
        wanted = tuple(n for n in names if getattr(self.layout, n) > 1)
        if not wanted or self.mesh is None:
            return None
        return self.mesh[wanted] if wanted != self.mesh.mesh_dim_names else self.mesh

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over the ranks that read different rows."""
        if self.layout.data_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        if self.place.size == 1:
            return [value]
        values: list[Any] = [None] * self.place.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.place.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.place.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _coordinate(self, name: str) -> int:
        if self.mesh is None or name not in (self.mesh.mesh_dim_names or ()):
            return 0
        return int(self.mesh.get_local_rank(name))


def _device(place: Place, device_type: str) -> torch.device:
    """This rank's device; where the launcher shows each rank its own GPU only, that one."""
    if device_type != "cuda":
        _keep_freed_memory()
        return torch.device(device_type)
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _keep_freed_memory() -> None:
    """Let the C library keep what tensors free, for the next step to use (glibc; elsewhere nothing changes).

    By default it hands large blocks back to the kernel at once, which then clears every page again when it is touched:
    on a CPU that took a fifth of a small model's step. A user's own MALLOC_* or GLIBC_TUNABLES setting stands.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def connect(place: Place, layout: Layout, device_type: str, timeout: float, store: Any = None) -> World:
    """Join the process group, where there is more than one rank, and lay out the mesh.

    Args:
        place: this rank.
        layout: all degrees; their product is the number of ranks.
        device_type: "cpu" or "cuda".
        timeout: seconds after which a collective operation gives up.
        store: what the ranks have met at already; None to meet at `place.rendezvous`.
    """
    device = _device(place, device_type)
    if place.size == 1:
        return World(place, layout, device)
    meeting = {"store": PrefixStore("titan", store)} if store is not None else {"init_method": place.rendezvous}
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device_type == "cuda" else None,
        **meeting,
    )
    degrees = {name: degree for name, degree in layout.degrees().items() if degree > 1}
    mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    return World(place, layout, device, mesh)
