"""Where the tensors of a train step lie in memory, and what lies on a GPU when its memory runs out."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.profile import memory

log = logging.getLogger("titan")
Owners = Mapping[str, Mapping[int, int]]
"""The bytes of each storage by its address, by category."""


def collect_owners(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, dict[int, int]]:
    """Return the storages of weights, of the gradients that exist, and of the optimizer's state."""
    weights = list(parameters)
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {
        memory.WEIGHTS: _map_storages(weights),
        memory.GRADIENTS: _map_storages(p.grad for p in weights if p.grad is not None),
        memory.OPTIMIZER: _map_storages(states),
    }


def _map_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = ((t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def describe_snapshot(segments: Sequence[Mapping[str, Any]], owners: Owners) -> str:
    """Return what is alive in the segments of a snapshot of CUDA's allocator."""
    parts: dict[str, float] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                category = next(
                    (name for name, storages in owners.items() if address in storages), "activations and temporary"
                )
                parts[category] = parts.get(category, 0.0) + block["size"]
            address += block["size"]
    return memory.describe_peak(parts, "") if parts else "nothing was allocated"


def write_snapshot(folder: Path, name: str, owners: Owners) -> str:
    """Write a snapshot of CUDA's allocator for https://pytorch.org/memory_viz, and return what was alive."""
    snapshot = torch.cuda.memory._snapshot()
    text = describe_snapshot(snapshot["segments"], owners)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(snapshot))
    (folder / f"{name}.txt").write_text(text + "\n")
    return text


def watch_out_of_memory(
    folder: Path, rank: int, read_owners: Callable[[], Owners], show: Callable[[str], None]
) -> None:
    """Write a snapshot when CUDA's memory runs out, while what filled it is still there; before, nothing is recorded.

    Args:
        show: writes a line to the terminal, on rank 0.
    """

    def observer(device: int, requested: int, total: int, free: int) -> None:
        try:
            text = write_snapshot(folder, f"out-of-memory-rank-{rank}", read_owners())
        except Exception as error:  # the run ends with the original error
            text = f"no snapshot: {error}"
        log.error("out of memory: %s", text)
        show(f"out of memory on rank {rank}: {text}")

    library: Any = torch._C
    library._cuda_attach_out_of_memory_observer(observer)
