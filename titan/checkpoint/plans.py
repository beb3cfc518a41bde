"""Which rank writes which tensors of a checkpoint: agreed at a run's first save, and kept for the later ones.

torch.distributed.checkpoint plans every save anew: each rank sends the list of what it holds to rank 0, gets back what
of that it is to write, sends where in its file each tensor lies, and gets the metadata of the whole checkpoint, which
only rank 0 writes. Here its planner is asked once, for parts that don't overlap. A `Talk` carries the messages:

1. every rank: `propose` what it holds; None where that is as at the last save;
2. rank 0: `settle` who writes what, and give each rank its part; None where nothing has changed;
3. every rank: `accept` its part, `write` it, and report where each tensor lies; None where that is as before;
4. rank 0: `conclude` with the metadata, which it keeps in the form in which they are written.

After a save that failed every rank forgets, so that no two ranks remember different plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from titan.checkpoint.writer import Writer

Proposal = list[WriteItem] | None
Part = bytes | None
"""A byte for each item that a rank has proposed, 1 where it is to write it; None where that is as before."""
Places = list[tuple[str, int, int]]
"""For each item that a rank has written: the file, and offset and length in it in bytes."""


Cut = tuple[str, DTensorSpec | torch.Size, torch.dtype, bool]
"""What a tensor's items follow from: name, how it lies on the ranks, type, whether it takes gradients."""


class Plans:
    """The plan of a run's saves, from one rank."""

    def __init__(self, rank: int) -> None:
        """Know nothing yet; `rank` is this one's number."""
        self.rank = rank
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forget()

    def forget(self) -> None:
        """Plan the next save anew."""
        self.cuts: list[Cut] | None = None
        self.held: list[WriteItem] = []
        self.mine: list[WriteItem] = []
        self.places: Places | None = None
        self.proposals: list[list[WriteItem]] = []
        self.plans: list[SavePlan] = []
        self.found: list[Places] = []
        self.metadata = Metadata({})
        self.content: tuple[bytes, str] | None = None

    def propose(self, state: Mapping[str, Tensor]) -> Proposal:
        """What this rank holds of the state; None where it is what it held at the last save."""
        self.planner.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        cuts = [_cut(name, tensor) for name, tensor in state.items()]
        before, self.cuts = self.cuts, cuts
        if cuts == before:
            return None
        self.held = self.planner.create_local_plan().items
        return self.held

    def settle(self, proposals: Sequence[Proposal]) -> list[Part]:
        """On rank 0: each rank's part, so that each item is written by one of the ranks that hold it.

        Raises:
            ValueError: when the parts that ranks hold don't make whole tensors.
        """
        if self.proposals and all(proposal is None for proposal in proposals):
            return [None] * len(proposals)
        before = self.proposals or [[] for _ in proposals]
        self.proposals = [old if new is None else new for new, old in zip(proposals, before, strict=True)]
        parts = shared_out(self.proposals)
        mine = [_chosen(items, part) for items, part in zip(self.proposals, parts, strict=True)]
        self.plans, self.metadata = self.planner.create_global_plan([SavePlan(items) for items in mine])
        self.metadata.planner_data = {name: (name,) for name in self.metadata.state_dict_metadata}
        self.found, self.content = [], None
        return list(parts)

    def accept(self, part: Part) -> None:
        """Take note of what this rank is to write."""
        if part is not None:
            self.mine = _chosen(self.held, part)
            self.places = None

    def write(self, writer: Writer) -> Places | None:
        """Write this rank's part of the state that was proposed; where it lies, None where that is as before."""
        plan = SavePlan(self.mine, storage_data=_StoragePrefix(f"__{self.rank}_"))
        writes = writer.write_data(writer.prepare_local_plan(plan), self.planner)
        writes.wait()
        at = {result.index: result.storage_data for result in writes.value()}
        places = [(s.relative_path, s.offset, s.length) for s in (at[item.index] for item in self.mine)]
        before, self.places = self.places, places
        self.planner.state_dict = {}  # the state is not kept
        return None if places == before else places

    def conclude(self, writer: Writer, places: Sequence[Places | None]) -> None:
        """On rank 0: write the metadata, once all ranks have written their parts."""
        if any(new is not None for new in places):
            before: Sequence[Places] = self.found or [[] for _ in places]
            self.found = [old if new is None else new for new, old in zip(places, before, strict=True)]
            self.content = None
        if self.content is None:
            writer.finish(self.metadata, [_results(p, f) for p, f in zip(self.plans, self.found, strict=True)])
            self.content = writer.metadata()
        else:
            writer.finish_as(self.content)


def _cut(name: str, tensor: Tensor) -> Cut:
    lies = tensor._spec if isinstance(tensor, DTensor) else tensor.shape
    return name, lies, tensor.dtype, tensor.requires_grad


def shared_out(held: Sequence[list[WriteItem]]) -> list[bytes]:
    """For each rank a byte for each item that it holds, 1 where it is to write it: each is written once.

    Of those that hold an item, that rank writes it that has the fewest bytes to write so far. Lists that are the same
    object, as replicas' are, are gone through once: torch's own planner goes through each rank's.
    """
    ranks: dict[int, list[int]] = {}
    for rank, items in enumerate(held):
        ranks.setdefault(id(items), []).append(rank)
    holders: dict[MetadataIndex, list[tuple[int, int]]] = {}
    for key, same in ranks.items():
        for position, item in enumerate(held[same[0]]):
            holders.setdefault(item.index, []).append((key, position))
    parts, load = [bytearray(len(items)) for items in held], [0] * len(held)
    for places in holders.values():
        rank, position = min(((r, at) for key, at in places for r in ranks[key]), key=lambda found: load[found[0]])
        load[rank] += held[rank][position].tensor_storage_size() or 1
        parts[rank][position] = 1
    return [bytes(part) for part in parts]


def _chosen(items: Sequence[WriteItem], part: bytes) -> list[WriteItem]:
    return [item for item, chosen in zip(items, part, strict=True) if chosen]


def _results(plan: SavePlan, places: Places) -> list[WriteResult]:
    """What a rank has written, as torch's writer wants it."""
    pairs = zip(plan.items, places, strict=True)
    return [WriteResult(item.index, length, _StorageInfo(file, at, length)) for item, (file, at, length) in pairs]
