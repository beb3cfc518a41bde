"""Staging: copy the state to host memory, so that training continues while it is written.

The copy overlaps with the next step's forward and backward; only the update of the weights waits for it. On a GPU it
goes to pinned memory on a separate stream, and the update waits on the device; on a CPU a thread copies. The buffers
are allocated at the first copy and reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Copies of a state's tensors."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a state on `device`; nothing is allocated yet."""
        self.on_gpu = device.type == "cuda"
        self.buffers: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        self.thread = None if self.on_gpu else ThreadPoolExecutor(1, "titan-staging")
        self.stream: Any = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.pending_copy: Any = None

    def start_copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy `state`; the returned tensors are valid once `wait_for_copies` has returned.

        The copies of the previous call must no longer be in use, and the state must not change before
        `wait_before_update`.
        """
        pairs = [
            (self._get_buffer(name, local), local) for name, local in ((n, _local_tensor(t)) for n, t in state.items())
        ]
        if self.on_gpu:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                _copy_tensors(pairs)
            self.pending_copy = self.stream.record_event()
        elif self.thread is not None:
            self.pending_copy = self.thread.submit(_copy_tensors, pairs)
        return {name: self._get_copy(name, tensor) for name, tensor in state.items()}

    def wait_before_update(self) -> None:
        """Wait until the state is copied (on a GPU only the device waits); call it before the state changes."""
        if self.on_gpu and self.pending_copy is not None:
            torch.cuda.current_stream().wait_event(self.pending_copy)
        elif isinstance(self.pending_copy, Future):
            wait([self.pending_copy])

    def wait_for_copies(self) -> None:
        """Wait until the copies are complete; call it before they are read.

        Raises:
            Exception: when copying failed.
        """
        if self.on_gpu and self.pending_copy is not None:
            self.pending_copy.synchronize()
        elif isinstance(self.pending_copy, Future):
            self.pending_copy.result()

    def close(self) -> None:
        """End the thread and free the buffers."""
        if self.thread is not None:
            self.thread.shutdown()
        self.buffers.clear()
        self.copies.clear()

    def _get_copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, created once: creating a DTensor is slow, and this is the training thread."""
        tensor_copy = self.copies.get(name)
        if tensor_copy is None or (isinstance(tensor_copy, DTensor) and tensor_copy._spec != tensor._spec):  # type: ignore[attr-defined]
            tensor_copy = self.copies[name] = _wrap_buffer(tensor, self.buffers[name])
        return tensor_copy

    def _get_buffer(self, name: str, local: Tensor) -> Tensor:
        """Return the host buffer of a tensor; offloaded tensors are copied too, because they will change."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=self.on_gpu)
        return self.buffers[name]


def _copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=True)


def _local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor; `to_local` would create an autograd node."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _wrap_buffer(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Return the buffer as a DTensor with the tensor's sharding.

    Uses torch's private constructor: `DTensor.from_local` would move the copy back to the mesh's device.
    """
    if isinstance(tensor, DTensor):
        return DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return buffer
