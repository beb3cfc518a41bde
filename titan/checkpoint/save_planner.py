"""Plan a save: which rank writes which tensors. The plan is made at the first save and reused by later ones.

torch.distributed.checkpoint plans every save from scratch: each rank sends rank 0 an object for each of its tensors,
rank 0 makes the objects of the whole checkpoint, and pickles them as its metadata. With thousands of ranks that takes
minutes, in which rank 0's training thread hardly runs. Here each rank plans its own items and describes them in arrays
(`titan.checkpoint.assignment`), from which the metadata are encoded too (`titan.checkpoint.metadata_file`). The first
three steps have the names of torch's save planner:

1. every rank: `create_local_plan` gives its holdings, or their digest if they are unchanged;
2. rank 0: `create_global_plan` decides which rank writes what, checks that this makes up every tensor, and gives each
   rank's part;
3. every rank: `finish_plan` takes its part, and gives its items;
4. every rank, once they are written: `finish_write` gives the positions in its file and a digest of all this;
5. rank 0: `merge_summaries` compares the digests with its own, and gives all items and positions.

After a failed save every rank forgets its plan. If one did not, the digests differ and the save fails, before the
checkpoint is complete. `titan.checkpoint.save` runs the steps and sends the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan.checkpoint.assignment import Assignment, Holdings, assign_boxes, compute_digest, describe_items
from titan.checkpoint.metadata_file import Positions

LocalPlan = Holdings | bytes
"""A rank's holdings; their digest if they are unchanged."""
ItemMask = bytes | None
"""A rank's part of the global plan: one byte for each of its items, 1 if the rank writes it; None: unchanged."""
TensorKey = tuple[str, DTensorSpec | torch.Size, torch.dtype, bool]
"""What determines a tensor's items: name, sharding, dtype, requires_grad."""


class RankPositions(NamedTuple):
    """Where a rank's written items are: its files, and int64 [items, 3] as bytes: file, offset, length in bytes."""

    files: tuple[str, ...]
    rows: bytes

    def compute_digest(self) -> bytes:
        """Return 16 bytes that differ for other positions."""
        return compute_digest(self.rows, *(name.encode() for name in self.files))


class WriteSummary(NamedTuple):
    """What a rank has written: the positions, None if unchanged; the digest of its holdings, its part and these."""

    positions: RankPositions | None
    digest: bytes


@dataclass
class GlobalPlan:
    """The plan of all ranks, on rank 0.

    Attributes:
        holdings: each rank's holdings.
        digests: the digests of these.
        assignment: what all ranks write.
        positions: where each rank has written its items; None before its first write.
    """

    holdings: list[Holdings] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    assignment: Assignment | None = None
    positions: list[RankPositions | None] = field(default_factory=list)


class CachingSavePlanner:
    """The plan of a run's saves, on one rank.

    Attributes:
        resolver: torch's planner, from which a writer gets the data of the items.
        global_plan: the plan of all ranks, on rank 0.
    """

    def __init__(self, rank: int) -> None:
        """Start without a plan; `rank` is this rank."""
        self.rank = rank
        self.resolver = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forget_plan()

    def forget_plan(self) -> None:
        """Forget the plan, and the state of a save that has failed: the next save makes a new one."""
        self.resolver.state_dict = {}
        self.tensor_keys: list[TensorKey] | None = None
        self.items: list[WriteItem] = []
        self.assigned_items: list[WriteItem] = []
        self.holdings_digest = self.item_mask = b""
        self.positions: RankPositions | None = None
        self.global_plan = GlobalPlan()

    def create_local_plan(self, state: Mapping[str, Tensor]) -> LocalPlan:
        """Return the holdings of this rank's state; their digest if unchanged since the last save."""
        self.resolver.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        tensor_keys = [
            (name, tensor._spec if isinstance(tensor, DTensor) else tensor.shape, tensor.dtype, tensor.requires_grad)
            for name, tensor in state.items()
        ]
        previous_keys, self.tensor_keys = self.tensor_keys, tensor_keys
        if tensor_keys == previous_keys:
            return self.holdings_digest
        self.items = create_write_items(state)
        holdings = describe_items(self.items)
        self.holdings_digest = holdings.compute_digest()
        return holdings

    def create_global_plan(self, local_plans: Sequence[LocalPlan]) -> list[ItemMask]:
        """On rank 0: return each rank's part, so that each item is written by exactly one of its ranks.

        Returns:
            One part for each rank; None for all if nothing has changed.

        Raises:
            ValueError: when the ranks' items don't make up whole tensors, or a rank has another plan than rank 0.
        """
        digests = self.global_plan.digests or [b""] * len(local_plans)
        for rank, (plan, digest) in enumerate(zip(local_plans, digests, strict=True)):
            if isinstance(plan, bytes) and plan != digest:
                raise ValueError(
                    f"rank {rank} has another plan of the checkpoint than rank 0; the next save plans anew"
                )
        if not any(isinstance(plan, Holdings) for plan in local_plans):
            return [None] * len(local_plans)
        earlier, shared = self.global_plan.holdings, dict[bytes, bytes]()
        holdings = [plan if isinstance(plan, Holdings) else earlier[rank] for rank, plan in enumerate(local_plans)]
        # equal descriptions of tensors are kept once
        holdings = [held._replace(tensors=shared.setdefault(held.tensors, held.tensors)) for held in holdings]
        digests = [rank_holdings.compute_digest() for rank_holdings in holdings]
        assignment = assign_boxes(holdings)
        self.global_plan = GlobalPlan(holdings, digests, assignment, [None] * len(local_plans))
        return list(assignment.parts)

    def finish_plan(self, item_mask: ItemMask) -> SavePlan:
        """Return what this rank writes, from its part of the global plan."""
        if item_mask is not None:
            self.assigned_items = [item for item, is_written in zip(self.items, item_mask, strict=True) if is_written]
            self.item_mask, self.positions = item_mask, None
        return SavePlan(self.assigned_items, storage_data=_StoragePrefix(f"__{self.rank}_"))

    def finish_write(self, results: Sequence[WriteResult]) -> WriteSummary:
        """Return where this rank's items are, from the results of writing them; the state is no longer kept."""
        self.resolver.state_dict = {}
        storage_infos = {result.index: result.storage_data for result in results}
        infos = [storage_infos[item.index] for item in self.assigned_items]
        files = {name: number for number, name in enumerate(dict.fromkeys(info.relative_path for info in infos))}
        rows = [(files[info.relative_path], info.offset, info.length) for info in infos]
        positions = RankPositions(tuple(files), np.array(rows, np.int64).tobytes())
        previous, self.positions = self.positions, positions
        write_digest = compute_digest(self.holdings_digest, self.item_mask, positions.compute_digest())
        return WriteSummary(None if positions == previous else positions, write_digest)

    def merge_summaries(self, summaries: Sequence[WriteSummary]) -> tuple[Assignment, Positions]:
        """On rank 0: return what all ranks have written, and where.

        Raises:
            ValueError: when a rank has written by another plan than rank 0's.
        """
        plan = self.global_plan
        if plan.assignment is None:
            raise ValueError("rank 0 has no plan of the checkpoint")
        pairs = zip(summaries, plan.positions, strict=True)
        plan.positions = [old if summary.positions is None else summary.positions for summary, old in pairs]
        for rank, (positions, summary) in enumerate(zip(plan.positions, summaries, strict=True)):
            rank_plan = plan.digests[rank], plan.assignment.parts[rank]
            if positions is None or compute_digest(*rank_plan, positions.compute_digest()) != summary.digest:
                raise ValueError(f"rank {rank} has written by another plan of the checkpoint than rank 0's")
        all_positions = [positions for positions in plan.positions if positions is not None]
        rows = [np.frombuffer(positions.rows, np.int64).reshape(-1, 3) for positions in all_positions]
        joined = np.concatenate(rows)
        bases = np.cumsum([0, *(len(positions.files) for positions in all_positions[:-1])])
        joined[:, 0] += np.repeat(bases, [len(rank_rows) for rank_rows in rows])
        return plan.assignment, Positions([name for positions in all_positions for name in positions.files], joined)


def create_write_items(state: Mapping[str, Tensor]) -> list[WriteItem]:
    """Return this rank's items of a state, as torch's planner makes them.

    For a dimension that is cut twice, torch lists all its offsets to find this rank's box. Tensors of one sharding have
    the same box, so that here it is computed once for each.
    """
    boxes: dict[DTensorSpec, ChunkStorageMetadata] = {}
    items: list[WriteItem] = []
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            items += create_default_local_save_plan({name: tensor}, is_coordinator=False).items
        elif tensor.device_mesh.get_coordinate() is not None:
            if tensor._spec not in boxes:
                shape, offset = compute_local_shape_and_global_offset(
                    tensor.shape, tensor.device_mesh, tensor.placements
                )
                boxes[tensor._spec] = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            box, properties = boxes[tensor._spec], TensorProperties.create_from_tensor(tensor.to_local())
            data = TensorWriteData(box, properties, tensor.size())
            items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
    return items
