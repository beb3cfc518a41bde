"""Plan a save: which rank writes which tensors. The plan is made at the first save and reused by later ones.

torch.distributed.checkpoint plans every save from scratch: each rank sends rank 0 an object for each of its tensors,
rank 0 makes the objects of the whole checkpoint, and pickles them as its metadata. With thousands of ranks that takes
minutes, in which rank 0's training thread hardly runs. Here each rank plans its own items and describes them in arrays
(`Holdings`), from which the metadata are encoded too (`titan.checkpoint.metadata_file`). The first three steps have the
names of torch's save planner:

1. every rank: `create_local_plan` gives its holdings, or their digest if they are unchanged;
2. rank 0: `create_global_plan` decides which rank writes what, checks that this makes up every tensor, and gives each
   rank's part;
3. every rank: `finish_plan` takes its part, and gives its items;
4. every rank, once they are written: `finish_write` gives the positions in its file and a digest of all this;
5. rank 0: `merge_summaries` compares the digests with its own, and gives all items and positions.

After a failed save every rank forgets its plan. If one did not, the digests differ and the save fails, before the
checkpoint is complete. `titan.checkpoint.save` runs the steps and sends the messages.

A part is a box of a tensor: offsets and sizes along each dimension. The boxes of all ranks are integer arrays, so that
the time on rank 0 grows with their number at the speed of sorting, and Python's interpreter lock is free meanwhile:
`assign_boxes` gives each box to one of the ranks that have it, and checks that the chosen boxes make up every tensor,
each element once. In arrays all tensors have D dimensions, the largest number of any: the others have sizes of 1 behind
their own.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan.dataset.permutation import GOLDEN, hash64

Integers = NDArray[np.int64]
OFFSETS, SIZES = range(2)
"""Indices into the second dimension of boxes [boxes, 2, D]."""


class TensorInfo(NamedTuple):
    """A whole tensor of a checkpoint."""

    name: str
    size: tuple[int, ...]
    properties: TensorProperties


class Holdings(NamedTuple):
    """A rank's items.

    Attributes:
        tensors: the `TensorInfo` of each item, as compressed JSON; the same bytes on ranks with the same tensors.
        boxes: int64 [items, 2, dims] as bytes: each item's offsets and sizes.
        dims: the largest number of dimensions of these tensors, at least 1.
    """

    tensors: bytes
    boxes: bytes
    dims: int

    def compute_digest(self) -> bytes:
        """Return 16 bytes that differ for other holdings."""
        return compute_digest(self.tensors, self.boxes)


def compute_digest(*parts: bytes) -> bytes:
    """Return 16 bytes that differ for other parts."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def describe_items(items: Sequence[WriteItem]) -> Holdings:
    """Describe a rank's items."""
    infos, boxes = [], []
    for item in items:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        properties = item.tensor_data.properties  # those of torch's that differ between tensors of checkpoints
        dtype = str(properties.dtype).removeprefix("torch.")
        size = tuple(item.tensor_data.size)
        infos.append((item.index.fqn, size, dtype, properties.requires_grad, properties.pin_memory))
        boxes.append(item.tensor_data.chunk)
    dims = max([1, *(len(size) for _, size, *_ in infos)])
    extents = [(_pad_values(box.offsets, dims, 0), _pad_values(box.sizes, dims, 1)) for box in boxes]
    return Holdings(zlib.compress(json.dumps(infos).encode(), 1), np.array(extents, np.int64).tobytes(), dims)


@cache
def _decode_properties(dtype: str, requires_grad: bool, pin_memory: bool) -> TensorProperties:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    return TensorProperties(found, requires_grad=requires_grad, pin_memory=pin_memory)


@dataclass(frozen=True)
class Assignment:
    """What all ranks write.

    Attributes:
        tensors: all tensors of the checkpoint.
        parts: for each rank one byte per item, 1 if the rank writes it.
        tensor: int64 [written]: the number of the tensor of each written box, by rank and in the order of its items.
        boxes: int64 [written, 2, D]: the written boxes.
        order: int64 [written]: the permutation that sorts them by tensor and offset.
    """

    tensors: list[TensorInfo]
    parts: list[bytes]
    tensor: Integers
    boxes: Integers
    order: Integers


@dataclass(frozen=True)
class Positions:
    """Where the written boxes of an `Assignment` are.

    Attributes:
        files: the names of all files.
        rows: int64 [written, 3]: index of the file, offset and length in bytes.
    """

    files: Sequence[str]
    rows: Integers


def assign_boxes(holdings: Sequence[Holdings]) -> Assignment:
    """Assign each box to one of the ranks that have it: the one that has the fewest bytes to write.

    Raises:
        ValueError: when the ranks have different tensors under one name, or their boxes don't make up a whole tensor.
    """
    tensors, rank_boxes = _collect_boxes(holdings)
    dims = rank_boxes.boxes.shape[2]
    points = _Points(np.array([_pad_values(info.size, dims, 1) for info in tensors], np.int64).reshape(-1, dims))
    _check_bounds(tensors, rank_boxes, points.sizes)
    keys = points.number_points(rank_boxes.tensor, rank_boxes.boxes[:, OFFSETS])
    by_key = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[by_key], prepend=-1))  # of each distinct box among those of all ranks
    rows, item_sizes = by_key[first], np.array([info.properties.dtype.itemsize for info in tensors], np.int64)
    sizes = np.maximum(rank_boxes.boxes[rows, SIZES].prod(1) * item_sizes[rank_boxes.tensor[rows]], 1)  # bytes
    chosen_rows = by_key[_choose_rows(rank_boxes.rank[by_key], first, sizes, len(holdings))]
    _check_cover(tensors, rank_boxes.tensor[chosen_rows], rank_boxes.boxes[chosen_rows], points)
    written = np.sort(chosen_rows)
    mask = np.zeros(len(keys), np.uint8)
    mask[chosen_rows] = 1
    parts = [mask[start:end].tobytes() for start, end in pairwise(rank_boxes.starts)]
    return Assignment(
        tensors, parts, rank_boxes.tensor[written], rank_boxes.boxes[written], np.searchsorted(written, chosen_rows)
    )


class _RankBoxes(NamedTuple):
    """The boxes of all ranks, by rank: of which tensor and rank, extents [boxes, 2, D], and where each rank's begin."""

    tensor: Integers
    rank: Integers
    boxes: Integers
    starts: list[int]


def _collect_boxes(holdings: Sequence[Holdings]) -> tuple[list[TensorInfo], _RankBoxes]:
    """Return all tensors, and all ranks' boxes."""
    tensors, numbers = _number_tensors(holdings)
    counts = [len(of_rank) for of_rank in numbers]
    starts = list(accumulate(counts, initial=0))
    boxes = np.zeros((starts[-1], 2, max(rank_holdings.dims for rank_holdings in holdings)), np.int64)
    boxes[:, SIZES] = 1
    for rank_holdings, start, end in zip(holdings, starts[:-1], starts[1:], strict=True):
        held = np.frombuffer(rank_holdings.boxes, np.int64)
        boxes[start:end, :, : rank_holdings.dims] = held.reshape(-1, 2, rank_holdings.dims)
    ranks = np.repeat(np.arange(len(holdings)), counts)
    return tensors, _RankBoxes(np.concatenate(numbers), ranks, boxes, starts)


def _number_tensors(holdings: Sequence[Holdings]) -> tuple[list[TensorInfo], list[Integers]]:
    """Return all tensors, and for each rank the numbers of its items' tensors among them."""
    tensors: dict[str, tuple[int, TensorInfo, int]] = {}
    tensor_numbers: dict[bytes, Integers] = {}
    for rank, rank_holdings in enumerate(holdings):
        if rank_holdings.tensors not in tensor_numbers:
            infos = [
                TensorInfo(name, tuple(size), _decode_properties(*properties))
                for name, size, *properties in json.loads(zlib.decompress(rank_holdings.tensors))
            ]
            for info in infos:
                _, other, other_rank = tensors.setdefault(info.name, (len(tensors), info, rank))
                if (info.size, info.properties.dtype) != (other.size, other.properties.dtype):
                    raise ValueError(
                        f"the ranks plan different checkpoints: {info.name} is {list(info.size)} in "
                        f"{info.properties.dtype} on rank {rank}, and {list(other.size)} in "
                        f"{other.properties.dtype} on rank {other_rank}"
                    )
            tensor_numbers[rank_holdings.tensors] = np.array([tensors[info.name][0] for info in infos], np.int64)
    infos = [info for _, info, _ in tensors.values()]
    return infos, [tensor_numbers[rank_holdings.tensors] for rank_holdings in holdings]


class _Points:
    """Numbers the corners of boxes: integers that differ for other points and tensors.

    A box may end, and an empty one begin, at a tensor's end, so a dimension of size n has n + 1 coordinates.
    """

    def __init__(self, sizes: Integers) -> None:
        """Take the sizes [tensors, D]."""
        self.sizes = sizes
        spans = sizes[:, ::-1] + 1
        self.strides = np.concatenate([np.ones_like(spans[:, :1]), spans.cumprod(1)[:, :-1]], 1)[:, ::-1]
        starts = list(accumulate((math.prod(span) for span in spans.tolist()), initial=0))
        if starts[-1] >= 2**63:
            raise ValueError(f"a checkpoint of {starts[-1]:,} elements is too large")
        self.starts: Integers = np.array(starts[:-1], np.int64)

    def number_points(self, tensor: Integers, points: Integers) -> Integers:
        """Return the numbers [n] of points [n, D] of the tensors [n]."""
        numbers = self.starts[tensor]
        for dim in range(points.shape[1]):
            numbers += points[:, dim] * self.strides[tensor, dim]
        return numbers


# --- which rank writes a box


def _choose_rows(ranks: Integers, first: Integers, sizes: Integers, world_size: int) -> Integers:
    """Return for each distinct box the row of the rank that writes it.

    Boxes that the same ranks have are shared out together. Most ranks' boxes are alike, and are shared out alike.

    Args:
        ranks: [rows]: the rank of each row; the rows of a box follow each other.
        first: [boxes]: the first row of each box.
        sizes: [boxes]: bytes.
    """
    counts = np.diff(first, append=len(ranks))
    chosen_rows, loads = first.copy(), np.zeros(world_size, np.int64)
    np.add.at(loads, ranks[first[counts == 1]], sizes[counts == 1])
    choices: dict[tuple[bytes, bytes], Integers] = {}
    for boxes in _group_by_ranks(_mix_bits(ranks), first, counts):
        holders = ranks[first[boxes[0]] : first[boxes[0]] + counts[boxes[0]]]
        relative = loads[holders] - loads[holders].min()
        key = relative.tobytes(), sizes[boxes].tobytes()
        if key not in choices:
            choices[key] = _balance_loads(relative.tolist(), sizes[boxes])
        chosen_rows[boxes] += choices[key]
        np.add.at(loads, holders[choices[key]], sizes[boxes])
    return chosen_rows


def _group_by_ranks(mixed: NDArray[np.uint64], first: Integers, counts: Integers) -> list[Integers]:
    """Return the boxes that several ranks have, in groups that the same ranks have; groups with most ranks last."""
    replicated = np.flatnonzero(counts > 1)
    if not len(replicated):
        return []
    signature = np.add.reduceat(mixed, first)[replicated]
    order = np.lexsort((signature, counts[replicated]))
    changes = np.diff(signature[order]).astype(bool) | np.diff(counts[replicated][order]).astype(bool)
    return np.split(replicated[order], np.flatnonzero(changes) + 1)


def _balance_loads(loads: Sequence[int], sizes: Integers) -> Integers:
    """Return for each box the index of the rank that writes it: the largest first, each to the least loaded rank."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    writers = np.empty(len(sizes), np.int64)
    for box in np.argsort(-sizes, kind="stable").tolist():
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + int(sizes[box]), rank))
        writers[box] = rank
    return writers


# --- whether the chosen boxes make up the tensors


def _check_bounds(tensors: Sequence[TensorInfo], rank_boxes: _RankBoxes, sizes: Integers) -> None:
    offsets, extents = rank_boxes.boxes[:, OFFSETS], rank_boxes.boxes[:, SIZES]
    outside = ((offsets < 0) | (extents < 0) | (offsets + extents > sizes[rank_boxes.tensor])).any(1)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(
            f"the part that rank {rank_boxes.rank[row]} has of {tensors[rank_boxes.tensor[row]].name} is outside of it"
        )


def _check_cover(tensors: Sequence[TensorInfo], tensor: Integers, boxes: Integers, points: _Points) -> None:
    """Check that boxes, sorted by tensor, make up each tensor, with each element in one box.

    A box is determined by its corners with alternating signs. Boxes make up a tensor without gaps and overlaps exactly
    if their corners cancel but for those of the tensor. Each corner counts as a number of 64 random bits, so that wrong
    boxes pass with a probability of 2^-64.
    """
    first = np.flatnonzero(np.diff(tensor, prepend=-1))
    sums = np.add.reduceat(_sum_corners(tensor, boxes, points), first)
    tensor_boxes = np.stack([np.zeros_like(points.sizes), points.sizes], 1)
    uncovered = np.flatnonzero(sums != _sum_corners(np.arange(len(tensors)), tensor_boxes, points))
    if len(uncovered):
        suffix = f", nor those of {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
        raise ValueError(
            f"the parts that the ranks have of {tensors[uncovered[0]].name} don't make up the tensor{suffix}"
        )


def _sum_corners(tensor: Integers, boxes: Integers, points: _Points) -> NDArray[np.uint64]:
    """Return for each box the sum of its corners' numbers with alternating signs, modulo 2^64."""
    total = np.zeros(len(boxes), np.uint64)
    for corner in product((0, 1), repeat=boxes.shape[2]):
        numbers = _mix_bits(points.number_points(tensor, boxes[:, OFFSETS] + boxes[:, SIZES] * np.array(corner)))
        total = total - numbers if sum(corner) % 2 else total + numbers
    return total


def _mix_bits(numbers: Integers) -> NDArray[np.uint64]:
    """Return 64 bits for each number that look random."""
    return hash64(numbers.astype(np.uint64) + np.uint64(GOLDEN))


def _pad_values(values: Sequence[Any], dims: int, value: int) -> tuple[int, ...]:
    return (*values, *[value] * (dims - len(values)))


# --- the plan of a run's saves

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
