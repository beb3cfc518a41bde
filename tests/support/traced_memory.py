"""The peak of live tensors of a rank's real step, traced in one process on fake tensors.

A fake process group replaces the other ranks: the real build, forward, backward and optimizer step run, so the
allocations of a job of hundreds of ranks are traced. Allocations inside of kernels, the allocator's rounding and
communication buffers are not.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.ranks import run_ranks
from titan.cluster.rank_info import RankInfo
from titan.parallelism import mesh
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build


@dataclass
class Peak:
    """The most bytes that were live at once, in which phase, and by tensor."""

    bytes: int = 0
    phase: str = ""
    parts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.bytes / 2**20:10.2f} MiB in {self.phase}"]
        return "\n".join(
            lines + [f"{size / 2**20:10.2f}   {name}" for name, size in self.parts.most_common(40) if size]
        )


class _FusedNorm(torch.autograd.Function):
    """The tensors that the GPU kernel of RMSNorm saves and returns, without values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class Live(TorchDispatchMode):
    """Counts the live storages of all operations; `phase` labels the storages created next."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[int, str]] = {}
        self.parts: Counter[str] = Counter()
        self.now, self.phase, self.peak = 0, "", Peak()

    def start(self, tensors: Iterator[torch.Tensor] | list[torch.Tensor], name: str) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._see(tensor, name)
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, f"{self.phase}: {func} {str(leaf.dtype)[6:]} {tuple(leaf.shape)}")
        self._note()
        return out

    def resized(self, tensor: torch.Tensor) -> None:
        """Count a storage again whose size was changed without a dispatched operation."""
        self._see(tensor, f"{self.phase}: gathered")
        self._note()

    def _see(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self.sizes.get(key)
        if before is None:
            weakref.finalize(storage, self._gone, key)
        elif before[0] == size:
            return
        else:
            self._count(-before[0], before[1])
            name = before[1]
        self.sizes[key] = (size, name)
        self._count(size, name)

    def _gone(self, key: int) -> None:
        size, name = self.sizes.pop(key)
        self._count(-size, name)

    def _count(self, size: int, name: str) -> None:
        self.now += size
        self.parts[name] += size

    def _note(self) -> None:
        if self.now > self.peak.bytes:
            self.peak = Peak(self.now, self.phase, Counter(self.parts))


def traced(run: Run, rank: int = 0, device: str = "cpu") -> dict[str, Peak]:
    """Peaks of the phases of the second step of one rank of a run, in a process of its own.

    Args:
        run: composed; DDP's reducer is not Python and can't be traced.
        rank: among all.
        device: "cuda" for norms as GPUs' kernel computes them, all else being as on a CPU.
    """
    return run_ranks(_traced, 1, run, rank, device, joined=False, timeout=600)[0]  # type: ignore[no-any-return]


def _traced(_: int, __: int, run: Run, rank: int, device: str) -> dict[str, Peak]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    train_step = build(run, dataclasses.replace(_world(run, rank), memory=lambda: fake))
    shape = (run.microbatches, run.microbatch_rows, run.training.seq_len)
    live, peaks = Live(), {}
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(mock.patch.object(F, "rms_norm", _fused_norm))
        stack.enter_context(fake)
        stack.enter_context(_watched(live))
        stack.enter_context(live)
        live.start((_local(p) for p in train_step.parameters()), "weights")
        for step in range(2):
            live.peak, live.phase = Peak(), f"{step} model"
            tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            documents = torch.zeros(shape, dtype=torch.int64) if run.dataset.mask_documents else None
            train_step.backward(Microbatches(tokens, targets, documents=documents), 1.0)
            peaks["model"], live.peak, live.phase = live.peak, Peak(), f"{step} update"
            train_step.norm()
            train_step.optimizer.step()
            peaks["update"] = live.peak
            train_step.optimizer.zero_grad(set_to_none=True)
    return peaks


def _world(run: Run, rank: int) -> mesh.World:
    size = run.layout.devices
    rank_info, device = RankInfo(rank, size, rank % 8, ""), torch.device("cpu")
    if size == 1:
        return mesh.World(rank_info, run.layout, device)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return mesh.build_world(rank_info, run.layout, device)


@contextmanager
def _watched(live: Live) -> Iterator[None]:
    """See storages that FSDP resizes; do not see the whole-sized tensors with which DTensor derives shapes."""

    def after(function: Any) -> Any:
        def run(tensor: torch.Tensor) -> None:
            function(tensor)
            live.resized(tensor)

        return run

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, *args, **kwargs)

    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)
    with (
        mock.patch.object(_fsdp_param, "alloc_storage", after(_fsdp_param.alloc_storage)),
        mock.patch.object(_fsdp_param, "free_storage", after(_fsdp_param.free_storage)),
        mock.patch.object(ShardingPropagator, name, unseen),
    ):
        yield


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter  # type: ignore[no-any-return]
