"""A save of many simulated ranks: rank 0's plan and metadata, from messages as ranks of a large run send them.

The tensors are those of a model under FSDP, tensor and pipeline parallelism with AdamW: matrices are split over shard
and tensor, vectors over shard alone (the tensor ranks have the same parts), and all ranks of a stage have its step
counters. Nothing but rank 0's metadata is written, and messages wait in a dictionary instead of torch's store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.measure.in_memory import DictStore
from titan.checkpoint.coordinator import Coordinator, pack_message
from titan.checkpoint.manifest import ManifestFile
from titan.checkpoint.save import CheckpointWriter
from titan.checkpoint.save_planner import (
    CachingSavePlanner,
    Holdings,
    RankPositions,
    WriteSummary,
    compute_digest,
    describe_items,
)
from titan.parallelism.exchange import StoreExchange
from titan.run.run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
HEADER = 1408
"""Bytes that `torch.save` adds to a tensor, about."""


def compute_parameter_sizes(run: Run) -> dict[str, tuple[int, ...]]:
    """Return the size of each parameter of a run's model by name."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in run.model.build().named_parameters()}


class SimulatedSave:
    """The ranks of a run, of which rank 0 saves."""

    def __init__(self, run: Run, sizes: dict[str, tuple[int, ...]]) -> None:
        """Take the run, for its layout, and the sizes of all parameters by name."""
        self.layout, self.ranks = run.layout, run.layout.devices
        self.stages = [_select_parameters(sizes, first, end) for first, end in run.staging.layers]
        self.sizes, self.store, self.planner = sizes, DictStore(), CachingSavePlanner(0)
        self.exchanges = [StoreExchange(self.store, rank, self.ranks) for rank in range(self.ranks)]
        self.coordinator = Coordinator(0, self.ranks, self.exchanges[0])

    @cached_property
    def templates(self) -> list[tuple[list[WriteItem], Holdings]]:
        """What the first rank of each stage has."""
        items = [list(self._make_items(names)) for names in self.stages]
        return [(stage_items, describe_items(stage_items)) for stage_items in items]

    def _make_items(self, names: Sequence[str]) -> Iterator[WriteItem]:
        for name in names:
            size = self.sizes[name]
            for key in (f"model.{name}", *(f"optimizer.{name}.{moment}" for moment in MOMENTS)):
                yield _make_item(key, size, self._count_parts(size))
            yield _make_item(f"optimizer.{name}.step", (), 1)

    def make_tensors(self) -> dict[str, Tensor]:
        """Return the state of a rank of the last stage, without memory. torch's process group must exist."""
        shape = self.layout.sharded, self.layout.tensor
        mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), _init_backend=False)
        matrix = (_StridedShard(0, split_factor=self.layout.tensor), Shard(0))  # FSDP over tensor parallelism
        tensors: dict[str, Tensor] = {}
        for name in self.stages[-1]:
            size = torch.Size(self.sizes[name])
            sharded = _make_tensor(size, mesh, matrix if len(size) > 1 else (Shard(0), Replicate()))
            tensors |= dict.fromkeys((f"model.{name}", *(f"optimizer.{name}.{moment}" for moment in MOMENTS)), sharded)
            tensors[f"optimizer.{name}.step"] = torch.empty((), device="meta")
        return tensors

    def _count_parts(self, size: Sequence[int]) -> int:
        return self.layout.sharded * (self.layout.tensor if len(size) > 1 else 1)

    def make_holdings(self, rank: int) -> Holdings:
        """Return what a rank has."""
        coordinates = self.layout.compute_coordinates(rank)
        items, first = self.templates[coordinates["pipeline"] if len(self.templates) > 1 else 0]
        boxes = np.frombuffer(first.boxes, np.int64).reshape(-1, 2, first.dims).copy()
        dims = np.array([len(item.tensor_data.size) if item.tensor_data else 0 for item in items])
        matrix_part = coordinates["shard"] * self.layout.tensor + coordinates["tensor"]
        row_counts = np.array(
            [item.tensor_data.size[0] if item.tensor_data and item.tensor_data.size else 1 for item in items]
        )
        part_index = np.where(dims > 1, matrix_part, np.where(dims == 1, coordinates["shard"], 0))
        boxes[:, 0, 0] = np.minimum(boxes[:, 1, 0] * part_index, row_counts)
        boxes[:, 1, 0] = np.minimum(boxes[:, 1, 0], row_counts - boxes[:, 0, 0])
        return first._replace(boxes=boxes.tobytes())

    def send_holdings(self, first: bool) -> None:
        """Send rank 0 what each other rank has, or its digest."""
        for rank in range(1, self.ranks):
            if not first:
                self.exchanges[rank].broadcast()  # the end of the save before
            holdings = self.make_holdings(rank) if first else self.planner.global_plan.digests[rank]
            self.exchanges[rank].gather(pack_message((holdings, None)))

    def make_global_plan(self, first: bool) -> bytes | None:
        """Do what rank 0 does before ranks write, and return its part."""
        own_holdings = self.make_holdings(0) if first else self.planner.global_plan.digests[0]
        return self.coordinator.scatter(lambda: own_holdings, self.planner.create_global_plan)

    def send_positions(self, first: bool) -> None:
        """Send rank 0 where each other rank has written its items, or the digest of that."""
        for rank in range(1, self.ranks):
            self.exchanges[rank].scatter()
            files = {f"__{rank}_0.distcp": ManifestFile(2**30, "0123abcd")}
            self.exchanges[rank].gather(pack_message(((self._make_summary(rank, first), files), None)))

    def _make_summary(self, rank: int, first: bool) -> WriteSummary:
        plan = self.planner.global_plan
        assert plan.assignment is not None
        part = plan.assignment.parts[rank]
        lengths = np.full(sum(part), 2**20 + HEADER)
        rows = np.stack([np.zeros_like(lengths), lengths.cumsum() - lengths, lengths], 1)
        positions = RankPositions((f"__{rank}_0.distcp",), rows.tobytes())
        digest = compute_digest(plan.digests[rank], part, positions.compute_digest())
        return WriteSummary(positions if first else None, digest)

    def finish_save(self, first: bool, folder: Path) -> None:
        """Do what rank 0 does after ranks have written."""
        writer, own_summary = CheckpointWriter(folder), self._make_summary(0, first)
        self.coordinator.gather(
            lambda: (own_summary, dict[str, ManifestFile]()),
            lambda ranks: writer.write_metadata(*self.planner.merge_summaries([summary for summary, _ in ranks])),
        )


def _select_parameters(sizes: dict[str, tuple[int, ...]], first: int, end: int) -> list[str]:
    """Return the parameters of the blocks from `first` to `end`, with the embedding before and the head behind them."""
    blocks = 1 + max(int(name.split(".")[1]) for name in sizes if name.startswith("layers."))
    block_names = [name for name in sizes if name.startswith("layers.") and first <= int(name.split(".")[1]) < end]
    other_names = [name for name in sizes if not name.startswith("layers.")]
    return [
        *(name for name in other_names if "emb" in name and first == 0),
        *block_names,
        *(name for name in other_names if "emb" not in name and end == blocks),
    ]


def _make_tensor(size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    shape, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    local, stride = torch.empty(shape, device="meta"), torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def _make_item(key: str, size: tuple[int, ...], parts: int) -> WriteItem:
    """Return the first part of a tensor that is split along its first dimension."""
    box = torch.Size([-(-size[0] // parts), *size[1:]]) if size else torch.Size([])
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), box)
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(size))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
