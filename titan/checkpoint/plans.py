"""The plan of a checkpoint: which rank writes which tensors. It is made at the first save and reused by later ones.

torch.distributed.checkpoint plans every save from scratch: each rank sends rank 0 an object for each of its tensors,
rank 0 makes the objects of the whole checkpoint, and pickles them as its metadata. With thousands of ranks that takes
minutes, in which rank 0's training thread hardly runs. Here each rank plans its own items and describes them in arrays
(`titan.checkpoint.assignment`), from which rank 0 also encodes the metadata (`titan.checkpoint.metadata_file`):

1. every rank: `propose` its holdings, or their digest if they are unchanged;
2. rank 0: `settle` which rank writes what, check that it makes up every tensor, and send each rank its part;
3. every rank: `accept` its part, `write` it, and send the positions in its file and a digest of all this;
4. rank 0: `conclude` by comparing the digests with its own and writing the metadata.

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

from titan.checkpoint.assignment import Assignment, Holdings, assign, describe, digest
from titan.checkpoint.metadata_file import Positions, encode
from titan.checkpoint.writer import Writer

Proposal = Holdings | bytes
"""A rank's holdings; their digest if they are unchanged."""
Part = bytes | None
"""One byte for each proposed item of a rank, 1 if the rank writes it; None: unchanged."""
Cut = tuple[str, DTensorSpec | torch.Size, torch.dtype, bool]
"""What determines a tensor's items: name, sharding, dtype, requires_grad."""


class RankPositions(NamedTuple):
    """Where a rank's written items are: its files, and int64 [items, 3] as bytes: file, offset, length in bytes."""

    files: tuple[str, ...]
    rows: bytes

    def digest(self) -> bytes:
        """Return 16 bytes that differ for other positions."""
        return digest(self.rows, *(name.encode() for name in self.files))


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
        self.forget()

    def forget(self) -> None:
        """Forget the plan: the next save makes a new one."""
        self.cuts: list[Cut] | None = None
        self.items: list[WriteItem] = []
        self.mine: list[WriteItem] = []
        self.proposed = self.part = b""
        self.positions: RankPositions | None = None
        self.shared = _SharedPlan()

    def propose(self, state: Mapping[str, Tensor]) -> Proposal:
        """Return the holdings of this rank's state; their digest if unchanged since the last save."""
        self.planner.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        cuts = [_cut(name, tensor) for name, tensor in state.items()]
        before, self.cuts = self.cuts, cuts
        if cuts == before:
            return self.proposed
        self.items = local_items(state)
        holdings = describe(self.items)
        self.proposed = holdings.digest()
        return holdings

    def settle(self, proposals: Sequence[Proposal]) -> list[Part]:
        """On rank 0: return each rank's part, so that each item is written by exactly one of its ranks.

        Raises:
            ValueError: when the ranks' items don't make up whole tensors, or a rank has another plan than rank 0.
        """
        return self.shared.settle(proposals)

    def accept(self, part: Part) -> None:
        """Store what this rank writes."""
        if part is not None:
            self.mine = [item for item, chosen in zip(self.items, part, strict=True) if chosen]
            self.part, self.positions = part, None

    def write(self, writer: Writer) -> Written:
        """Write this rank's part of the proposed state; return where its items are."""
        plan = SavePlan(self.mine, storage_data=_StoragePrefix(f"__{self.rank}_"))
        writes = writer.write_data(writer.prepare_local_plan(plan), self.planner)
        writes.wait()
        at = {result.index: result.storage_data for result in writes.value()}
        self.planner.state_dict = {}  # the state is not kept
        before, self.positions = self.positions, _positions([at[item.index] for item in self.mine])
        found = digest(self.proposed, self.part, self.positions.digest())
        return Written(None if self.positions == before else self.positions, found)

    def conclude(self, writer: Writer, written: Sequence[Written]) -> None:
        """On rank 0: write the metadata, once all ranks have written their parts.

        Raises:
            ValueError: when a rank has written by another plan than rank 0's.
        """
        assignment, positions = self.shared.conclude(written)
        writer.write_metadata(encode(assignment, positions, writer.storage_meta()))


class _SharedPlan:
    """The plan of all ranks, on rank 0."""

    def __init__(self) -> None:
        self.holdings: list[Holdings] = []
        self.digests: list[bytes] = []
        self.assignment: Assignment | None = None
        self.written: list[RankPositions | None] = []

    def settle(self, proposals: Sequence[Proposal]) -> list[Part]:
        """Return each rank's part; None for all if nothing has changed. See `Plans.settle`."""
        known = self.digests or [b""] * len(proposals)
        for rank, (proposal, expected) in enumerate(zip(proposals, known, strict=True)):
            if isinstance(proposal, bytes) and proposal != expected:
                raise ValueError(
                    f"rank {rank} has another plan of the checkpoint than rank 0; the next save plans anew"
                )
        if not any(isinstance(proposal, Holdings) for proposal in proposals):
            return [None] * len(proposals)
        self.holdings = _share_equal([self._known(*pair) for pair in enumerate(proposals)])
        self.digests = [holdings.digest() for holdings in self.holdings]
        self.assignment, self.written = assign(self.holdings), [None] * len(proposals)
        return list(self.assignment.parts)

    def _known(self, rank: int, proposal: Proposal) -> Holdings:
        return proposal if isinstance(proposal, Holdings) else self.holdings[rank]

    def conclude(self, written: Sequence[Written]) -> tuple[Assignment, Positions]:
        """Return what all ranks have written, and where. See `Plans.conclude`."""
        if self.assignment is None:
            raise ValueError("rank 0 has no plan of the checkpoint")
        pairs = zip(written, self.written, strict=True)
        self.written = [old if new.positions is None else new.positions for new, old in pairs]
        for rank, (positions, found) in enumerate(zip(self.written, written, strict=True)):
            plan = self.digests[rank], self.assignment.parts[rank]
            if positions is None or digest(*plan, positions.digest()) != found.digest:
                raise ValueError(f"rank {rank} has written by another plan of the checkpoint than rank 0's")
        return self.assignment, _join([positions for positions in self.written if positions is not None])


def local_items(state: Mapping[str, Tensor]) -> list[WriteItem]:
    """Return this rank's items of a state, as torch's planner makes them.

    For a dimension that is cut twice, torch lists all its offsets to find this rank's box. Tensors of one sharding have
    the same box, so that here it is computed once for each.
    """
    boxes: dict[DTensorSpec, ChunkStorageMetadata] = {}
    return [item for name, tensor in state.items() for item in _items(name, tensor, boxes)]


def _items(name: str, tensor: Tensor, boxes: dict[DTensorSpec, ChunkStorageMetadata]) -> list[WriteItem]:
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


def _cut(name: str, tensor: Tensor) -> Cut:
    placement = tensor._spec if isinstance(tensor, DTensor) else tensor.shape
    return name, placement, tensor.dtype, tensor.requires_grad


def _share_equal(holdings: Sequence[Holdings]) -> list[Holdings]:
    """Return the holdings of all ranks, with equal descriptions of tensors kept once."""
    known: dict[bytes, bytes] = {}
    return [held._replace(tensors=known.setdefault(held.tensors, held.tensors)) for held in holdings]


def _positions(places: Sequence[_StorageInfo]) -> RankPositions:
    """Return a rank's positions from those of torch's writer."""
    files = {name: number for number, name in enumerate(dict.fromkeys(at.relative_path for at in places))}
    rows = [(files[at.relative_path], at.offset, at.length) for at in places]
    return RankPositions(tuple(files), np.array(rows, np.int64).tobytes())


def _join(positions: Sequence[RankPositions]) -> Positions:
    """Return the positions of all ranks."""
    rows = [np.frombuffer(of_rank.rows, np.int64).reshape(-1, 3) for of_rank in positions]
    joined = np.concatenate(rows)
    bases = np.cumsum([0, *(len(of_rank.files) for of_rank in positions[:-1])])
    joined[:, 0] += np.repeat(bases, [len(of_rank) for of_rank in rows])
    return Positions([name for of_rank in positions for name in of_rank.files], joined)
