"""A copy of the state in host memory, so that training can go on while it is written.

The copy runs beside the next step's forward and backward; only its update of the weights has to wait for it. On a GPU
it goes into pinned memory on a stream of its own, and the update waits on the device; on a CPU a thread copies.
The memory is taken at the first copy and kept.
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
        self.copied: Any = None

    def start(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy `state`; what is returned holds the copies once `ready` has returned.

        The copies of the state before this one must no longer be in use, and the state must not change before `done`.
        """
        pairs = [(self._buffer(name, local), local) for name, local in ((n, _local(t)) for n, t in state.items())]
        if self.on_gpu:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                _copy(pairs)
            self.copied = self.stream.record_event()
        elif self.thread is not None:
            self.copied = self.thread.submit(_copy, pairs)
        return {name: self._copy_of(name, tensor) for name, tensor in state.items()}

    def done(self) -> None:
        """Call it before the state changes: waits until it is copied (on a GPU the device does, not the host)."""
        if self.on_gpu and self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
        elif isinstance(self.copied, Future):
            wait([self.copied])

    def ready(self) -> None:
        """Call it before the copies are read: waits until they are there.

        Raises:
            Exception: why one could not be copied.
        """
        if self.on_gpu and self.copied is not None:
            self.copied.synchronize()
        elif isinstance(self.copied, Future):
            self.copied.result()

    def close(self) -> None:
        """End the thread and let go of the memory."""
        if self.thread is not None:
            self.thread.shutdown()
        self.buffers.clear()
        self.copies.clear()

    def _copy_of(self, name: str, tensor: Tensor) -> Tensor:
        """The copy of a tensor, made once: this is the training's thread, and a DTensor takes a while to make."""
        made = self.copies.get(name)
        if made is None or (isinstance(made, DTensor) and made._spec != tensor._spec):  # type: ignore[attr-defined]
            made = self.copies[name] = _like(tensor, self.buffers[name])
        return made

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        """Host memory for a tensor; what is on the host already (offloaded) is copied as well, as it will change."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=self.on_gpu)
        return self.buffers[name]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; not by `to_local`, which makes a node for autograd first."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The copy as the same part of the same whole.

    The constructor is torch's inner one: `DTensor.from_local` would take a host's copy back to the mesh's device.
    """
    if isinstance(tensor, DTensor):
        return DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return buffer
