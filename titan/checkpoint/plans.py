"""The plan of a checkpoint: which rank writes which tensors. It is made at the first save and reused by later ones.

torch.distributed.checkpoint plans every save from scratch: each rank sends rank 0 an object for each of its tensors,
rank 0 makes the objects of the whole checkpoint, and pickles them as its metadata. With thousands of ranks that takes
minutes, in which rank 0's training thread hardly runs. Here each rank plans its own items and describes them in arrays
(`titan.checkpoint.assignment`), from which rank 0 also encodes the metadata (`titan.checkpoint.metadata_file`):

1. every rank: `local_plan` gives its holdings, or their digest if they are unchanged;
2. rank 0: `global_plan` decides which rank writes what, checks that this makes up every tensor, and gives each rank's
   part;
3. every rank: `set_plan` takes its part, `write_data` writes it, and gives the positions in its file and a digest of
   all this;
4. rank 0: `finish` compares the digests with its own and writes the metadata.

After a failed save every rank forgets its plan. If one did not, the digests differ and the save fails, before the
checkpoint is complete. The messages go through `titan.checkpoint.coordinator.Coordinator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan.checkpoint.assignment import Assignment, Holdings, assign_boxes, compute_digest, describe_items
from titan.checkpoint.metadata_file import Positions, encode_metadata
from titan.checkpoint.writer import CheckpointWriter

LocalPlan = Holdings | bytes
"""A rank's holdings; their digest if they are unchanged."""
ItemMask = bytes | None
"""One byte for each proposed item of a rank, 1 if the rank writes it; None: unchanged."""
TensorKey = tuple[str, DTensorSpec | torch.Size, torch.dtype, bool]
"""What determines a tensor's items: name, sharding, dtype, requires_grad."""


class RankPositions(NamedTuple):
    """Where a rank's written items are: its files, and int64 [items, 3] as bytes: file, offset, length in bytes."""

    files: tuple[str, ...]
    rows: bytes

    def compute_digest(self) -> bytes:
        """Return 16 bytes that differ for other positions."""
        return compute_digest(self.rows, *(name.encode() for name in self.files))


class Written(NamedTuple):
    """What a rank has written: the positions, None if unchanged; the digest of its holdings, its part and these."""

    positions: RankPositions | None
    digest: bytes


class Plans:
    """The plan of a run's saves, on one rank."""

    def __init__(self, rank: int) -> None:
        """Start without a plan; `rank` is this rank."""
        self.rank = rank
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forget_plan()

    def forget_plan(self) -> None:
        """Forget the plan: the next save makes a new one."""
        self.tensor_keys: list[TensorKey] | None = None
        self.items: list[WriteItem] = []
        self.assigned_items: list[WriteItem] = []
        self.holdings_digest = self.item_mask = b""
        self.positions: RankPositions | None = None
        self.rank0_plan = _GlobalPlan()

    def local_plan(self, state: Mapping[str, Tensor]) -> LocalPlan:
        """Return the holdings of this rank's state; their digest if unchanged since the last save."""
        self.planner.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        tensor_keys = [_make_key(name, tensor) for name, tensor in state.items()]
        previous_keys, self.tensor_keys = self.tensor_keys, tensor_keys
        if tensor_keys == previous_keys:
            return self.holdings_digest
        self.items = create_write_items(state)
        holdings = describe_items(self.items)
        self.holdings_digest = holdings.compute_digest()
        return holdings

    def global_plan(self, local_plans: Sequence[LocalPlan]) -> list[ItemMask]:
        """On rank 0: return each rank's part, so that each item is written by exactly one of its ranks.

        Raises:
            ValueError: when the ranks' items don't make up whole tensors, or a rank has another plan than rank 0.
        """
        return self.rank0_plan.global_plan(local_plans)

    def set_plan(self, item_mask: ItemMask) -> None:
        """Store what this rank writes."""
        if item_mask is not None:
            self.assigned_items = [item for item, is_written in zip(self.items, item_mask, strict=True) if is_written]
            self.item_mask, self.positions = item_mask, None

    def write_data(self, writer: CheckpointWriter) -> Written:
        """Write this rank's part of the proposed state; return where its items are."""
        plan = SavePlan(self.assigned_items, storage_data=_StoragePrefix(f"__{self.rank}_"))
        write_future = writer.write_data(writer.prepare_local_plan(plan), self.planner)
        write_future.wait()
        storage_infos = {result.index: result.storage_data for result in write_future.value()}
        self.planner.state_dict = {}  # the state is not kept
        previous, self.positions = (
            self.positions,
            _collect_positions([storage_infos[item.index] for item in self.assigned_items]),
        )
        write_digest = compute_digest(self.holdings_digest, self.item_mask, self.positions.compute_digest())
        return Written(None if self.positions == previous else self.positions, write_digest)

    def finish(self, writer: CheckpointWriter, written: Sequence[Written]) -> None:
        """On rank 0: write the metadata, once all ranks have written their parts.

        Raises:
            ValueError: when a rank has written by another plan than rank 0's.
        """
        assignment, positions = self.rank0_plan.finish(written)
        writer.write_metadata(encode_metadata(assignment, positions, writer.storage_meta()))


class _GlobalPlan:
    """The plan of all ranks, on rank 0."""

    def __init__(self) -> None:
        self.holdings: list[Holdings] = []
        self.digests: list[bytes] = []
        self.assignment: Assignment | None = None
        self.written: list[RankPositions | None] = []

    def global_plan(self, local_plans: Sequence[LocalPlan]) -> list[ItemMask]:
        """Return each rank's part; None for all if nothing has changed. See `Plans.global_plan`."""
        digests = self.digests or [b""] * len(local_plans)
        for rank, (local_plan, expected) in enumerate(zip(local_plans, digests, strict=True)):
            if isinstance(local_plan, bytes) and local_plan != expected:
                raise ValueError(
                    f"rank {rank} has another plan of the checkpoint than rank 0; the next save plans anew"
                )
        if not any(isinstance(local_plan, Holdings) for local_plan in local_plans):
            return [None] * len(local_plans)
        self.holdings = _deduplicate_tensors([self._find_holdings(*pair) for pair in enumerate(local_plans)])
        self.digests = [holdings.compute_digest() for holdings in self.holdings]
        self.assignment, self.written = assign_boxes(self.holdings), [None] * len(local_plans)
        return list(self.assignment.parts)

    def _find_holdings(self, rank: int, local_plan: LocalPlan) -> Holdings:
        return local_plan if isinstance(local_plan, Holdings) else self.holdings[rank]

    def finish(self, written: Sequence[Written]) -> tuple[Assignment, Positions]:
        """Return what all ranks have written, and where. See `Plans.finish`."""
        if self.assignment is None:
            raise ValueError("rank 0 has no plan of the checkpoint")
        pairs = zip(written, self.written, strict=True)
        self.written = [old if new.positions is None else new.positions for new, old in pairs]
        for rank, (positions, rank_written) in enumerate(zip(self.written, written, strict=True)):
            plan = self.digests[rank], self.assignment.parts[rank]
            if positions is None or compute_digest(*plan, positions.compute_digest()) != rank_written.digest:
                raise ValueError(f"rank {rank} has written by another plan of the checkpoint than rank 0's")
        return self.assignment, _join_positions([positions for positions in self.written if positions is not None])


def create_write_items(state: Mapping[str, Tensor]) -> list[WriteItem]:
    """Return this rank's items of a state, as torch's planner makes them.

    For a dimension that is cut twice, torch lists all its offsets to find this rank's box. Tensors of one sharding have
    the same box, so that here it is computed once for each.
    """
    boxes: dict[DTensorSpec, ChunkStorageMetadata] = {}
    return [item for name, tensor in state.items() for item in _create_tensor_items(name, tensor, boxes)]


def _create_tensor_items(name: str, tensor: Tensor, boxes: dict[DTensorSpec, ChunkStorageMetadata]) -> list[WriteItem]:
    if not isinstance(tensor, DTensor):
        return create_default_local_save_plan({name: tensor}, is_coordinator=False).items
    if tensor.device_mesh.get_coordinate() is None:
        return []
    if tensor._spec not in boxes:
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        boxes[tensor._spec] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    box, properties = boxes[tensor._spec], TensorProperties.create_from_tensor(tensor.to_local())
    data = TensorWriteData(box, properties, tensor.size())
    return [WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)]


def _make_key(name: str, tensor: Tensor) -> TensorKey:
    placement = tensor._spec if isinstance(tensor, DTensor) else tensor.shape
    return name, placement, tensor.dtype, tensor.requires_grad


def _deduplicate_tensors(holdings: Sequence[Holdings]) -> list[Holdings]:
    """Return the holdings of all ranks, with equal descriptions of tensors kept once."""
    shared_tensors: dict[bytes, bytes] = {}
    return [
        rank_holdings._replace(tensors=shared_tensors.setdefault(rank_holdings.tensors, rank_holdings.tensors))
        for rank_holdings in holdings
    ]


def _collect_positions(storage_infos: Sequence[_StorageInfo]) -> RankPositions:
    """Return a rank's positions from those of torch's writer."""
    files = {name: number for number, name in enumerate(dict.fromkeys(info.relative_path for info in storage_infos))}
    rows = [(files[info.relative_path], info.offset, info.length) for info in storage_infos]
    return RankPositions(tuple(files), np.array(rows, np.int64).tobytes())


def _join_positions(positions: Sequence[RankPositions]) -> Positions:
    """Return the positions of all ranks."""
    rows = [np.frombuffer(rank_positions.rows, np.int64).reshape(-1, 3) for rank_positions in positions]
    joined = np.concatenate(rows)
    bases = np.cumsum([0, *(len(rank_positions.files) for rank_positions in positions[:-1])])
    joined[:, 0] += np.repeat(bases, [len(rank_positions) for rank_positions in rows])
    return Positions([name for rank_positions in positions for name in rank_positions.files], joined)
